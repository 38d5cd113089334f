"""Which record to give up: `python -m benchmarks.eviction [TRACE ...] [--percent N ...] [--disk]`.

TRACE: a file of requests in Mooncake's format, one JSON object a line with `timestamp` and `hash_ids`, the ids of its
blocks' prefixes, root first; or a name of `benchmarks/workloads/requests.py`. Default: all that are made there.

Replay: the blocks of a request that are stored, up to the first that is not, are hits; then all its blocks are put,
root first, each missing one for the next victim of the policy. Rows `eviction/POLICY/PERCENT/TRACE`, PERCENT of the
trace's different blocks being the capacity: `hit_rate` (hit blocks / all blocks), and the same of the second half of
the requests. Beside the store's policies stand those of `benchmarks/peers/eviction.py`. `regret` of `adaptive`: how
many points of the hit rate it is below the best other policy that does not know the future; below 0 it is the best.
Its peer is that policy, the ratio that of the hits. `of_belady` has the bound as its peer.

With `--disk` also rows `eviction/POLICY/disk/TRACE`, `hit_rate`: the first `ON_DISK` requests of the trace through a
store that has only a disk tier. A block is one token; there is room for about a fifth of the blocks, less what the
catalog takes. A request is got, put and flushed. The peer is `lru`, where the trie's own recency decides.

What was chosen with which trace: the constants of `prior` with both Mooncake traces, whole; its six octaves of uses and
the constants of `adaptive` with the first halves (2,000 requests) of `sessions`, `scan`, `documents` and `batches`. Of
`mooncake_conversation` and `agents` the first halves were looked at, of `mooncake_synthetic` nothing since `prior`, and
nothing ever of `templates`, before the results were kept.

`belady` gives up what is used furthest in the future and takes in nothing that is used further away than that. With
blocks of one size this has the most hits of all policies, and counts each hit, not only those of a leading run: a
bound that a policy that keeps prefixes whole cannot exceed, and perhaps not reach.
"""

from __future__ import annotations

import heapq
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Rows, arguments
from benchmarks.peers.eviction import PEERS
from benchmarks.workloads.requests import MADE, Trace
from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.eviction import POLICIES, EvictionPolicy

PERCENT = (1, 2, 5, 10, 20)
ON_DISK = 300  # requests of the replay through a store
ONLINE = {**POLICIES, **PEERS}


