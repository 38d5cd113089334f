"""How long a store of many blocks takes to open, and what memory its index takes.

`python -m benchmarks.open [--blocks 100000 1000000]`. The store is made by real puts of sequences of 64 blocks (64
tokens each, random ids, no shared prefixes: the most an index has to hold), with one value a token so that disk space
is not what is measured. Each opening is a process of its own, with the page cache dropped, then once more with it
warm; memory is what the process has grown by, without and with the pages of the catalog that the system may take back.
Who first looks for donors (a put with a codec that uses them, an approximate get) makes the index for that: `donors`
has the processor time of such a get, and the memory after it. `--keep DIR` leaves stores in a folder; the next run
opens them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Rows, arguments, drop_page_cache, scratch
from kvstore import Approximate, KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import GIB, MIB

BLOCK, BLOCKS_OF_A_PUT = 64, 64
IDENTITY = ModelIdentity("benchmark", "", "", "", KVLayout.uniform(1, 1, 1))


def main() -> None:
    parser = arguments("Opening a store of many blocks.")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="store sizes (100000 1000000)")
    parser.add_argument("--dir", type=Path, help="where the store is made (default: build/scratch)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where stores are kept, and found by the next run")
    parser.add_argument("--opening", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sequences", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.opening is not None:
        print(json.dumps(opening(args.opening, args.sequences)))
        return
    rows = Rows("open", args.json)
    for blocks in args.blocks or ([100_000] if args.quick else [100_000, 1_000_000]):
        with contextlib.nullcontext(args.keep) if args.keep else scratch("open", args.dir) as folder:
            measure(rows, folder / f"store-{blocks}", blocks, 3 if args.quick else 5)
    rows.main_exit()


def config(blocks: int) -> StoreConfig:
    """Room for all blocks (a record takes at least a page), a few segments and the catalog; no host tier."""
    return StoreConfig(host=TierConfig(0), disk=TierConfig(2 * blocks * 4096 + 2 * GIB, "raw"), group_bytes=MIB)


def sequence(number: int) -> np.ndarray:
    """Token ids `[4096]`, uint32."""
    return np.random.default_rng(number).integers(0, 1 << 15, BLOCK * BLOCKS_OF_A_PUT, dtype=np.uint32)


def make(path: Path, blocks: int, count: int) -> float:
    """Puts so many sequences into a new store; returns the seconds that took."""
    cache = [(torch.zeros(1, 1, BLOCK * BLOCKS_OF_A_PUT, 1, dtype=torch.bfloat16),) * 2]
    begin = time.perf_counter()
    with KVStore(path, IDENTITY, config(blocks)) as store:
        for number in range(count):
            store.put(sequence(number), cache)
        if store.flush().dropped_blocks:
            raise RuntimeError("blocks were dropped; is the disk full?")
    return time.perf_counter() - begin


def measure(rows: Rows, path: Path, blocks: int, rounds: int) -> None:
    name = f"{blocks // 1_000_000}M" if blocks % 1_000_000 == 0 else f"{blocks // 1000}k"
    count = -(-blocks // BLOCKS_OF_A_PUT)
    if not path.exists():
        rows.add(f"open/{name}", "puts_blocks_per_s", count * BLOCKS_OF_A_PUT / make(path, blocks, count), "blocks/s")
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    command = [sys.executable, "-m", "benchmarks.open", "--opening", str(path), "--sequences", str(count)]
    for _ in range(rounds):
        drop_page_cache(path)
        for state in runs:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[state].append(json.loads(done.stdout))

    def median(state: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[state])

    rows.add(f"open/{name}", "open_s", median("cold", "open_s"), "s")
    rows.add(f"open/{name}/page-cache-warm", "open_s", median("warm", "open_s"), "s")
    rows.add(f"open/{name}", "memory_bytes", median("cold", "private"), "bytes")
    rows.add(f"open/{name}", "memory_bytes_per_block", median("cold", "private") / blocks, "bytes")
    rows.add(f"open/{name}", "resident_bytes", median("cold", "resident"), "bytes")
    rows.add(f"open/{name}", "peak_resident_bytes", median("cold", "peak"), "bytes")
    rows.add(f"open/{name}/donors", "first_look_processor_s", median("warm", "first_look_processor_s"), "s")
    rows.add(f"open/{name}/donors", "memory_bytes_per_block", median("warm", "with_donors") / blocks, "bytes")
    rows.add(f"open/{name}", "catalog_bytes", median("warm", "catalog"), "bytes")


def opening(path: Path, sequences: int) -> dict[str, float]:
    """Opens the store, checks that everything is there, and says what it took."""
    before = memory()
    begin = time.perf_counter()
    store = KVStore(path, IDENTITY, config(sequences * BLOCKS_OF_A_PUT))
    seconds = time.perf_counter() - begin
    after = memory()
    with store:
        disk = store.stats()["disk"]
        records = disk["records"]
        hit = store.get(sequence(sequences - 1))
        if records != sequences * BLOCKS_OF_A_PUT or hit is None or hit.tokens != BLOCK * BLOCKS_OF_A_PUT:
            raise SystemExit(f"{records} records, {hit and hit.tokens} tokens of the last sequence")
        del hit
        new = sequence(sequences)
        begin = time.process_time()
        found = store.get(new, approximate=Approximate())
        first_look_s = time.process_time() - begin
        with_donors = memory()
        if found is not None or store.stats()["content"]["waiting"]:
            raise SystemExit("nobody looked for donors, or some were found")
    return {
        "open_s": seconds,
        "private": after["RssAnon"] - before["RssAnon"],
        "resident": after["VmRSS"] - before["VmRSS"],
        "peak": after["VmHWM"] - before["VmRSS"],
        "catalog": disk["catalog_bytes"],
        "first_look_processor_s": first_look_s,
        "with_donors": with_donors["RssAnon"] - before["RssAnon"],
    }


def memory() -> dict[str, int]:
    """Bytes, by the names in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines) if "kB" in rest}


if __name__ == "__main__":
    main()
