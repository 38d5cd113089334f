"""Caches of a GPU through the store: the device tier, and the ways back from host and disk.

One sequence, 32 layers of 8 heads of 128, put and got; nothing is timed that does not give back every bit. `put` is
until `flush` returns. The peer of the device tier is a copy on the device of the raw bytes, that of host and disk a
copy of them between the device and pinned memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import MIB, Rows, scratch
from benchmarks.device.machine import Layers, Machine, WrongBits, check, nbytes
from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig

BLOCK = 64
CASES = (
    ("device", "raw"), ("device", "splitzip"), ("host", "raw"), ("host", "splitzip"), ("host", "entropy"),
    ("disk", "splitzip"),
)  # fmt: skip


def measure(machine: Machine, rows: Rows) -> None:
    layers = machine.choose(32, 8, 2)
    size = machine.choose(512, 64, 0) * MIB
    tokens = max(2 * BLOCK + 5, size // (layers * 4 * machine.heads * machine.dim))
    ids, kv = np.arange(tokens, dtype=np.uint32), machine.cache(layers, tokens)
    layout = machine.layout(layers)
    for tier, codec in CASES:
        with scratch("gpu") as folder, opened(folder / "store", layout, nbytes(kv), **{tier: codec}) as store:
            measure_tier(machine, rows, store, tier, codec, ids, kv)


def opened(folder: Path, layout: KVLayout, raw: int, **codecs: str) -> KVStore:
    """A store with the tiers that are named, each with room for three times the bytes."""
    budget = 3 * raw + 512 * MIB
    tiers: dict[str, Any] = {tier: TierConfig(0) for tier in ("device", "host", "disk")}
    tiers |= {tier: TierConfig(budget, codec) for tier, codec in codecs.items()}
    identity = ModelIdentity("gpu", "1", "weights", "tokenizer", layout)
    return KVStore(folder, identity, StoreConfig(**tiers, block_tokens=BLOCK, write_queue_bytes=budget))


def measure_tier(
    machine: Machine, rows: Rows, store: KVStore, tier: str, codec: str, ids: np.ndarray[Any, Any], kv: Layers
) -> None:
    raw, device = nbytes(kv), machine.device
    flat, other, pinned = machine.empty(raw), machine.empty(raw), machine.pinned(raw)
    names = (str(number).encode() for number in itertools.count())

    def put() -> float:
        """Into a namespace of its own, which is gone before the next."""
        name = next(names)
        seconds = machine.by_clock_once(lambda: (store.put(ids, kv, namespace=name), store.flush()))
        store.delete_namespace(name)
        return seconds

    def get() -> float:
        return machine.by_clock_once(lambda: store.get(ids, device=device))

    store.put(ids, kv)
    store.flush()
    for count in (len(ids), BLOCK + 3):
        hit = store.get(ids[:count], device=device)
        if hit is None or hit.tiers != {tier: count}:
            raise WrongBits(f"{tier}/{codec}: expected {count} tokens of {tier}, found {hit and hit.tiers}")
        check(hit.layers, [(k[:, :count], v[:, :count]) for k, v in kv], f"{tier}/{codec}")
    del hit
    held = store.stats()[tier]["bytes"]
    copies: dict[str, Callable[[], object]] = {
        "device copy": lambda: flat.copy_(other),
        "pinned copy/put": lambda: pinned.copy_(flat, non_blocking=True),
        "pinned copy/get": lambda: flat.copy_(pinned, non_blocking=True),
    }
    functions = {name: machine.by_clock(function) for name, function in copies.items()}
    put(), get()
    found = machine.interleave({**functions, "put": put, "get": get}, machine.choose(7, 5, 1))
    fallbacks = {k: v for k, v in store.stats()["counters"].items() if k.startswith(("fallback", "dropped", "damaged"))}
    case = f"store/{tier}/{codec}/{raw // MIB}MiB"
    rows.add(case, "ratio", raw / held, "x")
    for way in ("put", "get"):
        peer = "device copy" if tier == "device" else "pinned copy"
        ceiling = found[peer if tier == "device" else f"{peer}/{way}"]
        rows.add(case, f"{way}_GBps", raw / found[way] / 1e9, "GB/s", peer, ceiling / found[way])
    rows.add(case, "fallbacks", float(sum(fallbacks.values())), "counted: " + (", ".join(sorted(fallbacks)) or "none"))
    rows.add(case, "bit_identical", 1, "1 = yes")
