"""Models of the predictive codec with random arrays, blocks that they predict more or less well, and what is coded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvstore.codecs import KVView
from kvstore.codecs.predictive import _predict
from kvstore.codecs.predictive import reference as predictive_reference
from kvstore.codecs.predictive.linear_model import FINE, LinearModel
from kvstore.codecs.predictive.model import CLASSES, SYMBOLS, PredictiveModel
from kvstore.codecs.rans.coder import quantise
from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.errors import CodecError

COARSE = 60
VOCABULARY = 100
SPECIAL = [0, 0x8000, 1, 0x807F, 0x80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80, 0xBF81]
# The words of a dtype's values, of torch and of numpy.
WORDS: dict[str, tuple[torch.dtype, Any]] = {
    "bfloat16": (torch.int16, np.uint16),
    "float16": (torch.int16, np.uint16),
    "float32": (torch.int32, np.uint32),
    "float8_e5m2": (torch.uint8, np.uint8),
    "float8_e4m3fn": (torch.uint8, np.uint8),
}
Block = list[tuple[np.ndarray, np.ndarray]]
Shapes = list[tuple[int, int, int]]  # of layers: (heads, key_dim, value_dim)
SHAPES: tuple[Shapes, ...] = (
    [(2, 8, 8)] * 3,
    [(2, 16, 24)] * 3,
    [(1, 64, 64), (1, 64, 40), (3, 64, 64), (2, 64, 8)],
    [(3, 64, 64)] * 2,
    [(1, 10, 7)] * 4,
    [(2, 2, 1)],
)


def arrays_of(shapes: Shapes, rope: bool, seed: int, reach: float = 1.0) -> tuple[KVLayout, dict[str, np.ndarray]]:
    """Random arrays of a profile for layers of (heads, key_dim, value_dim); reach: how wild they are."""
    rng = np.random.default_rng([seed, len(shapes), rope])
    layout = KVLayout(tuple(LayerLayout(*shape) for shape in shapes), "bfloat16", "rotate_half" if rope else "none")
    half = shapes[0][1] // 2
    arrays: dict[str, np.ndarray] = {}
    widths = [(h * k, h * v) for h, k, v in shapes]
    for layer, width in enumerate(widths):
        for which, name in enumerate("kv"):
            prefix, c = f"{layer}.{name}.", width[which]
            inputs = sum(sum(w) for w in widths[max(0, layer - 2) : layer]) + (width[0] if which else 0)
            arrays[prefix + "in_scale"] = np.exp2(rng.uniform(3, 6, c)).astype(np.float32)
            fixed = rope and which == 0
            rough = 1.0 / (256 * 16 if layer == 0 else 127 * 60 * np.sqrt(inputs))
            arrays[prefix + "out_scale"] = (rough * np.exp2(rng.normal(0, 2 * reach, c).clip(-80, 80))).astype(
                np.float32
            )
            arrays[prefix + "scale"] = rng.normal(-4, 12 * reach, c).clip(-400, 400).astype(np.int16)
            arrays[prefix + "bias"] = rng.integers(-3000, 3001, c).astype(np.int32)
            arrays[prefix + "adapt"] = rng.integers(-160, 161, 3).astype(np.int32)
            if fixed:
                fix = rng.integers(4, 14, (shapes[layer][0], 1, half)) + rng.integers(
                    -3, 4, (shapes[layer][0], 1, half)
                )
                arrays[prefix + "fix"] = np.broadcast_to(fix, (shapes[layer][0], 2, half)).reshape(-1).astype(np.int8)
                arrays[prefix + "out_scale"] *= np.exp2(arrays[prefix + "fix"].astype(np.float32))
                arrays[prefix + "in_scale"] /= np.exp2(arrays[prefix + "fix"].astype(np.float32) + 14)
            if layer:
                arrays[prefix + "weight"] = rng.integers(-127, 128, (inputs, c)).astype(np.int8)
    arrays["token_kv"] = rng.integers(-128, 128, (VOCABULARY, sum(widths[0]))).astype(np.int8)
    arrays["freqs"] = quantise(rng.integers(1, 1000, (2 * CLASSES, SYMBOLS)) ** 3, 12, floor=True)
    if rope:
        angle = np.exp2(-np.arange(half)) * np.arange(FINE)[:, None]
        arrays["rope_fine"] = np.rint(16384 * np.stack([np.cos(angle), np.sin(angle)])).astype(np.int16)
        angle = np.exp2(-np.arange(half)) * FINE * np.arange(COARSE)[:, None]
        arrays["rope_coarse"] = np.rint(16384 * np.stack([np.cos(angle), np.sin(angle)])).astype(np.int16)
    return layout, arrays


def model_of(shapes: Shapes, rope: bool, seed: int, reach: float = 1.0) -> PredictiveModel:
    """The model of `arrays_of`."""
    return PredictiveModel.from_arrays(*arrays_of(shapes, rope, seed, reach))


def native(model: PredictiveModel, **changed: Any) -> _predict.Model:
    """The model for the C++, with some of its arguments changed."""
    parts = [part for pair in model.parts for part in pair]
    arrays: dict[str, Any] = {
        name: [getattr(part, name) for part in parts]
        for name in ("in_scale", "out_scale", "scale", "bias", "adapt", "fix", "weight")
    }
    arrays["shapes"] = np.array([(x.heads, x.key_dim, x.value_dim) for x in model.layout.layers], np.int64)
    arrays |= {name: getattr(model, name) for name in ("token_kv", "freqs", "rope_fine", "rope_coarse")}
    return _predict.Model(**{**arrays, **changed})


def as_bits(values: torch.Tensor) -> np.ndarray:
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16).copy()


def block_of(model: PredictiveModel, kind: str, tokens: np.ndarray, start: int, seed: int) -> Block:
    """Bits of bf16, [n, C], of K and V of every layer."""
    rng = np.random.default_rng([seed, len(tokens)])
    n, block = len(tokens), []
    walk = predictive_reference.Predictor(model, torch.from_numpy(tokens.astype(np.int64)), start)
    for layer, pair in enumerate(model.parts):
        found = []
        for part in pair:
            c = part.width
            if kind == "random":
                bits = rng.integers(0, 1 << 16, (n, c)).astype(np.uint16)
            elif kind == "zeros":
                bits = np.zeros((n, c), np.uint16)
            elif kind == "alike":
                bits = as_bits(torch.from_numpy(rng.normal(1, 1, (1, c)) + rng.normal(0, 0.1, (n, c))))
            else:  # what is predicted and noise of the expected size
                mean = (walk.predict(layer) << 16).int().view(torch.float32).numpy().clip(-1e30, 1e30)
                noise = rng.normal(0, 1, (n, c)) * rng.exponential(1, (n, 1)) * np.exp2(part.scale / 4.0)
                bits = as_bits(torch.from_numpy(mean + noise))
            if kind == "special":
                some = rng.random(bits.shape) < 0.3
                bits[some] = rng.choice(SPECIAL, int(some.sum()))
            found.append(bits)
            walk.take(layer, torch.from_numpy(bits.astype(np.int64)))
        block.append((found[0], found[1]))
    return block


def view_of(model: LinearModel, block: Block, dtype: str = "bfloat16") -> KVView:
    """A block of bits of this dtype, as `laid_out` views it."""
    return laid_out(replace(model.layout, dtype=dtype), block)


def laid_out(layout: KVLayout, block: Block) -> KVView:
    """A view of [heads, n, dim] tensors; every other one has its tokens apart."""
    layers = []
    for x, pair in zip(layout.layers, block, strict=True):
        k, v = (
            torch.from_numpy(bits).view(getattr(torch, layout.dtype)).view(len(bits), x.heads, dim).transpose(0, 1)
            for bits, dim in zip(pair, (x.key_dim, x.value_dim), strict=True)
        )
        layers.append((k, v.contiguous()))
    return KVView.of_layers(layout, layers)


def longs(block: Block) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The block as `predictive_reference.encode` takes it."""
    return [tuple(torch.from_numpy(bits.astype(np.int64)) for bits in pair) for pair in block]  # type: ignore[misc]


