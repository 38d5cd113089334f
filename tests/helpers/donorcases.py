"""Blocks, the donors of some of their rows, models of the donor codec with random arrays, and what is coded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import predictcases
import torch
from predictcases import SPECIAL, Block, as_bits, laid_out

from kvstore.codecs import KVView
from kvstore.codecs.donor import _donor
from kvstore.codecs.donor import reference as donor_reference
from kvstore.codecs.donor.codec import native_model
from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.donor.spans import Span, SpanTable
from kvstore.codecs.donor.tables import frequencies
from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.errors import CodecError

ROPE = '{"rope_theta": 100.0, "rope_type": "default"}'
Shapes = predictcases.Shapes
KINDS = ("near", "same", "random", "special", "zeros")  # of blocks, as `case_of` takes them


def layout_of(shapes: Shapes, rope: bool) -> KVLayout:
    return KVLayout(tuple(LayerLayout(*shape) for shape in shapes), "bfloat16", ROPE if rope else "none")


def arrays_of(shapes: Shapes, rope: bool, seed: int, reach: float = 1.0) -> dict[str, np.ndarray]:
    """Random arrays of a profile's section "donor"."""
    given = predictcases.arrays_of(shapes, rope, seed, reach)[1]
    arrays = {name: array for name, array in given.items() if name.rsplit(".")[-1] in ("in_scale", "out_scale", "fix")}
    arrays |= {name: array for name, array in given.items() if name.startswith("rope")}
    widths = [(h * k, h * v) for h, k, v in shapes]
    for layer in range(1, len(shapes)):
        for which, name in enumerate("kv"):
            inputs = sum(widths[layer - 1]) + (widths[layer][0] if which else 0)
            arrays[f"{layer}.{name}.weight"] = given[f"{layer}.{name}.weight"][-inputs:].copy()
    return arrays


def model_of(shapes: Shapes, rope: bool, seed: int, reach: float = 1.0) -> DonorModel:
    return DonorModel.from_arrays(layout_of(shapes, rope), arrays_of(shapes, rope, seed, reach))


def coder_of(layout: KVLayout, model: DonorModel | None, **changed: Any) -> _donor.Coder:
    if model is not None and not changed:
        return native_model(model)
    shapes = np.array([(x.heads, x.key_dim, x.value_dim) for x in layout.layers], np.int64)
    return _donor.Coder(**{"shapes": shapes, "freqs": frequencies(), **changed})


@dataclass(frozen=True)
class Case:
    """block: bits [count, C]; donors: bits [span.count, C] of each span."""

    layout: KVLayout
    table: SpanTable
    start: int
    block: Block
    donors: list[Block]
    model: DonorModel | None = None

    @property
    def count(self) -> int:
        return len(self.block[0][0])

    @property
    def covered(self) -> np.ndarray:
        return np.concatenate([np.arange(s.start, s.end) for s in self.table.spans])


def bits_like(rng: np.random.Generator, kind: str, donor: np.ndarray) -> np.ndarray:
    """Bits that `donor` predicts more or less well."""
    if kind == "random":
        return rng.integers(0, 1 << 16, donor.shape).astype(np.uint16)
    if kind == "zeros":
        return np.zeros_like(donor)
    if kind == "same":
        return donor.copy()
    values = torch.from_numpy(donor.astype(np.int64) << 16).int().view(torch.float32).numpy()
    values = np.nan_to_num(values, nan=1.0).clip(-1e30, 1e30)
    noise = rng.normal(0, 0.1, donor.shape) * rng.exponential(1, (len(donor), 1)) * np.abs(values).mean(0)
    found = as_bits(torch.from_numpy(values + noise))
    if kind == "special":
        some = rng.random(found.shape) < 0.3
        found[some] = rng.choice(SPECIAL, int(some.sum()))
    return found


def spans_of(rng: np.random.Generator, count: int, shifted: bool) -> list[Span]:
    """Some runs of `count` rows, at least one, with gaps and without."""
    edges = np.unique(rng.integers(0, count + 1, int(rng.integers(2, 8))))
    runs = list(pairwise(edges)) or [(0, count)]
    kept = [run for run in runs if rng.random() < 0.7] or runs[:1]
    shifts = (0, 7, -130) if shifted else (0,)
    return [
        Span(int(a), int(b - a), i % 3 % len(kept), int(rng.integers(9)), int(rng.choice(shifts)))
        for i, (a, b) in enumerate(kept)
    ]


def case_of(
    shapes: Shapes, rope: bool, kind: str, count: int, seed: int, *, start: int = 300, model: DonorModel | None = None
) -> Case:
    rng = np.random.default_rng([seed, count, len(shapes)])
    layout = layout_of(shapes, rope)
    spans = spans_of(rng, count, rope)
    table = SpanTable.of(layout, spans, flags=1 if model else 0)
    widths = [(h * k, h * v) for h, k, v in shapes]
    wild = "random" if kind in ("random", "special") else "near"
    sizes = [[np.exp2(rng.normal(0, 3, (1, c))) for c in pair] for pair in widths]

    def donor(rows: int) -> Block:
        found = [
            [as_bits(torch.from_numpy(rng.normal(1, 1, (rows, c)) * s)) for c, s in zip(pair, size, strict=True)]
            for pair, size in zip(widths, sizes, strict=True)
        ]
        if wild == "random":
            for pair in found:
                for bits in pair:
                    some = rng.random(bits.shape) < 0.2
                    bits[some] = rng.choice(SPECIAL, int(some.sum()))
        return [(k, v) for k, v in found]

    donors = [donor(span.count) for span in spans]
    block = donor(count)
    for span, rows in zip(spans, donors, strict=True):
        for pair, theirs in zip(block, rows, strict=True):
            for mine, bits in zip(pair, theirs, strict=True):
                mine[span.start : span.end] = bits_like(rng, kind, bits)
    return Case(layout, table, start, block, donors, model)


