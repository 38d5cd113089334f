"""What the lossy mode of the predictive codec takes, and what it does to the model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump, Progress, silent
from kvstore.codecs.predictive.lossy_model import CLASSES, ESCAPE, PLAIN, LossyModel
from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.lossy_reference import HEADER
from kvstore.codecs.predictive.lossy_rows import Engine, Rows, quantise
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.core.cache_argument import cache_name
from kvstore.core.layout import SINKS, KVLayout
from kvstore.core.rope import pair_order

Arrays = dict[str, np.ndarray[Any, Any]]
Tensor = torch.Tensor
NEAR = 64  # tokens next to what was coded, which are looked at by themselves


def ideal_bits(engine: Engine, rows: Rows) -> float:
    """What the entropy coder takes for rows, without headers."""
    costs = 12 - np.log2(np.maximum(engine.model.freqs, 1e-9).astype(np.float64))
    costs[:, ESCAPE] += 16
    by_row = 12 - np.log2(engine.model.row_freqs.astype(np.float64))
    spent, before = 0.0, np.full_like(rows.shifts[0], PLAIN)
    for shifts in rows.shifts:
        spent += float(by_row[before, shifts].sum())
        before = shifts
    for part, (symbols, classes) in enumerate(zip(rows.symbols, rows.classes, strict=True)):
        coded = classes >= 0
        spent += float(costs[classes[coded] + CLASSES * (part % 2), symbols[coded]].sum())
    return spent


def code_window(
    engine: Engine, steps: Steps, dump: KVDump, window: int, count: int | None = None, block: int = 64
) -> tuple[float, Rows]:
    """(bits for every value that is coded, headers included; the rows) of the first `count` tokens of a window."""
    count = dump.length if count is None else count
    tokens, positions = torch.from_numpy(dump.tokens(window)[:count]), torch.arange(count)
    layers = [
        [torch.from_numpy(x[:count].astype(np.int64)) for x in dump.coded(i, window)] for i in range(len(engine.parts))
    ]
    rows = quantise(engine, steps, tokens, positions, positions < SINKS, layers)
    values = (count - SINKS) * sum(x.shape[1] for pair in layers for x in pair)
    overhead = 8 * -(-count // block) * (HEADER.size + 64 + len(layers))
    return (ideal_bits(engine, rows) + overhead) / values, rows


def bits_per_value(
    dump: KVDump, base: PredictiveModel, arrays: Arrays, windows: Sequence[int], level: tuple[float, float]
) -> float:
    """What the codec would take for these windows at these steps, all-in but for records and the exact rows."""
    engine, steps = Engine(LossyModel.from_arrays(base, arrays)), Steps.of(*level)
    return float(np.mean([code_window(engine, steps, dump, window)[0] for window in windows]))


@torch.inference_mode()
def measure(
    model: Any,
    dump: KVDump,
    base: PredictiveModel,
    arrays: Arrays,
    levels: Sequence[tuple[float, float]],
    windows: Sequence[int] | None = None,
    progress: Progress = silent,
) -> np.ndarray[Any, Any]:
    """The ladder, float32 [levels, 5]: of each level the steps, bits a value, and what the model's predictions lose.

    The first half of each window is coded, the second scored on what is decoded against the same on the exact cache:
    Kullback-Leibler divergence, nats a token, over all of it and over its first 64 tokens. windows: by default the
    first four that are held out.
    """
    windows = list(dump.held_out)[:4] if windows is None else windows
    engine = Engine(LossyModel.from_arrays(base, arrays))
    found = np.zeros((len(levels), 5))
    for at, window in enumerate(windows):
        progress("lossy: measuring quality", at, len(windows))
        half = dump.length // 2
        ids = torch.from_numpy(dump.tokens(window))[None, half:].to(model.device)
        exact = [
            torch.from_numpy(x[:half].astype(np.int64)) for i in range(len(base.parts)) for x in dump.coded(i, window)
        ]
        want = log_probabilities(model, ids, [x.to(ids.device) for x in as_cached(exact, dump.layout)])
        for i, level in enumerate(levels):
            bits, rows = code_window(engine, Steps.of(*level), dump, window, half)
            got = log_probabilities(model, ids, [x.to(ids.device) for x in as_cached(rows.decoded, dump.layout)])
            each = divergences(want, got)
            found[i] += np.array([*level, bits, each.mean().item(), each[:NEAR].mean().item()]) / len(windows)
    progress("lossy: measuring quality", len(windows), len(windows))
    return found.astype(np.float32)


def divergences(want: Tensor, got: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each token's distribution, nats, [n]. Log-probabilities, [n, vocabulary]."""
    # A few at a time: what is computed of them is as large as they are.
    pieces = [slice(begin, begin + NEAR) for begin in range(0, len(want), NEAR)]
    return torch.cat([(want[at].exp() * (want[at] - got[at])).sum(-1) for at in pieces])


def with_ladder(arrays: Arrays, ladder: np.ndarray[Any, Any]) -> Arrays:
    """The same arrays with what `measure` found, by growing steps."""
    return {**arrays, "ladder": ladder[np.argsort(ladder[:, 0])].astype(np.float32)}


def log_probabilities(model: Any, ids: Tensor, cached: Sequence[Tensor]) -> Tensor:
    """Log-probabilities, float32 [tokens, vocabulary], after a cache of K and V of each layer."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(len(cached) // 2):
        cache.update(cached[2 * layer], cached[2 * layer + 1], layer)
    logits: Tensor = model(ids, **{cache_name(model): cache}, use_cache=True).logits[0]
    return logits.float().log_softmax(-1)


def as_cached(parts: Sequence[Tensor], layout: KVLayout) -> list[Tensor]:
    """bf16 bits [n, C] of K, in `rope.pair_order`, and V of each layer as the model holds them, [1, heads, n, dim]."""
    found = []
    for number, bits in enumerate(parts):
        shape = layout.layers[number // 2]
        x = bits.to(torch.int32).to(torch.int16).view(torch.bfloat16).view(len(bits), shape.heads, -1)
        order = pair_order(layout.rope, shape.key_dim) if number % 2 == 0 else None
        if order is not None:
            x = x[:, :, torch.from_numpy(np.argsort(order))]
        found.append(x.transpose(0, 1)[None].contiguous())
    return found
