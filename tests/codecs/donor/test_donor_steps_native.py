"""The donor codec's step mode in C++ against the plain program: the same bytes and values in every twin; damage."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from cpulevels import cpu_levels
from hypothesis import example, given, settings
from hypothesis import strategies as st
from length import part

from kvstore.codecs import KVView
from kvstore.codecs.donor import steps as donor_steps
from kvstore.codecs.donor import steps_reference as reference
from kvstore.codecs.donor.reference import Rows
from kvstore.codecs.donor.spans import STEPS, Span, SpanTable
from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
LEVELS = cpu_levels()
ROPE = json.dumps({"rope_type": "default", "rope_theta": 10000.0})
SPECIAL = [0, 0x8000, 1, 0x807F, 0x80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80, 0xBF81]
Shapes = tuple[tuple[int, int, int], ...]
SHAPES: tuple[Shapes, ...] = (
    ((3, 64, 64),) * 3,
    ((2, 6, 5),) * 4,
    ((1, 8, 3), (4, 8, 24), (2, 8, 1)),
    ((1, 2, 1),),
)
RUNS = (  # (first row, rows, donor's first row, shift)
    ((0, 9, 0, 5),),
    ((2, 7, 1, 0), (11, 3, 0, -1000), (14, 1, 3, 5)),
    ((0, 64, 0, 123),),
)


@dataclass(frozen=True)
class Case:
    """A block, its spans, the rows that they name, and the plain program's arguments."""

    layout: KVLayout
    table: SpanTable
    donors: list[KVView]
    block: KVView
    rows: Rows
    bits: list[tuple[torch.Tensor, torch.Tensor]]  # of the covered rows


def strided(bits: torch.Tensor, heads: int, apart: bool) -> torch.Tensor:
    """int64 [n, C] as bf16 [heads, n, dim], tokens or heads contiguous."""
    x = bits.to(torch.int32).to(torch.int16).view(torch.bfloat16).view(len(bits), heads, -1).transpose(0, 1)
    return x if apart else x.contiguous()


def bits_of(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).bfloat16().view(torch.int16).long() & 0xFFFF


def case_of(shapes: Shapes, runs: Sequence[tuple[int, ...]], rope: bool, noise: float, wild: float, seed: int) -> Case:
    """wild: how many of the values, there and here, are any bits or special ones."""
    rng = np.random.default_rng(seed)
    layout = KVLayout(tuple(LayerLayout(*x) for x in shapes), "bfloat16", ROPE if rope else "none")
    spans = [Span(a, n, i, at, shift if rope else 0) for i, (a, n, at, shift) in enumerate(runs)]
    table, count = SpanTable.of(layout, spans, STEPS), spans[-1].end + 2

    def some(n: int, width: int) -> np.ndarray:
        return rng.standard_normal((n, width)) * np.exp2(rng.integers(-6, 4, width)) * rng.choice([1, 0, 1, 1], width)

    def spoiled(bits: torch.Tensor) -> torch.Tensor:
        strange = torch.from_numpy(rng.choice(np.array([*SPECIAL, *rng.integers(0, 1 << 16, 8)]), bits.shape))
        return torch.where(torch.from_numpy(rng.random(bits.shape) < wild), strange, bits)

    donors, whole, donor_bits = [], [], []
    for span in spans:
        tensors, flat = [], []
        for x in layout.layers:
            for dim in (x.key_dim, x.value_dim):
                bits = spoiled(bits_of(some(span.donor_start + span.count, x.heads * dim)))
                tensors.append(strided(bits, x.heads, bool(rng.integers(2))))
                flat.append(bits[span.donor_start :])
        view = KVView.of_layers(layout, list(zip(tensors[::2], tensors[1::2], strict=True)))
        donors.append(view.narrow(span.donor_start, span.count))
        donor_bits.append(flat)
    joined = [torch.cat(parts) for parts in zip(*donor_bits, strict=True)]
    which = torch.cat([torch.full((s.count,), w) for s, w in zip(table.spans, table.which, strict=True)])
    cos = sin = rotated = None
    if len(table.angles):
        angles = torch.from_numpy(table.angles.astype(np.int64))[which.clamp(min=0)]
        cos, sin, rotated = angles[:, 0], angles[:, 1], which >= 0
    pairs = list(zip(joined[::2], joined[1::2], strict=True))
    rows = Rows([x.heads for x in layout.layers], pairs, cos, sin, rotated)
    walk = reference.Predictor(rows)
    tensors, at = [], torch.cat([torch.arange(s.start, s.end) for s in spans])
    for number, x in enumerate(layout.layers):
        for _ in range(2):
            mu = reference.finite(walk.predict(number))
            walk.take(number, mu)
            error = noise * np.exp2(-0.3 * np.arange(len(mu))[:, None] % 8) * rng.standard_normal(mu.shape)
            bits = torch.zeros(count, mu.shape[1], dtype=torch.long)
            bits[at] = spoiled(bits_of(reference.values_of(mu).numpy() * (1 + error)))
            tensors.append(strided(bits, x.heads, bool(rng.integers(2))))
            whole.append(bits[at])
    block = KVView.of_layers(layout, list(zip(tensors[::2], tensors[1::2], strict=True)))
    return Case(layout, table, donors, block, rows, list(zip(whole[::2], whole[1::2], strict=True)))