def encoded(
    coder: _predict.Model, tokens: np.ndarray, start: int, view: KVView, level: str, dtype: str = "bfloat16"
) -> list[bytes]:
    """The layers as a twin of the C++ writes them."""
    out = bytearray(100_000 + 8 * view.nbytes)
    sizes = _predict.encode(coder, tokens, start, view.rows, out, level=level, dtype=dtype)
    assert isinstance(sizes, tuple)
    return layers_of(out, sizes)


def layers_of(out: bytearray, sizes: Sequence[int]) -> list[bytes]:
    """The layers of a payload."""
    return [bytes(out[end - size : end]) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def decoded(
    model: PredictiveModel,
    coder: _predict.Model,
    tokens: np.ndarray,
    start: int,
    layers: list[bytes],
    level: str,
    wanted: int | None = None,
    dtype: str = "bfloat16",
) -> Block:
    """What a twin makes of them, of the first `wanted` tokens. Raises `CodecError`."""
    n, (_, unsigned) = len(tokens), WORDS[dtype]
    wanted = n if wanted is None else wanted
    block = [tuple(np.full((wanted, p.width), 7, unsigned) for p in pair) for pair in model.parts]
    tensors = [
        tuple(torch.full((x.heads, wanted, dim), 7.0).to(getattr(torch, dtype)) for dim in (x.key_dim, x.value_dim))
        for x in model.layout.layers
    ]
    rows = KVView.of_layers(replace(model.layout, dtype=dtype), tensors).rows  # type: ignore[arg-type]
    payload, sizes = b"".join(layers), list(map(len, layers))
    wrong = _predict.decode(coder, tokens, start, n, payload, sizes, rows, wanted, level, dtype)
    if wrong is not None:
        raise CodecError(wrong)
    fill(block, tensors)
    return block  # type: ignore[return-value]


def fill(block: Any, tensors: Any) -> None:
    """The bits of keys and values `[heads, n, dim]`, into arrays `[n, heads * dim]`."""
    for pair, mine in zip(tensors, block, strict=True):
        for tensor, bits in zip(pair, mine, strict=True):
            signed, unsigned = WORDS[str(tensor.dtype).removeprefix("torch.")]
            words = tensor.view(signed).numpy().view(unsigned)
            bits[:] = words.transpose(1, 0, 2).reshape(bits.shape)


def same(a: Block, b: Block, wanted: int | None = None) -> bool:
    return all(
        np.array_equal(x, y[:wanted])
        for mine, theirs in zip(a, b, strict=True)
        for x, y in zip(mine, theirs, strict=True)
    )


def same_longs(a: list[tuple[torch.Tensor, torch.Tensor]], b: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether two blocks as `longs` gives them are the same."""
    return all(torch.equal(x, y) for mine, theirs in zip(a, b, strict=True) for x, y in zip(mine, theirs, strict=True))
