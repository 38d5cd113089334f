"""Does a demotion cost the model time? A cache goes from the device to the host tier while the device computes.

The computation is products of matrices, as many as keep the device busy for about as long as a demotion takes. It is
timed alone, with a demotion (a put into a store that has only a host tier, coded by splitzip) beside it, and with a
plain copy of the raw bytes to pinned memory on another stream beside it, in the same rounds. `slowdown` is its time
beside against alone; `hidden` the share of the demotion's time that the two together did not take longer for.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import torch

from benchmarks.common import MIB, Rows, scratch
from benchmarks.device.machine import Machine, WrongBits, check, nbytes
from benchmarks.device.stores import opened

SIDE = 4096  # of the matrices: 137 GFLOP a product


def measure(machine: Machine, rows: Rows) -> None:
    layers = machine.choose(32, 8, 2)
    size = machine.choose(1024, 128, 0) * MIB
    tokens = max(70, size // (layers * 4 * machine.heads * machine.dim))
    kv, ids = machine.cache(layers, tokens), np.arange(tokens, dtype=np.uint32)
    raw = nbytes(kv)
    with scratch("gpu") as folder, opened(folder / "store", machine.layout(layers), raw, host="splitzip") as store:
        store.put(ids, kv)
        store.flush()
        hit = store.get(ids, device=machine.device)
        if hit is None or hit.tiers != {"host": tokens}:
            raise WrongBits(f"demotion: expected {tokens} tokens of the host tier, found {hit and hit.tiers}")
        check(hit.layers, kv, "demotion")
        del hit
        store.delete_namespace(b"")
        found = timed(machine, store, ids, kv, raw)
    case = f"demotion/{raw // MIB}MiB"
    for what in ("demotion", "copy"):
        peer = "pinned copy" if what == "demotion" else None
        alone, beside, both = found[what], found[f"compute beside {what}"], found[f"both with {what}"]
        slowdown, least = beside / found["compute"], min(alone, found["compute"])
        full = case if what == "demotion" else f"{case}/raw"
        reference = found["compute beside copy"] / found["compute"]
        rows.add(full, "demote_GBps", raw / alone / 1e9, "GB/s", peer, peer and found["copy"] / alone)
        rows.add(full, "slowdown", slowdown, "x of the time alone", peer, peer and slowdown / reference)
        rows.add(full, "hidden", (alone + found["compute"] - both) / least, "share")
    rows.add(case, "compute_s", found["compute"], "s")
    rows.add(case, "bit_identical", 1, "1 = yes")


def timed(machine: Machine, store: Any, ids: np.ndarray[Any, Any], kv: Any, raw: int) -> dict[str, float]:
    """Seconds, medians: of the computation, of the two ways, of it beside each, and until both are done."""
    side = machine.choose(SIDE, SIDE, 16)
    left, right = (torch.randn(side, side, device=machine.device).bfloat16() for _ in range(2))
    pinned, flat = machine.pinned(raw), machine.empty(raw)
    names = (str(number).encode() for number in itertools.count())
    other = machine.other_stream()

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right)

    def copy() -> None:
        with other():
            pinned.copy_(flat, non_blocking=True)

    def demote() -> bytes:
        name = next(names)
        store.put(ids, kv, namespace=name)
        return name

    def beside(what: str, times: int) -> tuple[float, float]:
        """Seconds until the computation is done, and until both are."""
        machine.wait()
        begin = time.perf_counter()
        name = demote() if what == "demotion" else b""
        if what == "copy":
            copy()
        compute(times)
        machine.wait_for_this_stream()
        computed = time.perf_counter() - begin
        store.flush()
        machine.wait()
        both = time.perf_counter() - begin
        if name:
            store.delete_namespace(name)
        return computed, both

    for _ in range(1 if machine.dry else 3):  # compiles, and fills the allocators' pools
        beside("demotion", 1), beside("copy", 1)
    once, alone = min(beside("", 8)[1] for _ in range(3)) / 8, min(beside("demotion", 0)[1] for _ in range(3))
    times = max(1, round(alone / once))
    samples: dict[str, list[float]] = {}
    order = np.random.default_rng(0)
    plan = [("", times), ("demotion", 0), ("copy", 0), ("demotion", times), ("copy", times)]
    for _ in range(machine.choose(15, 7, 1)):
        for number in order.permutation(len(plan)).tolist():
            what, count = plan[number]
            computed, both = beside(what, count)
            names_of = ["compute", None] if not what else [f"compute beside {what}", f"both with {what}"]
            for key, value in zip(names_of if count else [None, what], (computed, both), strict=True):
                if key is not None:
                    samples.setdefault(key, []).append(value)
    return {key: float(np.median(values)) for key, values in samples.items()}
