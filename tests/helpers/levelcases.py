"""Models of the levels of the exact predictor with random arrays, and blocks that they predict more or less well."""

from __future__ import annotations

from typing import Any

import numpy as np
import predictcases
import torch

from kvstore.codecs import KVView
from kvstore.codecs.predictive import _levels
from kvstore.codecs.predictive.levels import reference
from kvstore.codecs.predictive.levels.model import LEVELS, REACH, LevelModel, packed_size
from kvstore.codecs.predictive.model import CLASSES, ESCAPE, OFFSET, SYMBOLS
from kvstore.codecs.rans.coder import quantise
from kvstore.errors import CodecError

Arrays = dict[str, np.ndarray]
Block = predictcases.Block
Shapes = predictcases.Shapes
_SPREAD = 10  # of the residuals that the frequencies expect, in bins


def arrays_of(shapes: Shapes, rope: bool, seed: int, wild: float = 0.3) -> Arrays:
    """Random arrays of a section "levels" for layers of (heads, key_dim, value_dim); wild: how far scales are apart."""
    rng, arrays = np.random.default_rng([seed, len(shapes), rope]), {}
    widths = [(h * k, h * v) for h, k, v in shapes]
    likely = (1e6 * np.exp(-np.abs(np.arange(SYMBOLS) - OFFSET) / _SPREAD)).astype(np.int64) + 1
    likely[ESCAPE] = 1000
    for number, pair in enumerate(widths):
        for which, c in enumerate(pair):
            shared = f"{number}.{'kv'[which]}."
            fix = rng.integers(4, 9, c)
            if rope and which == 0:
                heads, half = shapes[number][0], shapes[0][1] // 2
                fix = np.broadcast_to(rng.integers(4, 9, (heads, 1, half)), (heads, 2, half)).reshape(-1)
            arrays[shared + "fix"] = fix.astype(np.int8)
            arrays[shared + "gain"] = rng.integers(200, 20000, c).astype(np.int16)
            if number == 0:
                arrays[shared + "row"] = rng.integers(1, 500, c).astype(np.int16)
            for level in LEVELS:
                own = f"{level}.{shared}"
                arrays[own + "narrow"] = rng.integers(200, 20000, c).astype(np.int16)
                arrays[own + "shift"] = rng.integers(5, 9, c).astype(np.int8)
                arrays[own + "bias"] = rng.integers(-9000, 9000, c).astype(np.int32)
                arrays[own + "scale"] = rng.normal(-12, 12 * wild, c).clip(-400, 400).astype(np.int16)
                arrays[own + "adapt"] = rng.integers(-160, 161, 3).astype(np.int32)
                inputs = sum(map(sum, widths[max(0, number - REACH[level]) : number])) + which * pair[0]
                if number and inputs:
                    arrays[own + "weight"] = rng.integers(-127, 128, (inputs, c)).astype(np.int8)
                if number:
                    arrays[own + "group"] = rng.integers(-60, 61, packed_size(c)).astype(np.int8)
    for level in LEVELS:
        arrays[f"{level}.freqs"] = quantise(np.tile(likely, (2 * CLASSES, 1)), 12, floor=True)
    return arrays


def model_of(shapes: Shapes, rope: bool, level: int, seed: int, wild: float = 0.3) -> LevelModel:
    layout, lossless = predictcases.arrays_of(shapes, rope, seed)
    return LevelModel.from_arrays(layout, level, lossless, arrays_of(shapes, rope, seed, wild))


def block_of(model: LevelModel, kind: str, tokens: np.ndarray, start: int, seed: int) -> Block:
    """Bits of bf16, [n, C], of K and V of every layer. kind: "predicted", with noise of the expected size; "random",
    "zeros", or "special", predicted but for NaN, infinity and other extremes in it."""
    rng = np.random.default_rng([seed, len(tokens)])
    walk = reference.Walk(model, torch.from_numpy(tokens.astype(np.int64)), start)
    return [
        tuple(_part(walk, layer, which, kind, rng) for which in range(2))  # type: ignore[misc]
        for layer in range(len(model.parts))
    ]


def _part(walk: reference.Walk, layer: int, which: int, kind: str, rng: np.random.Generator) -> np.ndarray:
    part, n = walk.model.parts[layer][which], len(walk.tokens)
    found = torch.zeros(n, part.width, dtype=torch.long)

    def values(at: slice, mu: torch.Tensor) -> torch.Tensor:
        mean = (mu << 16).int().view(torch.float32).numpy().clip(-1e30, 1e30)
        bits = predictcases.as_bits(torch.from_numpy(mean + rng.normal(0, 1, mean.shape) * np.exp2(part.scale[at] / 4)))
        if kind == "random":
            bits = rng.integers(0, 1 << 16, bits.shape).astype(np.uint16)
        if kind == "zeros":
            bits = np.zeros_like(bits)
        if kind == "special":
            some = rng.random(bits.shape) < 0.3
            bits[some] = rng.choice(predictcases.SPECIAL, int(some.sum()))
        found[:, at] = torch.from_numpy(bits.astype(np.int64))
        return reference.fixed(part, found, walk.rotation)[:, at]

    reference.walk_groups(part, walk.sums(layer, which), walk.rotation, values)
    walk.take(layer, which, reference.fixed(part, found, walk.rotation))
    return reference.as_cached(found, part, walk.rotation).numpy().astype(np.uint16)


def encoded(coder: _levels.Model, tokens: np.ndarray, start: int, view: KVView, cpu: str) -> list[bytes]:
    """The layers as a twin of the C++ writes them."""
    out = bytearray(100_000 + 8 * view.nbytes)
    sizes = _levels.encode(coder, tokens, start, view.rows, out, level=cpu)
    assert isinstance(sizes, tuple)
    return predictcases.layers_of(out, sizes)


def decoded(
    model: LevelModel,
    coder: _levels.Model,
    tokens: np.ndarray,
    start: int,
    layers: list[bytes],
    cpu: str,
    wanted: int | None = None,
) -> Any:
    """The first `wanted` tokens of a block, all by default. Raises `CodecError` for damage."""
    block = [
        tuple(np.full((len(tokens), part.width), 0x7FFF, np.uint16) for part in pair)  # type: ignore[misc]
        for pair in model.parts
    ]
    view, n = predictcases.view_of(model, block), len(tokens)
    wrong = _levels.decode(
        coder, tokens, start, b"".join(layers), list(map(len, layers)), view.rows, n if wanted is None else wanted, cpu
    )
    if wrong is not None:
        raise CodecError(wrong)
    return view


def same(view: KVView, model: LevelModel, block: Block, wanted: int | None = None) -> bool:
    """Whether a decoded block is this one, as far as it is wanted."""
    tensors = zip(view.tensors(), predictcases.view_of(model, block).tensors(), strict=True)
    return all(torch.equal(a.view(torch.int16)[:, :wanted], b.view(torch.int16)[:, :wanted]) for a, b in tensors)
