"""The store against the disk, against memory, and against other ways to keep the same bytes.

`python -m benchmarks.store [--only write read host latency lmcache] [--sizes 1MiB] [--lmcache PATH]`

- write: durable puts of raw records, in groups of 16 and 64 MiB, in steady state (every put evicts) and while the
  store fills for the first time, against O_DIRECT writes of the same bytes with one fdatasync; and the peers.
- read: random gets with nothing in memory, decoded into tensors, against random O_DIRECT reads of as many records.
- host: gets from the host tier against copying the same bytes.
- latency: how long `put` holds up a program that just made a cache of 2,048 tokens.
- lmcache: LMCache's own benchmark of its disk backend, run in turns with ours.

Bytes are raw bytes of keys and values everywhere. Peers and ceilings run in turns with ours; medians. There are two
ceilings of the disk: what a program with page-aligned memory reaches, and what it reaches with huge pages.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import (
    MIB,
    Rows,
    aligned,
    arguments,
    direct_file,
    direct_read,
    direct_write,
    drop_page_cache,
    interleave,
    scratch,
)
from benchmarks.peers.stores import Peer, peers
from benchmarks.peers.stores.lmcache import compare
from benchmarks.peers.stores.ours import BLOCK, Ours
from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.read.result import allocate
from kvstore.tiers.buffers import BufferPool

SIZES = {"256KiB": MIB // 4, "1MiB": MIB, "4MiB": 4 * MIB}
PEER_BYTES, PEER_BUDGET = 128 * MIB, 512 * MIB
HUGE = "O_DIRECT in huge pages"
SECTIONS = ("write", "read", "host", "latency", "lmcache")


def main() -> None:
    parser = arguments("The store against the ceilings of this machine, and against peers.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="parts to run (all)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="record sizes (all; 1MiB where --quick)")
    parser.add_argument("--dir", type=Path, help="where the data is written (default: build/scratch)")
    parser.add_argument(
        "--lmcache", type=Path, metavar="PATH", help="the lmcache executable; see requirements-peers.txt"
    )
    args = parser.parse_args()
    rows = Rows("store", args.json)
    # A full garbage collection walks all that torch and transformers imported: longer than a group takes to write.
    import transformers  # noqa: F401

    gc.collect()
    gc.freeze()
    with scratch("store", args.dir) as folder:
        for name in args.sizes or (("1MiB",) if args.quick else SIZES):
            if "write" in args.only:
                write(rows, folder / f"write-{name}", name, args.quick)
            if "read" in args.only:
                read(rows, folder / f"read-{name}", name, args.quick)
            if "lmcache" in args.only and args.lmcache is not None:
                compare(rows, folder / f"lmcache-{name}", name, SIZES[name], args.lmcache, args.quick)
        if "host" in args.only:
            host(rows, folder / "host", args.quick)
        if "latency" in args.only:
            latency(rows, folder / "latency", args.model, args.text, args.quick)
    if "lmcache" in args.only and args.lmcache is None:
        print("lmcache: not run; give the path of its executable with --lmcache", flush=True)
    rows.main_exit()


# -- durable writes ----------------------------------------------------------------------------------------------------


def write(rows: Rows, folder: Path, name: str, quick: bool) -> None:
    record, rounds = SIZES[name], 3 if quick else 7
    total, budget = (128 * MIB, 512 * MIB) if quick else (512 * MIB, 2048 * MIB)
    ours = {
        f"groups-of-{size}MiB": Ours(folder / f"ours-{size}", record, budget, group=size * MIB)
        for size in ((64,) if quick else (64, 16))
    }
    first = {key: statistics.median(one.write(total) for _ in range(budget // total - 1)) for key, one in ours.items()}
    for one in ours.values():
        one.write(budget)  # from here on every put evicts, and segments are recycled
    payload = aligned(64 * MIB)
    values = [payload[at : at + record] for at in range(0, len(payload), record)]
    others = {key: make(folder / key, record, PEER_BUDGET // record) for key, make in peers().items()}

    def write_peer(peer: Peer) -> float:
        """Seconds for `total` bytes, from fewer: some take minutes for as many as ours takes in a second."""
        begin = time.perf_counter()
        for _ in range(PEER_BYTES // len(payload)):
            peer.write(values)
        return (time.perf_counter() - begin) * total / PEER_BYTES

    for peer in others.values():
        for _ in range(PEER_BUDGET // PEER_BYTES):
            write_peer(peer)
    with direct_file(folder, total) as descriptor:
        functions: dict[str, Callable[[], object]] = {
            key: lambda one=one: one.write(total) for key, one in ours.items()
        }
        functions |= {key: lambda peer=peer: write_peer(peer) for key, peer in others.items()}
        functions["O_DIRECT"] = lambda: direct_write(descriptor, total)
        functions[HUGE] = lambda: direct_write(descriptor, total, huge=True)
        seconds = interleave(functions, rounds)
    for one in ours.values():
        one.store.close()
    for peer in others.values():
        peer.close()

    case = f"durable-write/{name}"

    def add(case: str, spent: float) -> None:
        rows.add(case, "write_GBps", total / spent / 1e9, "GB/s")
        add_shares(rows, case, seconds, spent)

    rows.add(f"ceiling/{case}", "write_GBps", total / seconds["O_DIRECT"] / 1e9, "GB/s")
    rows.add(f"ceiling-huge-pages/{case}", "write_GBps", total / seconds[HUGE] / 1e9, "GB/s")
    for key in ours:
        add(f"store/{case}/{key}", seconds[key])
        add(f"store/{case}/{key}/first-fill", first[key])
    best = seconds["groups-of-64MiB"]
    add(f"store/{case}", best)
    for key in others:
        add(f"{key}/{case}", seconds[key])
        rows.add(f"store/{case}", "write_GBps", total / best / 1e9, "GB/s", key, seconds[key] / best)


def add_shares(rows: Rows, case: str, seconds: dict[str, float], spent: float) -> None:
    for peer in ("O_DIRECT", HUGE):
        rows.add(case, "share_of_ceiling", seconds[peer] / spent, "share", peer, seconds[peer] / spent)


# -- cold reads --------------------------------------------------------------------------------------------------------


def read(rows: Rows, folder: Path, name: str, quick: bool) -> None:
    """Single blocks, then sequences of 16 MiB, and of 2,048 tokens, whose blocks lie together as they were put; each at
    random."""
    record, rounds = SIZES[name], 3 if quick else 7
    total, amount = (192 * MIB, 64 * MIB) if quick else (512 * MIB, 128 * MIB)
    picks = np.random.default_rng(0)
    singles = Ours(folder / "singles", record, 2 * total, put_bytes=record)
    whole = Ours(folder / "sequences", record, 2 * total)
    long = Ours(folder / "2048-tokens", record, 2 * total, put_bytes=2048 // BLOCK * record)

    def gets(ours: Ours, threads: int) -> float:
        numbers = [int(n) for n in picks.integers(0, ours.sequences, max(1, amount // ours.put_bytes))]
        with ThreadPoolExecutor(threads) as pool:
            begin = time.perf_counter()
            if threads == 1:
                for number in numbers:
                    ours.get(number, "disk")
            else:
                list(pool.map(lambda number: ours.get(number, "disk"), numbers))
            return time.perf_counter() - begin

    for ours in (singles, whole, long):
        ours.write(total)
        gets(ours, 1)
    with direct_file(folder, total) as descriptor:

        def reads(threads: int, huge: bool) -> float:
            def one(seed: int) -> float:
                return direct_read(descriptor, total, record, amount // record // threads, seed, huge)

            with ThreadPoolExecutor(threads) as pool:
                return max(pool.map(one, picks.integers(1 << 30, size=threads).tolist()))

        drop_page_cache(folder)
        seconds = interleave(
            {
                "one": lambda: gets(singles, 1),
                "two": lambda: gets(singles, 2),
                "sequences": lambda: gets(whole, 1),
                "2048-tokens": lambda: gets(long, 1),
                "O_DIRECT": lambda: reads(1, False),
                HUGE: lambda: reads(1, True),
                "O_DIRECT/two": lambda: reads(2, False),
                f"{HUGE}/two": lambda: reads(2, True),
            },
            rounds,
        )
    for ours in (singles, whole, long):
        ours.store.close()
    add_reads(rows, f"cold-read/{name}", seconds, amount)


def add_reads(rows: Rows, case: str, seconds: dict[str, float], amount: int) -> None:
    two = {peer: seconds[f"{peer}/two"] for peer in ("O_DIRECT", HUGE)}
    rows.add(f"ceiling/{case}", "read_GBps", amount / seconds["O_DIRECT"] / 1e9, "GB/s")
    rows.add(f"ceiling-huge-pages/{case}", "read_GBps", amount / seconds[HUGE] / 1e9, "GB/s")
    rows.add(f"ceiling/{case}/2-threads", "read_GBps", amount / two["O_DIRECT"] / 1e9, "GB/s")
    for key, suffix, ceilings in (
        ("one", "", seconds),
        ("two", "/2-threads", two),
        ("sequences", "/sequences", seconds),
        ("2048-tokens", "/2048-tokens", seconds),
    ):
        rows.add(f"store/{case}{suffix}", "read_GBps", amount / seconds[key] / 1e9, "GB/s")
        add_shares(rows, f"store/{case}{suffix}", ceilings, seconds[key])


# -- the host tier -----------------------------------------------------------------------------------------------------


def host(rows: Rows, folder: Path, quick: bool) -> None:
    """A cache of SmolLM2-135M's shape; 2,048 tokens are 47 MB."""
    for codec in ("raw", "splitzip"):
        host_tier(rows, folder / codec, codec, quick)


