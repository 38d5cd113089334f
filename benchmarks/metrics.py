"""What counting and timing cost a get: with the metrics of a store on, and with every call of them doing nothing.

`python -m benchmarks.metrics [--rounds 400] [--dir DIR]`. Gets of 64, 512 and 2,048 tokens with the layout of
SmolLM2-135M from the host tier (splitzip) and from the disk (entropy, page cache as it is), in turns, medians, and the
median of what neighbours differ by. There is no switch for metrics in the product: here the two calls that count are
replaced by ones that do nothing. The contents are made up; no codec's time depends on them but by their size. Beside
the times stands what the calls took by themselves, as a share of the get: how many there were, times what one takes in
a loop, which other programs on the machine disturb less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Rows, arguments, scratch
from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import GIB
from kvstore.metrics import Metric, Metrics
from kvstore.timing import Timing, Where

LAYOUT = KVLayout.uniform(30, 3, 64)  # SmolLM2-135M
LENGTHS = (64, 512, 2048)


def main() -> None:
    parser = arguments("What metrics cost a get.")
    parser.add_argument("--rounds", type=int, metavar="N", help="gets of each kind (400)")
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: build/scratch)")
    args = parser.parse_args()
    rows, rounds = Rows("metrics", args.json), args.rounds or (60 if args.quick else 400)
    with scratch("metrics", args.dir) as folder:
        for tier, config in (
            ("host", StoreConfig(host=TierConfig(GIB, "splitzip"), disk=TierConfig(0), learn="off")),
            ("disk", StoreConfig(host=TierConfig(0), disk=TierConfig(GIB, "entropy"), learn="off")),
        ):
            identity = ModelIdentity("smollm2", "made-up", "", "", LAYOUT)
            with KVStore(folder / tier, identity, config) as store:
                for count in LENGTHS:
                    _measure(rows, store, f"{tier}/{count}", count, rounds)


def _measure(rows: Rows, store: KVStore, case: str, count: int, rounds: int) -> None:
    draw = np.random.default_rng(count)
    tokens = draw.integers(1, 49152, count).astype(np.uint32)
    random = torch.Generator().manual_seed(count)
    store.put(tokens, [tuple(torch.randn(3, count, 64, generator=random).bfloat16() for _ in "kv") for _ in range(30)])
    store.flush()
    took: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds):
        on = number % 4 in (1, 2)  # off, on, on, off: neither is always the second
        with _counting(store, on):
            begin = time.perf_counter()
            hit = store.get(tokens)
            took[on].append(time.perf_counter() - begin)
        assert hit is not None
        assert hit.tokens == count
    on_s, off_s = statistics.median(took[True]), statistics.median(took[False])
    apart = statistics.median(on - off for on, off in zip(took[True], took[False], strict=True))
    adds, observations = _calls(store, tokens)
    calls_s = adds * _per_call(lambda metrics: metrics.add(Metric.GET_TOKENS, 64)) + observations * _per_call(
        lambda metrics: metrics.timings.observe(Timing.DECODE, 0.0003, Where("disk", "entropy"))
    )
    rows.add(case, "p50_s", on_s, "s", "without metrics", off_s / on_s)
    rows.add(case, "difference", apart / off_s, "share, median of pairs")
    rows.add(case, "calls", adds + observations, "calls a get")
    rows.add(case, "share_of_get", calls_s / on_s, "share")


@contextmanager
def _counting(store: KVStore, on: bool) -> Iterator[None]:
    """Within it the store counts and times, or every call that does so does nothing."""
    if on:
        yield
        return
    metrics: Any = store.metrics
    metrics.add = metrics.timings.observe = lambda *_, **__: None
    try:
        yield
    finally:
        del metrics.add, metrics.timings.observe


def _calls(store: KVStore, tokens: np.ndarray) -> tuple[int, int]:
    """How often a get counts, and how often it times."""
    metrics: Any = store.metrics
    found = [0, 0]

    def count(which: int) -> Any:
        def called(*_: Any, **__: Any) -> None:
            found[which] += 1

        return called

    metrics.add, metrics.timings.observe = count(0), count(1)
    try:
        store.get(tokens)
    finally:
        del metrics.add, metrics.timings.observe
    return found[0], found[1]


def _per_call(call: Any, times: int = 2000, rounds: int = 15) -> float:
    """Median seconds of one call, in a loop."""
    metrics, found = Metrics(), []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(times):
            call(metrics)
        found.append((time.perf_counter() - begin) / times)
    return statistics.median(found)


if __name__ == "__main__":
    main()
