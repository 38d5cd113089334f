"""Models of the lossy mode with random arrays, blocks that were coded with them, and what decoders make of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.calibration.lossy.tables import laplace
from kvstore.codecs import KVView
from kvstore.codecs.predictive import _lossy
from kvstore.codecs.predictive.lossy import native_model
from kvstore.codecs.predictive.lossy_model import LossyModel, input_widths
from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.lossy_reference import Block, decode_blocks, encode_blocks
from kvstore.codecs.predictive.lossy_rows import Engine, from_bits
from kvstore.codecs.predictive.model import CLASSES as EXACT_CLASSES
from kvstore.codecs.predictive.model import SYMBOLS as EXACT_SYMBOLS
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.rans.coder import quantise as table_of
from kvstore.core.layout import SINKS, KVLayout, LayerLayout
from kvstore.errors import CodecError

VOCABULARY = 60
Shapes = list[tuple[int, int, int]]
SHAPES: tuple[Shapes, ...] = (
    [(2, 8, 8)] * 4,
    [(3, 64, 64)] * 3,
    [(1, 64, 40), (3, 64, 64), (1, 64, 8), (2, 64, 24), (1, 64, 64)],
    [(1, 10, 7)] * 5,
    [(2, 2, 1)],
)


def model_of(shapes: Shapes, rope: bool, seed: int) -> LossyModel:
    """Of layers of (heads, key_dim, value_dim); random, with any inputs that parts may have."""
    rng = np.random.default_rng([seed, len(shapes), rope])
    layout = KVLayout(tuple(LayerLayout(*x) for x in shapes), "bfloat16", "rotate_half" if rope else "none")
    widths = [(h * k, h * v) for h, k, v in shapes]
    half = shapes[0][1] // 2
    base: dict[str, Any] = {
        "token_kv": rng.integers(-128, 128, (VOCABULARY, sum(widths[0]))).astype(np.int8),
        "freqs": table_of(np.ones((2 * EXACT_CLASSES, EXACT_SYMBOLS), np.int64), 12, floor=True),
    }
    if rope:
        for name, positions in (("rope_fine", np.arange(128)), ("rope_coarse", 128 * np.arange(50))):
            angle = positions[:, None] * 10000.0 ** -(np.arange(half) / half)
            base[name] = np.rint(16384 * np.stack([np.cos(angle), np.sin(angle)])).astype(np.int16)
    for number, pair in enumerate(widths):
        before = sum(sum(w) for w in widths[max(0, number - 2) : number])
        for which, c in enumerate(pair):
            prefix, turned = f"{number}.{'kv'[which]}.", rope and not which
            base[prefix + "in_scale"] = np.full(c, 30 * 2.0**-22 if turned else 30, np.float32)
            base[prefix + "out_scale"] = np.full(c, 256e-5 if turned else 1e-5, np.float32)
            base[prefix + "scale"] = np.zeros(c, np.int16)
            base[prefix + "bias"] = rng.integers(-100, 100, c).astype(np.int32)
            base[prefix + "adapt"] = np.zeros(3, np.int32)
            if turned:
                base[prefix + "fix"] = np.full(c, 8, np.int8)
            if number:
                inputs = before + (pair[0] if which else 0)
                base[prefix + "weight"] = np.zeros((inputs, c), np.int8)
    exact = PredictiveModel.from_arrays(layout, base)
    uses = np.zeros((len(shapes), 2), np.uint8)
    own: dict[str, Any] = {
        "levels": np.array([[-20, -24], [-11, -8], [3, 5]], np.int16),
        "ladder": np.zeros((0, 5), np.float32),
        "uses": uses,
        **laplace(),
    }
    for number, pair in enumerate(widths):
        for which, c in enumerate(pair):
            prefix, kinds = f"{number}.{'kv'[which]}.", input_widths(exact, number, which)
            chosen = [kind for kind in kinds if rng.random() < 0.6] or list(kinds)
            uses[number, which] = sum(1 << kind for kind in chosen)
            if number:
                inputs = sum(kinds[kind] for kind in chosen)
                own[prefix + "weight"] = rng.integers(-127, 128, (inputs, c)).astype(np.int8)
                own[prefix + "bias"] = rng.integers(-5000, 5000, c).astype(np.int32)
                own[prefix + "out_scale"] = (0.002 / inputs * rng.uniform(0.2, 1, c)).astype(np.float32)
            turn = np.linalg.qr(rng.standard_normal((c, c)))[0]
            own[prefix + "basis"] = np.rint(127 * turn / np.abs(turn).max(1)[:, None]).astype(np.int8)
            own[prefix + "component"] = (np.abs(turn).max(1) / 127).astype(np.float32)
            own[prefix + "unit"] = rng.uniform(0.5, 1.5, c).astype(np.float32)
            own[prefix + "scale"] = (rng.integers(-30, 12, c) + rng.integers(-3, 4, (3, c))).astype(np.int16)
            own[prefix + "focus"] = (rng.standard_normal(sum(pair) + 1) / np.sqrt(sum(pair))).astype(np.float32)
            own[prefix + "adapt"] = rng.integers(-200, 257, 3).astype(np.int32)
    return LossyModel.from_arrays(exact, own)


@dataclass(frozen=True)
class Case:
    """A coded block, and what it was made from."""

    model: LossyModel
    engine: Engine
    native: _lossy.Model
    steps: Steps
    block: Block
    sections: list[bytes]

    @property
    def sizes(self) -> list[int]:
        return [len(section) for section in self.sections]

    @property
    def exact(self) -> int:
        return max(0, min(len(self.block.tokens), SINKS - self.block.start))


def case_of(shapes: Shapes, rope: bool, n: int, start: int, steps: tuple[float, float], seed: int) -> Case:
    model, rng = model_of(shapes, rope, seed), np.random.default_rng(seed)
    layers = []
    for heads, *dims in shapes:
        pair = [rng.standard_normal((n, heads * dim)) * rng.exponential(1, (n, 1)) for dim in dims]
        layers.append(tuple(torch.from_numpy(x).bfloat16().view(torch.int16).long() & 0xFFFF for x in pair))
    tokens = torch.from_numpy(rng.integers(0, VOCABULARY + 10, n))
    engine, block = Engine(model), Block(tokens, start, layers)  # type: ignore[arg-type]
    found = Steps.of(*steps)
    return Case(model, engine, native_model(model), found, block, encode_blocks(engine, found, [block])[0])


def target_of(model: LossyModel, n: int) -> tuple[KVView, list[torch.Tensor]]:
    """A view of [heads, n, dim] tensors, every other one with its tokens apart; rows are 7 before."""
    tensors = []
    for x in model.layout.layers:
        tensors.append(torch.full((n, x.heads, x.key_dim), 7.0).bfloat16().transpose(0, 1))
        tensors.append(torch.full((x.heads, n, x.value_dim), 7.0).bfloat16())
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
    return KVView.of_layers(model.layout, pairs), tensors


def decoded(
    case: Case, level: str, wanted: int | None = None, sections: Sequence[bytes] | None = None
) -> list[torch.Tensor]:
    """bf16 bits, int64 [wanted, C], of every part; `CodecError` where the decoder says what is wrong."""
    sections = case.sections if sections is None else sections
    count = len(case.block.tokens) if wanted is None else wanted
    view, tensors = target_of(case.model, count)
    tokens, sizes = case.block.tokens.numpy(), [len(x) for x in sections]
    wrong = _lossy.decode(case.native, tokens, case.block.start, b"".join(sections), sizes, view.rows, count, level)
    if wrong is not None:
        raise CodecError(wrong)
    return [x.transpose(0, 1).flatten(1).contiguous().view(torch.int16).long() & 0xFFFF for x in tensors]


def reference(case: Case, sections: Sequence[bytes] | None = None) -> list[torch.Tensor]:
    sections = case.sections if sections is None else sections
    found = decode_blocks(case.engine, [(case.block.tokens, case.block.start)], [sections])[0]
    return [bits for pair in found for bits in pair]


def assert_close(case: Case, found: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Rounded otherwise in a few values, which in sum is far below what quantisation loses."""
    pairs = list(zip(found, want, [bits for pair in case.block.layers for bits in pair], strict=True))
    differing = sum(int((a != b).sum()) for a, b, _ in pairs)
    assert differing <= 3 + 0.02 * sum(a.numel() for a, _, _ in pairs)
    drift = sum((from_bits(a) - from_bits(b)).square().sum().item() for a, b, _ in pairs)
    lost = sum((from_bits(b) - from_bits(c)).square().sum().item() for _, b, c in pairs)
    assert drift <= 1e-3 + 0.01 * lost
    for a, b, c in pairs:
        assert torch.equal(a[: case.exact], c[: case.exact])
        assert torch.equal(b[: case.exact], c[: case.exact])