def encoded(case: Case, step: float, level: str | None = None) -> list[bytes]:
    covered = case.table.covered()
    out = memoryview(bytearray(donor_steps.bound(case.layout, covered)))
    sizes = donor_steps.encode(case.block, case.table, case.donors, step, out, level=level)
    assert sizes is not None
    ends = np.cumsum([0, *sizes]).tolist()
    return [bytes(out[a:b]) for a, b in pairwise(ends)]


def decoded(case: Case, layers: Sequence[bytes], level: str | None = None, wanted: int | None = None) -> list:
    """bf16 bits of each part, int64 [wanted, C]; 0x4100 where nothing was written."""
    count = case.block.tokens if wanted is None else wanted
    tensors = []
    for x in case.layout.layers:
        tensors.append(torch.full((x.heads, count, x.key_dim), 8.0).bfloat16())
        tensors.append(torch.full((count, x.heads, x.value_dim), 8.0).bfloat16().transpose(0, 1))
    out = KVView.of_layers(case.layout, list(zip(tensors[::2], tensors[1::2], strict=True)))
    payload = memoryview(b"".join(layers))
    donor_steps.decode(case.table, payload, [len(x) for x in layers], case.donors, out, level=level)
    return [t.transpose(0, 1).reshape(count, -1).view(torch.int16).long() & 0xFFFF for t in tensors]


def check(case: Case, step: float) -> list[bytes]:
    want = reference.encode(case.rows, case.bits, step)
    values = [x for pair in reference.decode(case.rows, want) for x in pair]
    at = torch.cat([torch.arange(s.start, s.end) for s in case.table.spans])
    for level in LEVELS:
        assert encoded(case, step, level) == want
        for wanted in (case.block.tokens, 5):
            found = decoded(case, want, level, wanted)
            rest = torch.ones(wanted, dtype=torch.bool)
            rest[at[at < wanted]] = False
            for x, y in zip(values, found, strict=True):
                assert y[at[at < wanted]].equal(x[at < wanted])
                assert (y[rest] == 0x4100).all()
    return want


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_native_is_the_plain_program(shapes: Shapes, runs: Sequence[tuple[int, ...]]) -> None:
    rope = shapes[0][1] % 2 == 0 and len({x[1] for x in shapes}) == 1
    layers = check(case_of(shapes, runs, rope, 0.3, 0.01, 1), 0.25)
    assert sum(map(len, layers)) > 128  # there was a stream


@given(
    st.sampled_from(SHAPES),
    st.sampled_from(RUNS[:2]),
    st.booleans(),
    st.sampled_from([0.0, 0.02, 0.3, 5.0]),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([2.0**-50, 1e-3, 0.3, 1.0, 2.0**50, math.inf]),
    st.integers(0, 1 << 30),
)
@example(SHAPES[1], RUNS[1], True, 0.3, 1.0, 2.0**-50, 0)
@settings(max_examples=part(40), deadline=None)
def test_any_values_and_steps(
    shapes: Shapes, runs: Sequence[tuple[int, ...]], rope: bool, noise: float, wild: float, step: float, seed: int
) -> None:
    case = case_of(shapes, runs, rope and len({x[1] for x in shapes}) == 1, noise, wild, seed)
    layers = check(case, step)
    # Every value that is not finite comes back, and no other is further off than the header says.
    largest, mean = donor_steps.errors(memoryview(layers[0]))
    assert 0 <= mean <= largest**2 * (1 + 1e-6)
    for pair, found in zip(case.bits, reference.decode(case.rows, layers), strict=True):
        for x, y in zip(pair, found, strict=True):
            finite = reference.finite(x) == x
            assert y[~finite].equal(x[~finite])
            error = (reference.values_of(x[finite]) - reference.values_of(y[finite])).abs()
            assert error.numel() == 0 or float(error.max()) <= largest