def longs(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.int64))


def rows_of(case: Case) -> donor_reference.Rows:
    donor = [
        (longs(np.concatenate([d[i][0] for d in case.donors])), longs(np.concatenate([d[i][1] for d in case.donors])))
        for i in range(len(case.layout.layers))
    ]
    which = torch.cat([torch.full((s.count,), w) for s, w in zip(case.table.spans, case.table.which, strict=True)])
    cos = sin = None
    if len(case.table.angles):
        angles = torch.from_numpy(case.table.angles.astype(np.int64))[which.clamp(min=0)]
        cos, sin = angles[:, 0], angles[:, 1]
    positions = torch.from_numpy(case.start + case.covered)
    heads = [x.heads for x in case.layout.layers]
    return donor_reference.Rows(heads, donor, cos, sin, which >= 0, positions, case.model)


def reference(case: Case) -> list[bytes]:
    """The layers as the reference writes them."""
    block = [(longs(k[case.covered]), longs(v[case.covered])) for k, v in case.block]
    return donor_reference.encode(rows_of(case), block)


def referred(case: Case, layers: list[bytes]) -> Block:
    """What the reference decodes: the covered rows. Raises `CodecError`."""
    block = donor_reference.decode(rows_of(case), layers)
    return [(k.numpy().astype(np.uint16), v.numpy().astype(np.uint16)) for k, v in block]


def rows_alone(case: Case) -> Block:
    """What `referred` must find."""
    return [(k[case.covered], v[case.covered]) for k, v in case.block]


def arguments(case: Case, rows: np.ndarray) -> tuple[tuple[Any, ...], list[KVView]]:
    """What both functions of `_donor` take, and what must live meanwhile."""
    views = [laid_out(case.layout, donor) for donor in case.donors]
    runs = np.array([(s.start, s.count, w) for s, w in zip(case.table.spans, case.table.which, strict=True)], np.int64)
    tables = [view.rows for view in views]
    return (case.start, case.count, rows, runs, tables, case.table.angles, case.model is not None), views


def encoded(coder: _donor.Coder, case: Case, level: str, room: int | None = None) -> list[bytes] | None:
    """The layers as a twin of the C++ writes them; None where `room` bytes do not do."""
    view = laid_out(case.layout, case.block)
    out = bytearray(100_000 + 8 * view.nbytes if room is None else room)
    given, views = arguments(case, view.rows)
    sizes = _donor.encode(coder, *given, out, level=level)
    del views
    return None if sizes is None else predictcases.layers_of(out, sizes)


def decoded(coder: _donor.Coder, case: Case, layers: list[bytes], level: str, wanted: int | None = None) -> Block:
    """What a twin makes of them, [wanted, C], 7.0 in rows that are not covered. Raises `CodecError`."""
    wanted = case.count if wanted is None else wanted
    seven = int(as_bits(torch.tensor([7.0]))[0])
    block = [tuple(np.full((wanted, bits.shape[1]), seven, np.uint16) for bits in pair) for pair in case.block]
    tensors = [
        tuple(torch.full((x.heads, wanted, dim), 7.0).bfloat16() for dim in (x.key_dim, x.value_dim))
        for x in case.layout.layers
    ]
    given, views = arguments(case, KVView.of_layers(case.layout, tensors).rows)  # type: ignore[arg-type]
    wrong = _donor.decode(coder, *given, b"".join(layers), list(map(len, layers)), wanted, level)
    del views
    if wrong is not None:
        raise CodecError(wrong)
    predictcases.fill(block, tensors)
    return block  # type: ignore[return-value]


def expected(case: Case, wanted: int | None = None) -> Block:
    """What `decoded` must find."""
    wanted = case.count if wanted is None else wanted
    seven = int(as_bits(torch.tensor([7.0]))[0])
    rows = case.covered[case.covered < wanted]
    block = [tuple(np.full((wanted, bits.shape[1]), seven, np.uint16) for bits in pair) for pair in case.block]
    for pair, mine in zip(case.block, block, strict=True):
        for bits, found in zip(pair, mine, strict=True):
            found[rows] = bits[rows]
    return block  # type: ignore[return-value]


def comes_back(decode: Callable[..., Block], case: Case, wanted: int) -> None:
    """`decode()` finds what is expected, and `decode(wanted)` of the first tokens."""
    assert predictcases.same(decode(), expected(case))
    assert predictcases.same(decode(wanted), expected(case, wanted))


def with_another_donor(case: Case) -> Case:
    """A case whose first donor has one bit changed."""
    donors: Any = [[tuple(bits.copy() for bits in pair) for pair in donor] for donor in case.donors]
    donors[0][1][1][0, 3] ^= 0x40
    return replace(case, donors=donors)
