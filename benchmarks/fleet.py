"""Stores on many machines that share a remote tier. `python -m benchmarks.fleet [TRACE ...] [--only real simulation]`

TRACE: requests in Mooncake's format, one JSON object a line with `timestamp`, `hash_ids`, `input_length` and
`output_length`. Without one, sessions are made (`benchmarks.workloads.requests`).

real: 8 stores in processes of this machine, a cluster of 3 Valkey servers over loopback, the first requests of the
trace, each sent to a store that has nothing to do. Caches are tiny: a block of the trace is four tokens. A request is
got, put, and flushed to the remote tier. Rows `fleet/real/TRACE`:

- `hit_rate`: hit tokens of all; the peer is one store that serves all requests, one after the other, with room for all.
- `twice`: values that were sent though they were there, of all that were sent.
- `trouble/...`: the same again, while every second a node is stopped, killed (what it answered is in a file, so it
  loses nothing), or full, or the process of a store is killed: `wrong` hits; `lost`, blocks that a store said were in
  the remote tier, and that a machine with an empty disk does not find there afterwards; `dropped`, blocks that a store
  said were not written there.

simulation: fleets of 10 to 10,000 machines on paper (`benchmarks/drills/simulation.py` names all that is assumed: the
model, the machines, the network). Each ten machines serve one copy of the trace; copies share nothing. Rows
`fleet/simulation/TRACE/MACHINES/ROUTING`, and with `/alone` the same without a remote tier: `local`, `remote`, share of
blocks found; `ttft`, `ttft_p99` in seconds; what the remote tier reads and writes a second, the calls for that, the
bytes that it holds at the end, and `nodes`, how many of them that takes, if every block is written there. Requests wait
for their machine. Of fleets of more than 20 machines a part is simulated; what a machine still has to do when a request
comes is drawn from what it was in a fleet of 20.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Rows, arguments, percentile, scratch
from benchmarks.drills import fleet
from benchmarks.drills.simulation import Assumed, Call, Outcome, settled
from benchmarks.eviction import load
from benchmarks.peers.servers import cluster, find_each_other
from benchmarks.workloads.requests import Trace, sessions

PARTS = ("real", "simulation")
SIZES = (10, 20, 100, 1_000, 10_000)
ROUTINGS = ("locality", "chance")
MACHINES, NODES = 8, 3


def main() -> None:
    parser = arguments("A fleet of stores that share a remote tier.")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="requests (default: sessions are made)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--requests", type=int, metavar="N", help="requests of the real fleet (400)")
    args = parser.parse_args()
    rows = Rows("fleet", args.json)
    traces = {path.stem: load(path) for path in args.traces} or {"sessions": sessions(400)}
    count = args.requests or (60 if args.quick else 400)
    ok = True
    for name, trace in traces.items():
        if "real" in args.only:
            ok &= real(rows, name, trace[:count])
    calls = {path.stem: timed(path) for path in args.traces} or {"sessions": made(400)}
    for name, found in calls.items():
        if "simulation" in args.only:
            simulation(rows, name, found[:2000] if args.quick else found, SIZES[:2] if args.quick else SIZES)
    rows.main_exit(ok)


def real(rows: Rows, name: str, trace: Trace) -> bool:
    """Rows of a fleet on this machine; whether nothing was wrong or lost."""
    case = f"fleet/real/{name}"
    with scratch("fleet") as folder:
        with cluster(NODES) as nodes:
            settings = fleet.config(fleet.node_urls(nodes))
            with fleet.machines(folder / "calm", MACHINES, settings) as machines:
                calm = fleet.replay(machines, trace)
            missing, wrong = fleet.lost(folder / "calm-check", fleet.node_urls(nodes), calm.flushed)
        alone = fleet.alone(folder / "alone", trace)
        with cluster(NODES) as nodes:
            trouble = fleet.Trouble(nodes, every_s=1.0, seed=1)
            settings = fleet.config(fleet.node_urls(nodes), deadline_s=0.2)
            with fleet.machines(folder / "hurt", MACHINES, settings) as machines:
                hurt = fleet.replay(machines, trace, trouble=trouble)
                trouble.heal()
                find_each_other(nodes)
            hurt_missing, hurt_wrong = fleet.lost(folder / "hurt-check", fleet.node_urls(nodes), hurt.flushed)
    rate, best = calm.hit / calm.tokens, alone.hit / alone.tokens
    rows.add(case, "hit_rate", rate, "of tokens", "one store", rate / best)
    rows.add(case, "one_store", best, "of tokens")
    rows.add(case, "remote", calm.remote / calm.tokens, "of tokens")
    sent = calm.written + calm.present
    rows.add(case, "twice", calm.present / max(1, sent), "of values sent")
    for metric, value in (("written", calm.written), ("dropped", calm.dropped), ("lost", missing)):
        rows.add(case, metric, value, "blocks")
    rows.add(case, "wrong", calm.wrong + wrong, "hits")
    rows.add(case, "seconds", calm.seconds, "s")
    case = f"fleet/real/trouble/{name}"
    rows.add(case, "hit_rate", hurt.hit / hurt.tokens, "of tokens", "one store", hurt.hit / hurt.tokens / best)
    for kind, times in trouble.counts.items():
        rows.add(case, kind.replace(" ", "_"), times, "times")
    rows.add(case, "flushed", sum(map(len, hurt.flushed)), "blocks")
    for metric, value in (("dropped", hurt.dropped), ("lost", hurt_missing)):
        rows.add(case, metric, value, "blocks")
    rows.add(case, "wrong", hurt.wrong + hurt_wrong, "hits")
    rows.add(case, "seconds", hurt.seconds, "s")
    return not (wrong or calm.wrong or missing or hurt.wrong or hurt_wrong or hurt_missing)


def simulation(rows: Rows, name: str, trace: list[Call], sizes: Sequence[int]) -> None:
    """Rows of fleets on paper."""
    assumed = Assumed()
    for routing in ROUTINGS:
        for has_remote in (True, False):
            backlogs: list[float] | None = None
            for machines in sizes:
                whole = machines <= assumed.per_copy * assumed.most_copies
                found = settled(trace, assumed, machines, routing, has_remote, None if whole else backlogs)
                backlogs = found.backlogs if whole else backlogs
                case = f"fleet/simulation/{name}/{machines}/{routing}{'' if has_remote else '/alone'}"
                report(rows, case, found, assumed, machines)


def report(rows: Rows, case: str, found: Outcome, assumed: Assumed, machines: int) -> None:
    rows.add(case, "local", found.local / found.blocks, "of blocks")
    rows.add(case, "ttft", statistics.fmean(found.ttft), "s")
    rows.add(case, "ttft_p99", percentile(found.ttft, 0.99), "s")
    if not found.written:
        return
    times = max(1.0, machines / assumed.per_copy) / found.copies  # the whole fleet, of what was simulated
    reads, writes = (times * count / found.seconds for count in (found.remote, found.written))
    held = times * found.stored * assumed.block_bytes
    busiest = max(reads, writes) * assumed.block_bytes
    rows.add(case, "remote", found.remote / found.blocks, "of blocks")
    rows.add(case, "reads", reads * assumed.block_bytes / 1e9, "GB/s")
    rows.add(case, "writes", writes * assumed.block_bytes / 1e9, "GB/s")
    rows.add(case, "calls", reads + writes, "1/s")
    rows.add(case, "held", held / 1e12, "TB")
    rows.add(case, "nodes", math.ceil(max(busiest / assumed.node, held / assumed.node_bytes)), "")


def timed(path: Path) -> list[Call]:
    """The requests of a file in Mooncake's format, in order of time."""
    with path.open() as lines:
        requests = sorted((json.loads(line) for line in lines), key=lambda request: request["timestamp"])
    return [(request["timestamp"] / 1000, request["hash_ids"]) for request in requests]


def made(count: int) -> list[Call]:
    """Sessions, three requests a second."""
    return [(number / 3, blocks) for number, blocks in enumerate(sessions(count))]


if __name__ == "__main__":
    main()
