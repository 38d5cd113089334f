"""The store against the disk, against memory, and against other ways to keep the same bytes.

`python -m benchmarks.store [--only write read host latency lmcache] [--lmcache PATH]`

- write: durable puts of raw records, in groups of 16 and 64 MiB, in steady state (every put evicts) and while the
  store fills for the first time, against O_DIRECT writes of the same bytes with one fdatasync; and the peers.
- read: random gets of single blocks, nothing in memory, decoded into tensors, against random O_DIRECT reads.
- host: gets from the host tier against copying the same bytes.
- latency: how long `put` holds up a program that just made a cache of 2,048 tokens.
- lmcache: LMCache's own benchmark of its disk backend, run in turns with ours.

Bytes are raw bytes of keys and values everywhere. Peers and ceilings run in turns with ours; medians.
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
from benchmarks.peers import Peer, peers
from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.result import allocate

SIZES = {"256KiB": MIB // 4, "1MiB": MIB, "4MiB": 4 * MIB}
BLOCK = 64  # tokens
PUT = 16 * MIB  # raw bytes of one put: a conversation of one or two thousand tokens
SECTIONS = ("write", "read", "host", "latency", "lmcache")


def main() -> None:
    parser = arguments("The store against the ceilings of this machine, and against peers.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="parts to run (all)")
    parser.add_argument("--dir", type=Path, help="where the data is written (default: build/scratch)")
    parser.add_argument(
        "--lmcache", type=Path, metavar="PATH", help="the lmcache executable; see requirements-peers.txt"
    )
    args = parser.parse_args()
    rows = Rows("store", args.json)
    with scratch("store", args.dir) as folder:
        for name in ("1MiB",) if args.quick else SIZES:
            if "write" in args.only:
                write(rows, folder / f"write-{name}", name, args.quick)
            if "read" in args.only:
                read(rows, folder / f"read-{name}", name, args.quick)
            if "lmcache" in args.only and args.lmcache is not None:
                lmcache(rows, folder / f"lmcache-{name}", name, args.lmcache, args.quick)
        if "host" in args.only:
            host(rows, args.quick)
        if "latency" in args.only:
            latency(rows, folder / "latency", args.model, args.text, args.quick)
    if "lmcache" in args.only and args.lmcache is None:
        print("lmcache: not run; give the path of its executable with --lmcache", flush=True)
    rows.main_exit()


def identity_for(record: int) -> ModelIdentity:
    """A model whose blocks of 64 tokens have `record` raw bytes: 16 layers, heads of 64 bfloat16 values."""
    layout = KVLayout.uniform(16, record // (16 * 2 * 64 * 2 * BLOCK), 64)
    return ModelIdentity("benchmark", "", f"{record}", "", layout)


def noise(layout: KVLayout, tokens: int) -> list[tuple[Any, Any]]:
    """Per layer (K, V) of random bits. The store copies these: their owner may write into them again."""
    return [
        (
            torch.randint(-(1 << 15), 1 << 15, (1, x.heads, tokens, x.key_dim), dtype=torch.int16).view(torch.bfloat16),
            torch.randint(-(1 << 15), 1 << 15, (1, x.heads, tokens, x.value_dim), dtype=torch.int16).view(
                torch.bfloat16
            ),
        )
        for x in layout.layers
    ]


class Ours:
    """A store of raw records of `record` bytes, and the sequences that were put into it: `put_bytes` each.

    copied: put tensors that the store has to copy, rather than a model's cache, whose tensors it may keep.
    """

    def __init__(
        self,
        path: Path,
        record: int,
        disk: int,
        host: int = 0,
        group: int = 64 * MIB,
        put_bytes: int = PUT,
        copied: bool = False,
    ) -> None:
        from transformers import DynamicCache

        identity = identity_for(record)
        config = StoreConfig(host=TierConfig(host), disk=TierConfig(disk, "raw"), group_bytes=group)
        self.store = KVStore(path, identity, config)
        self.put_bytes = put_bytes
        self.tokens = put_bytes // record * BLOCK
        pairs = noise(identity.layout, self.tokens)
        self.cache: Any = pairs if copied else DynamicCache(pairs)
        self.sequences = 0

    def sequence(self, number: int) -> Any:
        return np.random.default_rng(number).integers(0, 1 << 15, self.tokens, dtype=np.uint32)

    def put(self) -> None:
        if self.store.put(self.sequence(self.sequences), self.cache).dropped_blocks:
            raise RuntimeError("a put was dropped: this disk is slower than the put's time limit")
        self.sequences += 1

    def write(self, total: int) -> float:
        """Seconds until `total` new bytes are durable."""
        begin = time.perf_counter()
        for _ in range(total // self.put_bytes):
            self.put()
        if self.store.flush().dropped_blocks:
            raise RuntimeError("blocks were dropped; is the disk full?")
        return time.perf_counter() - begin

    def get(self, number: int, tier: str) -> None:
        """Gets one sequence whole, all of it from `tier`."""
        hit = self.store.get(self.sequence(number))
        if hit is None or hit.tiers != {tier: self.tokens}:
            raise RuntimeError(f"expected {self.tokens} tokens from {tier}, found {hit and hit.tiers}")


# -- durable writes ----------------------------------------------------------------------------------------------------


def write(rows: Rows, folder: Path, name: str, quick: bool) -> None:
    record, rounds = SIZES[name], 3 if quick else 7
    total, budget = (128 * MIB, 768 * MIB) if quick else (256 * MIB, 1024 * MIB)
    ours = {
        f"groups-of-{size}MiB": Ours(folder / f"ours-{size}", record, budget, group=size * MIB) for size in (64, 16)
    }
    first = {key: statistics.median(one.write(total) for _ in range(budget // total - 1)) for key, one in ours.items()}
    for one in ours.values():
        one.write(budget)  # from here on every put evicts, and segments are recycled
    payload = aligned(64 * MIB)
    values = [payload[at : at + record] for at in range(0, len(payload), record)]
    others = {key: make(folder / key, record, budget // record) for key, make in peers().items()}

    def write_peer(peer: Peer) -> None:
        for _ in range(total // len(payload)):
            peer.write(values)

    for peer in others.values():
        for _ in range(2 * budget // total):
            write_peer(peer)
    with direct_file(folder, total) as descriptor:
        functions: dict[str, Callable[[], object]] = {
            key: lambda one=one: one.write(total) for key, one in ours.items()
        }
        functions |= {key: lambda peer=peer: write_peer(peer) for key, peer in others.items()}
        functions["ceiling"] = lambda: direct_write(descriptor, total)
        seconds = interleave(functions, rounds)
    for one in ours.values():
        one.store.close()
    for peer in others.values():
        peer.close()

    ceiling, case = seconds["ceiling"], f"store/durable-write/{name}"
    rows.add(f"ceiling/durable-write/{name}", "write_GBps", total / ceiling / 1e9, "GB/s")
    for key in ours:
        for state, spent in (("", seconds[key]), ("/first-fill", first[key])):
            rows.add(f"{case}/{key}{state}", "write_GBps", total / spent / 1e9, "GB/s")
            rows.add(f"{case}/{key}{state}", "share_of_ceiling", ceiling / spent, "share", "O_DIRECT", ceiling / spent)
    best = seconds["groups-of-64MiB"]
    rows.add(case, "share_of_ceiling", ceiling / best, "share", "O_DIRECT", ceiling / best)
    for key in others:
        rows.add(f"{key}/durable-write/{name}", "write_GBps", total / seconds[key] / 1e9, "GB/s")
        rows.add(
            f"{key}/durable-write/{name}",
            "share_of_ceiling",
            ceiling / seconds[key],
            "share",
            "O_DIRECT",
            ceiling / seconds[key],
        )
        rows.add(case, "write_GBps", total / best / 1e9, "GB/s", key, seconds[key] / best)


# -- cold reads --------------------------------------------------------------------------------------------------------


def read(rows: Rows, folder: Path, name: str, quick: bool) -> None:
    record, rounds = SIZES[name], 3 if quick else 7
    total, count = (192 * MIB if quick else 512 * MIB), (64 * MIB if quick else 128 * MIB) // SIZES[name]
    ours = Ours(folder / "ours", record, 2 * total, put_bytes=record)
    ours.write(total)
    held = ours.sequences
    picks = np.random.default_rng(0)

    def gets(threads: int) -> None:
        numbers = [int(n) for n in picks.integers(0, held, count)]
        if threads == 1:
            for number in numbers:
                ours.get(number, "disk")
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda number: ours.get(number, "disk"), numbers))

    with direct_file(folder, total) as descriptor:

        def reads(threads: int) -> float:
            with ThreadPoolExecutor(threads) as pool:
                begin = time.perf_counter()
                list(
                    pool.map(
                        lambda seed: direct_read(descriptor, total, record, count // threads, seed), range(threads)
                    )
                )
                return time.perf_counter() - begin

        drop_page_cache(folder)
        gets(1)
        seconds = interleave(
            {
                "get": lambda: gets(1),
                "ceiling": lambda: direct_read(descriptor, total, record, count, int(picks.integers(1 << 30))),
                "get-2": lambda: gets(2),
                "ceiling-2": lambda: reads(2),
            },
            rounds,
        )
    ours.store.close()
    for suffix, case in (("", f"store/cold-read/{name}"), ("-2", f"store/cold-read/{name}/2-threads")):
        share = seconds["ceiling" + suffix] / seconds["get" + suffix]
        rows.add(case, "read_GBps", count * record / seconds["get" + suffix] / 1e9, "GB/s")
        rows.add(case, "share_of_ceiling", share, "share", "O_DIRECT", share)
        rows.add(
            case.replace("store", "ceiling"), "read_GBps", count * record / seconds["ceiling" + suffix] / 1e9, "GB/s"
        )


# -- the host tier -----------------------------------------------------------------------------------------------------


def host(rows: Rows, quick: bool) -> None:
    """A cache of SmolLM2-135M's shape; 2,048 tokens are 47 MB."""
    layout = KVLayout.uniform(30, 3, 64)
    with KVStore("", ModelIdentity("benchmark", "", "", "", layout), StoreConfig(disk=TierConfig(0))) as store:
        for tokens, calls in ((2048, 2), (64, 64)):
            ids, cache, warm = np.arange(tokens, dtype=np.uint32), noise(layout, tokens), allocate(layout, tokens)[0]
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
            new = timed(lambda tokens=tokens, copy=copy: copy(allocate(layout, tokens)[0]))
            seconds = interleave(
                {"get": timed(get), "new": new, "warm": timed(lambda copy=copy, warm=warm: copy(warm))},
                5 if quick else 15,
            )
            case, nbytes = f"store/host-get/{tokens}-tokens", tokens * layout.bytes_per_token
            rows.add(case, "read_GBps", nbytes / seconds["get"] / 1e9, "GB/s")
            for key, peer in (("new", "memcpy into new memory"), ("warm", "memcpy into warm memory")):
                share = seconds[key] / seconds["get"]
                rows.add(case, "share_of_ceiling", share, "share", peer, share)