@pytest.mark.parametrize("level", LEVELS)
def test_truncated_layers(level: str) -> None:
    case = case_of(SHAPES[1], RUNS[1], True, 0.5, 0.02, 3)
    layers = encoded(case, 0.25)
    assert decoded(case, layers, level)
    for number, layer in enumerate(layers):
        for end in range(len(layer)):
            with pytest.raises(CodecError):
                decoded(case, [*layers[:number], layer[:end], *layers[number + 1 :]], level)
        with pytest.raises(CodecError):
            decoded(case, [*layers[:number], layer + b"\0\0", *layers[number + 1 :]], level)


@pytest.mark.parametrize("level", LEVELS)
def test_damaged_bytes_are_found_or_decoded_like_the_plain_program_does(level: str) -> None:
    case = case_of(SHAPES[1], RUNS[1], True, 0.5, 0.002, 4)
    layers, rng = encoded(case, 0.25), np.random.default_rng(5)
    at = torch.cat([torch.arange(x.start, x.end) for x in case.table.spans])
    found = coded = 0
    for _ in range(150):
        number = int(rng.integers(len(layers)))
        layer = bytearray(layers[number])
        place = int(rng.integers(len(layer)))
        layer[place] ^= 1 << int(rng.integers(8))
        damaged = [*layers[:number], bytes(layer), *layers[number + 1 :]]
        section = reference._Section.of(layers[number][0 if number else reference.HEADER.size :])
        coded += place >= len(layer) - len(section.words)
        try:
            want = [x for pair in reference.decode(case.rows, damaged) for x in pair]
        except CodecError:
            found += 1
            with pytest.raises(CodecError):
                decoded(case, damaged, level)
            continue
        assert all(y[at].equal(x) for x, y in zip(want, decoded(case, damaged, level), strict=True))
    # Of the stream nearly every bit matters to its end; escapes and the errors of the header may be anything.
    assert found > 0.9 * coded > 30


def test_sizes_that_cannot_be() -> None:
    case = case_of(SHAPES[1], RUNS[0], False, 0.3, 0, 6)
    payload, out = memoryview(b"".join(encoded(case, 0.5))), case.block
    for sizes in ([len(payload)], [len(payload), 1, 0, 0], [1 << 63, 1 << 63, 0, 0], [0, 0, 0, 0]):
        with pytest.raises(CodecError):
            donor_steps.decode(case.table, payload, sizes, case.donors, out)


def test_no_room() -> None:
    case = case_of(SHAPES[1], RUNS[1], False, 0.5, 0.05, 7)
    total = sum(map(len, encoded(case, 0.1)))
    for room in (0, 1, 12, 13, total - 1):
        out = memoryview(bytearray(room))
        assert donor_steps.encode(case.block, case.table, case.donors, 0.1, out) is None
    sizes = donor_steps.encode(case.block, case.table, case.donors, 0.1, memoryview(bytearray(total)))
    assert sizes is not None
    assert sum(sizes) == total


def test_bound_holds_for_the_worst() -> None:
    case = case_of(SHAPES[1], RUNS[2], False, 0.5, 1.0, 8)
    assert sum(map(len, encoded(case, 2.0**-50))) > 0.3 * donor_steps.bound(case.layout, case.table.covered())


def test_what_does_not_fit_is_refused() -> None:
    case = case_of(SHAPES[1], RUNS[0], False, 0.5, 0, 9)
    out = memoryview(bytearray(10000))
    with pytest.raises(ValueError, match="donors"):
        donor_steps.encode(case.block, case.table, [], 0.5, out)
    with pytest.raises(ValueError, match="the rows of its span"):
        donor_steps.encode(case.block, case.table, [case.block], 0.5, out)
    with pytest.raises(ValueError, match="spans"):
        donor_steps.encode(case.block.narrow(0, 5), case.table, case.donors, 0.5, out)
    with pytest.raises(ValueError, match="step"):
        donor_steps.encode(case.block, case.table, case.donors, 0.0, out)


def test_threads() -> None:
    case = case_of(SHAPES[0], RUNS[2], True, 0.5, 0.01, 10)
    want = encoded(case, 0.3)
    with ThreadPoolExecutor(4) as pool:
        assert all(got == want for got in pool.map(lambda _: encoded(case, 0.3), range(16)))
        values = list(pool.map(lambda _: decoded(case, want), range(16)))
    assert all(x.equal(y) for got in values for x, y in zip(got, values[0], strict=True))
