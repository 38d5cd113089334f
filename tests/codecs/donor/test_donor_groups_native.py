"""The mode in groups in C++ against its reference: every twin, byte for byte, and what damage does."""

from __future__ import annotations

from functools import partial

import donorcases
import numpy as np
import pytest
from codertwins import threads_agree
from cpulevels import cpu_levels
from damaged_layers import changed_word, damage_found, truncations
from donorcases import KINDS, Shapes, case_of, expected
from groupcases import decoded, encoded, model_of, referred, written
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from predictcases import SHAPES, laid_out, same

from kvstore.codecs.donor import _donor_groups
from kvstore.codecs.donor.groups.mode import native_coder
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
CPUS = cpu_levels()


@settings(max_examples=part(60), deadline=None)
@given(
    st.sampled_from(SHAPES), st.sampled_from([1, 2, 3]), st.booleans(), st.sampled_from(KINDS),
    st.sampled_from([1, 2, 5, 64, 130]), st.sampled_from([0.3, 3.0]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_twins_give_the_bytes_of_the_reference(
    shapes: Shapes, level: int, rope: bool, kind: str, count: int, wild: float, seed: int
) -> None:
    model = model_of(shapes, rope, level, seed, wild)
    case = case_of(shapes, rope, kind, count, seed)
    coder, want = native_coder(model), written(case, model)
    assert same(referred(case, model, want), donorcases.rows_alone(case))
    for cpu in CPUS:
        assert encoded(coder, case, cpu) == want
        donorcases.comes_back(partial(decoded, coder, case, want, cpu), case, 1 + seed % count)


def test_what_is_alike_costs_little_and_groups_are_used() -> None:
    shapes = SHAPES[3]
    model, other = model_of(shapes, True, 2, 1), model_of(shapes, True, 2, 2)
    case = case_of(shapes, True, "near", 64, 1)
    assert encoded(native_coder(model), case, CPUS[-1]) != encoded(native_coder(other), case, CPUS[-1])
    sizes = {
        kind: sum(map(len, encoded(native_coder(model), case_of(shapes, False, kind, 64, 1), CPUS[-1]) or []))
        for kind in ("same", "near", "random")
    }
    assert 2 * sizes["same"] < sizes["near"] < sizes["random"]  # the tables of the model expect no zeros


def test_room() -> None:
    case, coder = case_of(SHAPES[0], True, "near", 64, 1), native_coder(model_of(SHAPES[0], True, 2, 1))
    size = sum(map(len, encoded(coder, case, CPUS[-1]) or []))
    for room in (0, 1, 50, 500, size // 2, size - 1):
        assert encoded(coder, case, CPUS[-1], room) is None
    assert encoded(coder, case, CPUS[-1], size) is not None


@pytest.mark.parametrize("kind", ["near", "random", "special"])
def test_damage_is_found_and_harms_nothing(kind: str) -> None:
    rng = np.random.default_rng(3)
    case, coder = case_of(SHAPES[0], True, kind, 30, 5), native_coder(model_of(SHAPES[0], True, 3, 2))
    layers = encoded(coder, case, CPUS[-1])
    assert layers is not None
    decode, right = partial(decoded, coder, case), partial(same, b=expected(case))
    assert damage_found(layers, part(750), rng, 6, CPUS, decode, right) > part(600)


def test_every_truncation_is_found() -> None:
    case, coder = case_of(SHAPES[0], True, "near", 9, 5), native_coder(model_of(SHAPES[0], True, 2, 2))
    layers = encoded(coder, case, CPUS[-1])
    assert layers is not None
    for shorter in truncations(layers):
        with pytest.raises(CodecError):
            decoded(coder, case, shorter, CPUS[-1])


def test_another_donor_and_another_model_are_found() -> None:
    case, coder = case_of(SHAPES[0], True, "near", 40, 5), native_coder(model_of(SHAPES[0], True, 2, 2))
    layers = encoded(coder, case, CPUS[-1])
    assert layers is not None
    for other, by in (
        (donorcases.with_another_donor(case), coder),
        (case, native_coder(model_of(SHAPES[0], True, 2, 9))),
    ):
        with pytest.raises(CodecError):
            decoded(by, other, layers, CPUS[-1])


def test_every_kind_of_damage_is_named() -> None:
    case, coder = case_of(SHAPES[0], True, "special", 20, 5), native_coder(model_of(SHAPES[0], True, 2, 2))
    layers = encoded(coder, case, CPUS[-1])
    assert layers is not None

    def refused(match: str, *changed: bytes) -> None:
        with pytest.raises(CodecError, match=match):
            decoded(coder, case, list(changed), CPUS[-1])

    for shift in (32, -33):
        refused("shift is out of bounds", shift.to_bytes(1, "little", signed=True) + layers[0][1:], *layers[1:])
    refused("ends in what its first layer begins with", layers[0][:5], *layers[1:])
    refused("shorter than its header", layers[0], bytes(changed_word(layers[1], 12, 1 << 20)), layers[2])
    refused("not those that were encoded", layers[0], bytes(changed_word(layers[1], 16, 1)), layers[2])
    view = laid_out(case.layout, case.block)
    (*arguments, _), views = donorcases.arguments(case, view.rows)
    for sizes in ([1, 1, 1 << 40], [len(layers[0]), 0, 0], [1 << 63, 0, 0]):
        assert _donor_groups.decode(coder, *arguments, b"".join(layers), sizes, 20) is not None
    assert len(views) == len(case.donors)


def test_calls_that_are_not_in_order_are_refused() -> None:
    case, coder = case_of(SHAPES[0], True, "near", 20, 5), native_coder(model_of(SHAPES[0], True, 2, 1))
    view = laid_out(case.layout, case.block)
    (_, count, rows, runs, tables, angles, _), views = donorcases.arguments(case, view.rows)
    out = bytearray(100_000)
    for first in (-1, coder.positions - 19, 1 << 62, -(1 << 62)):
        with pytest.raises(ValueError, match="positions"):
            _donor_groups.encode(coder, first, count, rows, runs, tables, angles, out)
    with pytest.raises(ValueError, match="sizes"):
        _donor_groups.decode(coder, 0, count, rows, runs, tables, angles, b"", [0, 0], 20)
    with pytest.raises(ValueError, match="wanted"):
        _donor_groups.decode(coder, 0, count, rows, runs, tables, angles, b"", [0, 0, 0], 21)
    with pytest.raises(ValueError, match="disjoint"):
        _donor_groups.encode(coder, 0, count, rows, runs + np.array([[1 << 62, 0, 0]]), tables, angles, out)
    assert len(views) == len(tables)


def test_threads_share_a_coder() -> None:
    cases = [case_of(SHAPES[3], True, "near", 64, seed) for seed in range(4)]
    coder = native_coder(model_of(SHAPES[3], True, 2, 1))
    threads_agree(lambda case: encoded(coder, case, CPUS[-1]), cases, 10)