# -- how long put holds up ---------------------------------------------------------------------------------------------


def latency(rows: Rows, folder: Path, model_folder: Path | None, text: Path | None, quick: bool) -> None:
    from benchmarks.conversations import load_model, plain_text

    model, tokenizer = load_model(model_folder)
    ids = tokenizer(plain_text(text, 1 << 14), return_tensors="pt", verbose=False).input_ids[:, :2048]
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


# -- LMCache -----------------------------------------------------------------------------------------------------------


def lmcache(rows: Rows, folder: Path, name: str, executable: Path, quick: bool) -> None:
    from benchmarks.peers.lmcache import Speeds, bench

    record, theirs, mine = SIZES[name], [], []
    for number in range(1 if quick else 5):
        theirs.append(bench(executable, folder, record, PUT // record))
        mine.append(like_lmcache(folder / f"ours-{number}", record))
    their, our = Speeds.median(theirs), Speeds.median(mine)
    for key in ("store", "store_synced", "load_cold", "load_warm"):
        ours, other = getattr(our, key), getattr(their, key)
        rows.add(f"store/as-lmcache/{name}", f"{key}_GBps", ours / 1e9, "GB/s", "lmcache fs_native", ours / other)
        rows.add(f"lmcache/{name}", f"{key}_GBps", other / 1e9, "GB/s")


def like_lmcache(path: Path, record: int) -> Any:
    """What `lmcache bench l2` does, done with a store: as many bytes, the same batches and sizes, a warm-up batch,
    tensors whose owner may reuse them after the put, and then the loads."""
    from benchmarks.peers.lmcache import ROUNDS, Speeds

    ours = Ours(path, record, 1024 * MIB, copied=True)
    ours.put()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        ours.put()
    store_s = time.perf_counter() - begin
    ours.store.flush()
    synced_s = time.perf_counter() - begin
    ours.store.close()
    drop_page_cache(path)
    loads = []
    for tier in ("disk", "host"):
        ours = Ours(path, record, 1024 * MIB, host=512 * MIB if tier == "host" else 0)
        for number in range(ROUNDS + 1 if tier == "host" else 1):
            ours.get(number, "disk")
        begin = time.perf_counter()
        for number in range(1, ROUNDS + 1):
            ours.get(number, tier)
        loads.append(ROUNDS * PUT / (time.perf_counter() - begin))
        ours.store.close()
    return Speeds(ROUNDS * PUT / store_s, ROUNDS * PUT / synced_s, *loads)


if __name__ == "__main__":
    main()