def host_tier(rows: Rows, folder: Path, codec: str, quick: bool) -> None:
    layout, pool = KVLayout.uniform(30, 3, 64), BufferPool(128 * MIB)
    config = StoreConfig(host=TierConfig(1024 * MIB, codec), disk=TierConfig(0))
    with KVStore(folder, ModelIdentity("benchmark", "", "", "", layout), config) as store:
        for tokens, calls in ((2048, 2), (64, 64)):
            ids, warm = np.arange(tokens, dtype=np.uint32), allocate(layout, tokens, 0, pool).tensors
            shape = (1, 3, tokens, 64)
            cache = [(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()) for _ in layout.layers]
            store.put(ids, cache, namespace=b"%d" % tokens)
            store.flush()

            def copy(target: Any, cache: Any = cache) -> None:
                for pair, source in zip(target, cache, strict=True):
                    for to, original in zip(pair, source, strict=True):
                        np.copyto(to.view(torch.int16).numpy(), original.view(torch.int16).numpy())

            def get(ids: Any = ids, tokens: int = tokens) -> None:
                hit = store.get(ids, namespace=b"%d" % tokens)
                if hit is None or hit.tiers != {"host": tokens}:
                    raise RuntimeError(f"expected {tokens} tokens from the host tier, found {hit and hit.tiers}")

            def timed(function: Callable[[], None], calls: int = calls) -> Callable[[], float]:
                def run() -> float:
                    gc.collect()
                    begin = time.perf_counter()
                    for _ in range(calls):
                        function()
                    return (time.perf_counter() - begin) / calls

                return run

            get()
            new = timed(lambda tokens=tokens, copy=copy: copy(allocate(layout, tokens, 0, pool).tensors))
            seconds = interleave(
                {"get": timed(get), "new": new, "warm": timed(lambda copy=copy, warm=warm: copy(warm))},
                5 if quick else 15,
            )
            case, nbytes = f"store/host-get/{codec}/{tokens}-tokens", tokens * layout.bytes_per_token
            rows.add(case, "read_GBps", nbytes / seconds["get"] / 1e9, "GB/s")
            for key, peer in (("new", "memcpy into new memory"), ("warm", "memcpy into warm memory")):
                share = seconds[key] / seconds["get"]
                rows.add(case, "share_of_ceiling", share, "share", peer, share)


# -- how long put holds up ---------------------------------------------------------------------------------------------


def latency(rows: Rows, folder: Path, model_folder: Path | None, text: Path | None, quick: bool) -> None:
    from benchmarks.conversations import load_model, measured_text

    model, tokenizer = load_model(model_folder)
    ids = tokenizer(measured_text(text, 1 << 14), return_tensors="pt", verbose=False).input_ids[:, :2048]
    prefills, puts = [], []
    with KVStore(folder, ModelIdentity.from_transformers(model, tokenizer)) as store, torch.inference_mode():
        for number in range(2 if quick else 5):
            begin = time.perf_counter()
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            prefills.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            store.put(ids[0], cache, namespace=b"%d" % number)
            puts.append(time.perf_counter() - begin)
            store.flush()
    share = statistics.median(puts) / statistics.median(prefills)
    rows.add("store/put-latency/2048", "p50_s", statistics.median(puts), "s", "prefill", share)


if __name__ == "__main__":
    main()