def main() -> None:
    parser = arguments("Hit rates of eviction policies.")
    parser.add_argument(
        "traces", nargs="*", metavar="TRACE", help="file of requests, or name (default: all that are made)"
    )
    parser.add_argument("--percent", nargs="+", type=int, default=PERCENT, metavar="N", help="capacities")
    parser.add_argument("--disk", action="store_true", help="replay through a store, too")
    args = parser.parse_args()
    rows = Rows("eviction", args.json)
    count = 1000 if args.quick else 4000
    for name in args.traces or MADE:
        trace = MADE[name](count) if name in MADE else load(Path(name))
        for percent in args.percent:
            compare(rows, trace[:2000] if args.quick else trace, percent, Path(name).stem)
        if args.disk:
            compare_on_disk(rows, trace[: ON_DISK // 3 if args.quick else ON_DISK], Path(name).stem)
    rows.main_exit()


def compare(rows: Rows, trace: Trace, percent: int, name: str) -> None:
    """The rows of one trace and capacity."""
    capacity = max(1, unique(trace) * percent // 100)
    hits = {policy: replay(make(), trace, capacity) for policy, make in ONLINE.items()}
    hits["belady"] = belady(trace, capacity)
    for metric, part in {"hit_rate": slice(None), "hit_rate_second_half": slice(len(trace) // 2, None)}.items():
        blocks = sum(map(len, trace[part]))
        for policy, found in hits.items():
            rows.add(f"eviction/{policy}/{percent}pct/{name}", metric, sum(found[part]) / blocks, "of blocks")
    case, blocks = f"eviction/adaptive/{percent}pct/{name}", sum(map(len, trace))
    total = {policy: sum(found) for policy, found in hits.items()}
    best = max(ONLINE.keys() - {"adaptive"}, key=lambda policy: (total[policy], policy))
    ratio = total["adaptive"] / max(1, total[best])
    rows.add(case, "regret", 100 * (total[best] - total["adaptive"]) / blocks, "points", best, ratio)
    ratio = total["adaptive"] / max(1, total["belady"])
    rows.add(case, "of_belady", ratio, "of its hits", "belady", ratio)


def compare_on_disk(rows: Rows, trace: Trace, name: str) -> None:
    """The rows of one trace through the disk tier of a store."""
    blocks = sum(map(len, trace))
    rates = {policy: sum(replay_on_disk(policy, trace)) / blocks for policy in POLICIES}
    for policy, rate in rates.items():
        peer = ("lru", rate / rates["lru"]) if policy != "lru" and rates["lru"] else ()
        rows.add(f"eviction/{policy}/disk/{name}", "hit_rate", rate, "of blocks", *peer)


def replay_on_disk(policy: str, trace: Trace) -> list[int]:
    """Hit blocks of each request, of a store whose disk has room for about a fifth of the trace's blocks."""
    segment, page = 64 << 10, 4096
    budget = max(8 * segment, unique(trace) // 5 * page)
    disk = TierConfig(budget, "raw")
    config = StoreConfig(host=TierConfig(0), disk=disk, block_tokens=1, segment_bytes=segment, eviction=policy)
    identity = ModelIdentity("replay", "1", "", "", KVLayout.uniform(1, 1, 8))
    zeros = torch.zeros(1, max(map(len, trace)), 8, dtype=torch.bfloat16)
    hits = []
    with tempfile.TemporaryDirectory() as folder, KVStore(folder, identity, config) as store:
        for request in trace:
            ids = np.array(request, np.uint32)
            hit = store.get(ids)
            hits.append(hit.tokens if hit is not None else 0)
            values = zeros[:, : len(ids)]
            store.put(ids, [(values, values)])
            store.flush()
    return hits


def load(path: Path) -> Trace:
    """The requests of a file in Mooncake's format, in order of time."""
    with path.open() as lines:
        requests = [json.loads(line) for line in lines]
    requests.sort(key=lambda request: request["timestamp"])
    return [[block + 1 for block in request["hash_ids"]] for request in requests]


def unique(trace: Trace) -> int:
    """Different blocks."""
    return len({block for request in trace for block in request})


def replay(policy: EvictionPolicy, trace: Trace, capacity: int) -> list[int]:
    """Hit blocks of each request."""
    held: set[int] = set()
    hits = []
    for request in trace:
        run = next((i for i, block in enumerate(request) if block not in held), len(request))
        hits.append(run)
        policy.touch(request)
        for block in request[run:capacity]:
            if block in held:
                continue
            if len(held) == capacity:
                victim = next(policy.victims())
                held.remove(victim)
                policy.discard(victim)
            held.add(block)
            policy.add(block)
        policy.touch(request)
    return hits


def belady(trace: Trace, capacity: int) -> list[int]:
    """Hit blocks of each request, of the bound (see above)."""
    following: dict[int, int] = {}
    at = sum(map(len, trace))
    never = at
    nexts = [0] * at
    for request in reversed(trace):
        for block in reversed(request):
            at -= 1
            nexts[at] = following.get(block, never)
            following[block] = at
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = []
    for request in trace:
        count = 0
        for block in request:
            use = nexts[at]
            at += 1
            count += held.pop(block, None) is not None
            if use == never:
                continue
            held[block] = use
            heapq.heappush(heap, (-use, block))
            if len(held) > capacity:
                while True:
                    far, victim = heapq.heappop(heap)
                    if held.get(victim) == -far:
                        del held[victim]
                        break
        hits.append(count)
    return hits


if __name__ == "__main__":
    main()
