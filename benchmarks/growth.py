"""How the cost of calls grows with the number of blocks that a store holds.

`python -m benchmarks.growth [--blocks 1000 10000 100000 1000000] [--full N] [--quick]`

One store grows from step to step: sequences of 16 blocks of 64 tokens, random ids, no shared prefixes, one value a
token, so that it is the books that are measured and not the disk. At each step: the processor time, of all threads
together, of a put, a get and a look at the index, for a block of theirs; of expiring a record; of opening;
memory and the catalog's bytes for a block; and, in a store of its own that is full, of a put for which as much is
evicted (up to `--full` blocks, for such a store is filled twice over). Then the slope of each: the power of the number
of blocks that it grows with (0: not at all, so that opening, told for a block, is linear). Constants hide it in small
stores, so it is fitted to steps from 10,000 blocks on.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Rows, arguments, scratch
from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import GIB, MIB

BLOCK, BLOCKS = 64, 16
TOKENS = BLOCK * BLOCKS
IDENTITY = ModelIdentity("benchmark", "", "", "", KVLayout.uniform(1, 1, 1))
CACHE = [(torch.zeros(1, 1, TOKENS, 1, dtype=torch.bfloat16),) * 2]
TRIALS, AT_ONCE, ROUNDS = 64, 8, 3  # sequences of a measurement; of one with a time to live
FIRST_FITTED, LEAST_FULL = 10_000, 4_000
TTL_S = 0.3
_COUNTS = ("blocks", "full_blocks", "evicted_per_block", "moved_per_block")  # no costs: no slope is fitted to them


def main() -> None:
    parser = arguments("How the cost of calls grows with the number of blocks.")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="steps (1000 10000 100000 1000000)")
    parser.add_argument("--full", type=int, metavar="N", help="blocks of the largest full store (default: all steps)")
    parser.add_argument("--dir", type=Path, help="where the store is made (default: build/scratch)")
    parser.add_argument("--opening", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = sorted(args.blocks or ([1_000, 10_000, 30_000] if args.quick else [1_000, 10_000, 100_000, 1_000_000]))
    if args.opening is not None:
        print(json.dumps(opening(args.opening, args.blocks[0])))
        return
    rows, costs = Rows("growth", args.json), dict[str, dict[float, float]]()
    with scratch("growth", args.dir) as folder:
        growing, made = folder / "store", 0
        for blocks in steps:
            made = grow(growing, made, blocks // BLOCKS, steps[-1])
            found = measure(growing, made, steps[-1])
            made += TRIALS  # what was measured with was put, too
            if args.full is None or blocks <= args.full:
                found |= evicting(folder / f"full-{blocks}", blocks)
                shutil.rmtree(folder / f"full-{blocks}")
            for name, (value, unit) in found.items():
                rows.add(f"growth/{blocks}", name, value, unit)
                if blocks >= FIRST_FITTED and name not in _COUNTS:
                    costs.setdefault(name, {})[found["blocks"][0]] = max(value, 1e-9)
    for name, values in costs.items():
        if len(values) > 1:
            slope = np.polyfit(np.log(list(values)), np.log(list(values.values())), 1)[0]
            rows.add("growth/slope", name, float(slope), "power of blocks")
    rows.main_exit()


def config(bytes_: int) -> StoreConfig:
    return StoreConfig(host=TierConfig(0), disk=TierConfig(bytes_, "raw"), group_bytes=MIB, donors=False)


def full(blocks: int) -> StoreConfig:
    """Room for about so many blocks: a record takes a page, and a tenth of the segments is kept free of them."""
    return config(4 * MIB + 5000 * blocks)


def roomy(most: int) -> StoreConfig:
    """Room for all blocks: a record takes a page."""
    return config(2 * most * 4096 + 2 * GIB)


def sequence(number: int) -> np.ndarray:
    """Token ids `[1024]`, uint32."""
    return np.random.default_rng(number).integers(0, 1 << 15, TOKENS, dtype=np.uint32)


def grow(path: Path, first: int, count: int, most: int) -> int:
    """Put sequences from `first` on until there are `count`; return how many there are."""
    with KVStore(path, IDENTITY, roomy(most)) as store:
        put(store, first, max(0, count - first))
    return max(first, count)


def put(store: KVStore, first: int, count: int, ttl: float | None = None) -> None:
    for number in range(first, first + count):
        store.put(sequence(number), CACHE, ttl=ttl)
    if store.flush().dropped_blocks:
        raise RuntimeError("blocks were dropped; is the disk full?")


def spent(function: Callable[[], object]) -> float:
    """Processor seconds, of all threads."""
    gc.collect()
    begin = time.process_time()
    function()
    return time.process_time() - begin


def measure(path: Path, made: int, most: int) -> dict[str, tuple[float, str]]:
    """What one block costs in a store of `made` sequences, to which it adds `TRIALS`."""
    found: dict[str, tuple[float, str]] = {}
    command = [sys.executable, "-m", "benchmarks.growth", "--opening", str(path), "--blocks", str(most)]
    opened = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    store = KVStore(path, IDENTITY, roomy(most))
    disk = store.stats()["disk"]
    found["blocks"] = disk["records"], "blocks"
    found["open_us_per_block"] = 1e6 * opened["seconds"] / disk["records"], "us"
    found["memory_per_block"] = opened["bytes"] / disk["records"], "bytes"
    found["catalog_per_block"] = disk["catalog_bytes"] / disk["records"], "bytes"
    picks = np.random.default_rng(1).integers(0, made, TRIALS).tolist()
    ids = [sequence(number) for number in picks]
    blocks = TRIALS * BLOCKS

    def each(calls: Callable[[np.ndarray], object]) -> tuple[float, str]:
        return 1e6 * statistics.median(spent(lambda: [calls(x) for x in ids]) for _ in range(ROUNDS)) / blocks, "us"

    found["contains_us_per_block"] = each(store.contains)
    found["get_us_per_block"] = each(store.get)
    found["put_us_per_block"] = 1e6 * spent(lambda: put(store, made, TRIALS)) / blocks, "us"
    found["expire_us_per_record"] = 1e6 * expiring(store, made) / (AT_ONCE * BLOCKS), "us"
    store.close()
    return found


def evicting(path: Path, blocks: int) -> dict[str, tuple[float, str]]:
    """What one block costs that is put into a full store of about so many blocks, or of the fewest that a store with
    several groups can hold: one goes for each that comes. It is filled twice over first, so that all of its files were
    recycled."""
    blocks = max(blocks, LEAST_FULL)
    with KVStore(path, IDENTITY, full(blocks)) as store:
        made = 2 * blocks // BLOCKS
        put(store, 0, made)
        before = _counters(store)
        # Space is reclaimed a segment at a time: over a tenth of the store all of its costs are met.
        more = max(3 * TRIALS, made // 20)
        seconds = spent(lambda: put(store, made, more))
        gone = _counters(store) - before
        held = store.stats()["disk"]["records"]
    each = more * BLOCKS
    return {
        "full_blocks": (held, "blocks"),
        "evicting_put_us_per_block": (1e6 * seconds / each, "us"),
        "evicted_per_block": (gone["disk_evicted_records"] / each, "records"),
        "moved_per_block": (gone["disk_moved_records"] / each, "records"),
    }


def expiring(store: KVStore, made: int) -> float:
    """Processor seconds until sequences with a time to live are gone, from the catalog, too."""
    put(store, 1 << 40, AT_ONCE, ttl=TTL_S)
    before = _counters(store)["expired_records"]

    def wait() -> None:
        time.sleep(TTL_S + 0.05)
        store.put(sequence(made - 1), CACHE)  # is there: it only removes what is over

    seconds = spent(wait)
    if _counters(store)["expired_records"] - before != AT_ONCE * BLOCKS:
        raise RuntimeError("not all records were gone when their time was over")
    return seconds


def opening(path: Path, most: int) -> dict[str, float]:
    """Processor seconds of opening a store in a new process, and the memory that it takes then."""
    before, stores = _private(), list[KVStore]()
    seconds = spent(lambda: stores.append(KVStore(path, IDENTITY, roomy(most))))
    return {"seconds": seconds, "bytes": _private() - before}


def _counters(store: KVStore) -> Counter[str]:
    return Counter(store.stats()["counters"])


def _private() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
