"""Servers that stop, die, are cut off or never answer, behind a store that goes on: how late do its gets become?

Two threads get prompts that are in the remote tier alone, a third puts, all the time: before the trouble, in it, and
until the breakers of the store are closed again. Run as a module it does so within a network of its own, whose loopback
drops what is sent: `unshare -n python -m benchmarks.drills.deadline FOLDER`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.drills.prompts import IDENTITY, cache_of, is_right, prompt
from benchmarks.peers.relay import relay
from benchmarks.peers.servers import make_bucket, moto, valkey
from kvstore import KVStore, RemoteConfig, StoreConfig, TierConfig
from kvstore.config import MIB

DEADLINE_S = 0.1
BLOCK, TOKENS, PROMPTS = 16, 64, 150
PAUSE_S = 0.01
MOST_S = 20.0  # what is not mended by then is reported as this
S3_KEYS = {"access_key_id": "name", "secret_access_key": "secret"}
TROUBLES = ("stopped", "killed", "partitioned", "never-answers", "s3-refused")
DROP = "tc qdisc add dev lo root pfifo limit 0"  # a queue with room for nothing: packets vanish, and no one is told
PASS = "tc qdisc del dev lo root"


@dataclass
class Found:
    """What a drill found. late_s: by how much the latest get was over its deadline. mended_s: from the end of the
    trouble until no breaker was open; 0 if none had been. served: gets that the remote tier answered afterwards."""

    late_s: float = 0.0
    gets: int = 0
    wrong: int = 0
    breaks: int = 0
    mended_s: float = 0.0
    served: int = 0


@dataclass(frozen=True)
class Trouble:
    """begin, end: the trouble. loses: the server has nothing any more after it. settings: of the engine."""

    url: str
    begin: Callable[[], object]
    end: Callable[[], object]
    loses: bool = False
    settings: dict[str, object] = field(default_factory=dict)


def drill(folder: Path, trouble: Trouble, seconds: float) -> Found:
    """Gets before, in and after a trouble of so many seconds."""
    _fill(folder / "filler", trouble)
    found = Found()
    with KVStore(folder / "store", IDENTITY, _config(trouble, promote="second")) as store:
        over = threading.Event()
        threads = [threading.Thread(target=_get, args=(store, found, over, seed)) for seed in range(2)]
        threads.append(threading.Thread(target=_put, args=(store, over)))
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.5)
            trouble.begin()
            time.sleep(seconds)
            found.breaks = int(store.stats()["counters"].get("remote_breaks", 0))
            trouble.end()
            begin = time.monotonic()
            while _is_broken(store) and time.monotonic() < begin + MOST_S:
                time.sleep(0.005)
            found.mended_s = time.monotonic() - begin
            if trouble.loses:
                _fill(folder / "filler-2", trouble)
            found.served = 0
            time.sleep(1.0)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    return found


def _config(trouble: Trouble, **remote: object) -> StoreConfig:
    there = RemoteConfig(
        trouble.url, deadline_s=DEADLINE_S, upload="put", miss_s=0.0, settings=trouble.settings, **remote
    )  # type: ignore[arg-type]
    host, disk = TierConfig(4 * MIB, "raw"), TierConfig(256 * MIB, "raw")
    return StoreConfig(host=host, disk=disk, block_tokens=BLOCK, threads=1, remote=there, gate="off", learn="off")


def _fill(folder: Path, trouble: Trouble) -> None:
    with KVStore(folder, IDENTITY, _config(trouble, flush_timeout_s=60.0)) as store:
        for number in range(PROMPTS):
            tokens = prompt(number, TOKENS)
            store.put(tokens, cache_of(tokens))
        if store.flush(remote=True).remote_due:
            raise SystemExit("not everything reached the server")


def _get(store: KVStore, found: Found, over: threading.Event, seed: int) -> None:
    number = seed * PROMPTS // 2
    while not over.wait(PAUSE_S):
        number = (number + 1) % PROMPTS
        tokens = prompt(number, TOKENS)
        begin = time.perf_counter()
        hit = store.get(tokens)
        found.late_s = max(found.late_s, time.perf_counter() - begin - DEADLINE_S)
        found.gets += 1
        if hit is not None:
            found.wrong += not is_right(hit.layers, tokens)
            found.served += "remote" in hit.tiers


def _put(store: KVStore, over: threading.Event) -> None:
    number = PROMPTS
    while not over.wait(10 * PAUSE_S):
        number += 1
        tokens = prompt(number, TOKENS)
        store.put(tokens, cache_of(tokens))


def _is_broken(store: KVStore) -> bool:
    there = store.stats()["remote"]
    return bool(there["read_open"] or there["write_open"])


@contextlib.contextmanager
def troubles() -> Iterator[dict[str, Trouble]]:
    """Those that need no network of their own, by name; `s3-refused` where moto is installed."""
    with valkey() as server, valkey() as other, relay(other.port) as between, moto() as bucket:
        url = f"valkey://127.0.0.1:{server.port}"

        def silence() -> None:
            between.is_silent = True

        def speech() -> None:
            between.is_silent = False

        found = {
            "stopped": Trouble(url, server.stop, server.go_on),
            "killed": Trouble(url, server.kill, server.restart, loses=True),
            "never-answers": Trouble(f"valkey://127.0.0.1:{between.port}", silence, speech),
        }
        if bucket is not None:

            def start() -> None:
                bucket.restart()
                make_bucket(bucket)

            url = f"s3://records?endpoint=http://127.0.0.1:{bucket.port}"
            found["s3-refused"] = Trouble(url, bucket.kill, start, loses=True, settings=dict(S3_KEYS))
        yield found


def partitioned(folder: Path, seconds: float) -> Found | None:
    """The drill in a network of its own; None where that is not permitted."""
    if any(shutil.which(tool) is None for tool in ("unshare", "ip", "tc")):
        return None
    command = ["unshare", "-n", sys.executable, "-m", __spec__.name, str(folder), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return Found(**json.loads(done.stdout)) if done.returncode == 0 else None


def main() -> None:
    """The drill `partitioned`, whose network is this process's own."""
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    _run("ip link set lo up")
    with valkey() as server:
        trouble = Trouble(f"valkey://127.0.0.1:{server.port}", lambda: _run(DROP), lambda: _run(PASS))
        print(json.dumps(asdict(drill(folder, trouble, seconds))))


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
