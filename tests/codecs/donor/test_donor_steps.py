"""The donor codec's step mode: its tables, how far values are off, and what it takes, by the plain program."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part

from kvstore.codecs.donor import steps_reference as reference
from kvstore.codecs.donor import steps_tables as tables
from kvstore.codecs.donor.reference import Rows
from kvstore.errors import CodecError

CHECKSUM = 75275157  # of the frequencies, which never change


def bits_of(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).bfloat16().view(torch.int16).long() & 0xFFFF


def case(n: int, noise: float, seed: int, heads: int = 2, dims: tuple[int, int] = (16, 12)) -> tuple[Rows, list]:
    """Random rows of three layers, unturned, and a block that differs from them."""
    rng = np.random.default_rng(seed)
    donor = [tuple(rng.standard_normal((n, heads * dim)) for dim in dims) for _ in range(3)]
    block = [tuple(bits_of(x + noise * rng.standard_normal(x.shape)) for x in pair) for pair in donor]
    return Rows([heads] * 3, [tuple(map(bits_of, pair)) for pair in donor]), block  # type: ignore[misc]


def values(block: list) -> torch.Tensor:
    return torch.cat([reference.values_of(x).flatten() for pair in block for x in pair])


def test_tables_are_those_of_the_format() -> None:
    rows = tables.frequencies()
    assert rows.shape == (tables.CLASSES + tables.SCALES, tables.ESCAPE + 1)
    assert (rows.sum(1) == 4096).all()
    assert (rows[: tables.CLASSES, : tables.CLASSES] > 0).all()
    assert not rows[: tables.CLASSES, tables.CLASSES :].any()
    numbers = rows[tables.CLASSES :]
    assert (numbers == np.concatenate([numbers[:, tables.ESCAPE - 1 :: -1], numbers[:, tables.ESCAPE :]], 1)).all()
    assert numbers[:, tables.LARGEST].tolist() == sorted(numbers[:, tables.LARGEST].tolist(), reverse=True)
    assert tables.limits()[0] >= 1
    assert tables.limits()[-1] == tables.LARGEST
    assert int(rows.astype(np.int64).ravel() @ (1 + np.arange(rows.size) % 9973)) == CHECKSUM


def test_constants_follow_from_their_definitions() -> None:
    assert tables.EXPECTED.tolist() == [round(4096 * 2 ** (-8 + c / 1.5)) for c in range(tables.CLASSES - 1)]
    shifts = range(tables.LEAST_SHIFT + 1, tables.MOST_SHIFT + 1)
    assert tables.BOUNDS.tolist() == [round(65536 * 2 ** ((shift - 0.5) / 1.5)) for shift in shifts]
    assert list(tables.STEPS) == [round(4096 * 2 ** (i / 4)) for i in range(4)]


def test_costs_are_those_of_the_frequencies() -> None:
    freqs = tables.frequencies()[tables.CLASSES :].astype(np.float64)
    for scale in range(tables.SCALES):
        escape = 16 + 12 - math.log2(freqs[scale, tables.ESCAPE])
        for size in range(tables.LARGEST + 2):
            f = freqs[scale, tables.LARGEST + size] if size <= tables.LARGEST else 0
            want = 12 - math.log2(f) if f else escape
            assert abs(tables.costs()[scale, size] / 256 - want) <= 1 / 256


@pytest.mark.parametrize("step", [2.0**-6, 0.25, 0.5, 1.0])
def test_what_is_decoded_is_as_near_as_the_header_says(step: float) -> None:
    rows, block = case(40, 0.2, 1)
    layers = reference.encode(rows, block, step)
    decoded = reference.decode(rows, layers)
    error = (values(decoded) - values(block)).abs()
    _, _, largest, mean = reference.header(layers[0])
    assert float(error.max()) == largest > 0
    assert float(error.double().square().mean()) == pytest.approx(mean, rel=1e-6)
    assert reference.decode(rows, layers)[0][0].equal(decoded[0][0])
    steps = torch.cat(
        [
            reference.steps_of(mu, 2, reference.quarters_of(step)).expand(mu.shape).flatten()
            for pair in rows.donor
            for mu in pair
        ]
    )
    ulp = values(block).abs() / 128  # values are rounded to bf16 besides
    assert (error <= 13.5 / 16 * steps + ulp).all()
    assert (error > 0.4 * steps).any()


def test_a_smaller_step_takes_more_and_is_nearer() -> None:
    rows, block = case(64, 0.1, 2)
    found = []
    for step in (math.inf, 0.5, 0.25, 0.125, 0.0625):
        layers = reference.encode(rows, block, step)
        found.append((sum(map(len, layers)), reference.header(layers[0])[3]))
    sizes, means = zip(*found, strict=True)
    assert list(sizes) == sorted(set(sizes))
    assert list(means) == sorted(set(means), reverse=True)


def test_rows_like_their_donors_take_a_header() -> None:
    rows, _ = case(64, 0, 3)
    layers = reference.encode(rows, rows.donor, 0.25)
    assert [len(layer) for layer in layers] == [13, 1, 1]
    assert values(reference.decode(rows, layers)).equal(values(rows.donor))  # type: ignore[arg-type]


def test_the_donor_alone_is_what_an_infinite_step_gives() -> None:
    rows, block = case(32, 0.5, 4)
    layers = reference.encode(rows, block, math.inf)
    assert [len(layer) for layer in layers] == [13, 1, 1]
    assert values(reference.decode(rows, layers)).equal(values(rows.donor))  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0.5, math.inf])
def test_what_is_not_finite_or_far_away_is_kept(step: float) -> None:
    rows, block = case(8, 0.1, 5)
    special = torch.tensor([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F7F, 0xFF7F])
    block[1][0][3, :6] = special
    decoded = reference.decode(rows, reference.encode(rows, block, step))
    kept = 4 if step == math.inf else 6
    assert decoded[1][0][3, :kept].equal(special[:kept])


def test_rows_that_differ_more_take_wider_tables() -> None:
    """That rows adapt: a block whose first rows differ much costs less than the same rows in every order mixed."""
    rng = np.random.default_rng(6)
    donor = [tuple(rng.standard_normal((64, 64)) for _ in range(2)) for _ in range(6)]
    noise = np.where(np.arange(64) < 6, 0.5, 0.01)[:, None]
    apart = [[x + noise * rng.standard_normal(x.shape) for x in pair] for pair in donor]
    level = math.sqrt(float((noise**2).mean()))
    alike = [[x + level * rng.standard_normal(x.shape) for x in pair] for pair in donor]
    rows = Rows([4] * 6, [tuple(map(bits_of, pair)) for pair in donor])  # type: ignore[misc]
    sizes = [
        sum(map(len, reference.encode(rows, [tuple(map(bits_of, pair)) for pair in block], 0.25)))  # type: ignore[misc]
        for block in (apart, alike)
    ]
    assert sizes[0] < 0.6 * sizes[1]


@given(st.floats(allow_nan=True))
@settings(max_examples=part(60), deadline=None)
def test_steps_are_checked(step: float) -> None:
    if step == math.inf or 2.0**-50 <= step <= 2.0**50:
        assert reference.quarters_of(step) == reference.NOTHING or abs(reference.quarters_of(step)) <= 200
    else:
        with pytest.raises(ValueError, match="step"):
            reference.quarters_of(step)


def test_damage_is_found() -> None:
    rows, block = case(10, 0.3, 7)
    block[0][1][2, 3] = 0x7F80
    layers = reference.encode(rows, block, 0.25)
    for number, layer in enumerate(layers):
        for end in range(0, len(layer), 7):
            with pytest.raises(CodecError):
                reference.decode(rows, [*layers[:number], layer[:end], *layers[number + 1 :]])
    with pytest.raises(CodecError):
        reference.decode(rows, [layers[0][:2] + b"\x02" + layers[0][3:], *layers[1:]])
    assert len(reference.decode(rows, layers)) == 3
