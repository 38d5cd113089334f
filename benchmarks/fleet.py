"""Stores on many machines that share a remote tier. `python -m benchmarks.fleet [TRACE ...] [--only real simulation]`

TRACE: requests in Mooncake's format, one JSON object a line with `timestamp`, `hash_ids`, `input_length` and
`output_length`. Without one, sessions are made (`benchmarks.eviction`).

real: 8 stores in processes of this machine, a cluster of 3 Valkey servers over loopback, the first requests of the
trace, each sent to a store that has nothing to do. Caches are tiny: a block of the trace is four tokens. A request is
got, put, and flushed to the remote tier. Rows `fleet/real/TRACE`:

- `hit_rate`: hit tokens of all; the peer is one store that serves all requests, one after the other, with room for all.
- `twice`: values that were sent though they were there, of all that were sent.
- `trouble/...`: the same again, while every second a node is stopped, killed (what it answered is in a file, so it
  loses nothing), or full, or the process of a store is killed: `wrong` hits; `lost`, blocks that a store said were in
  the remote tier, and that a machine with an empty disk does not find there afterwards; `dropped`, blocks that a store
  said were not written there.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import Rows, arguments, scratch
from benchmarks.drills import fleet
from benchmarks.eviction import Trace, load, sessions
from benchmarks.peers.servers import cluster

PARTS = ("real",)
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
            hurt_missing, hurt_wrong = fleet.lost(folder / "hurt-check", fleet.node_urls(nodes), hurt.flushed)
    rate, best = calm.hit / calm.tokens, alone.hit / alone.tokens
    rows.add(case, "hit_rate", rate, "of tokens", "one store", rate / best if best else 1.0)
    rows.add(case, "one_store", best, "of tokens")
    rows.add(case, "remote", calm.remote / calm.tokens, "of tokens")
    sent = calm.written + calm.present
    rows.add(case, "twice", calm.present / max(1, sent), "of values sent")
    for metric, value in (("written", calm.written), ("dropped", calm.dropped), ("lost", missing)):
        rows.add(case, metric, value, "blocks")
    rows.add(case, "wrong", calm.wrong + wrong, "hits")
    rows.add(case, "seconds", calm.seconds, "s")
    case = f"fleet/real/trouble/{name}"
    rows.add(case, "hit_rate", hurt.hit / hurt.tokens, "of tokens", "one store", hurt.hit / max(1, alone.hit))
    for kind, times in trouble.counts.items():
        rows.add(case, kind.replace(" ", "_"), times, "times")
    rows.add(case, "flushed", sum(map(len, hurt.flushed)), "blocks")
    for metric, value in (("dropped", hurt.dropped), ("lost", hurt_missing)):
        rows.add(case, metric, value, "blocks")
    rows.add(case, "wrong", hurt.wrong + hurt_wrong, "hits")
    rows.add(case, "seconds", hurt.seconds, "s")
    return not (wrong or calm.wrong or missing or hurt.wrong or hurt_wrong or hurt_missing)


if __name__ == "__main__":
    main()
