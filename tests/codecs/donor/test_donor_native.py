"""The donor codec's C++ against its reference: every twin, byte for byte, and what damage does."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import donorcases
import numpy as np
import pytest
from codertwins import subnormals_flushed, threads_agree
from cpulevels import cpu_levels
from damaged_layers import changed_word, damage_found, truncations
from donorcases import KINDS, Shapes, case_of, coder_of, decoded, encoded, expected, model_of, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from predictcases import laid_out, same

from kvstore.codecs.donor import _donor
from kvstore.codecs.donor.tables import frequencies
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
LEVELS = cpu_levels()
SHAPES: tuple[Shapes, ...] = (
    [(2, 8, 8)] * 3,
    [(2, 16, 24)] * 2,
    [(1, 64, 64), (1, 64, 40), (3, 64, 72)],
    [(3, 64, 64)] * 2,
    [(1, 10, 7)] * 4,
    [(2, 2, 1)],
    [(1, 130, 3)] * 2,
)
ODD: tuple[Shapes, ...] = ([(3, 5, 7), (1, 3, 33)], [(1, 1, 1)])


@settings(max_examples=part(60), deadline=None)
@given(
    st.sampled_from(SHAPES + ODD), st.booleans(), st.booleans(), st.sampled_from(KINDS),
    st.sampled_from([1, 2, 5, 64, 130]), st.sampled_from([0.3, 1.0, 8.0]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_twins_give_the_bytes_of_the_reference(
    shapes: Shapes, rope: bool, propagated: bool, kind: str, count: int, reach: float, seed: int
) -> None:
    rope = rope and shapes not in ODD
    model = model_of(shapes, rope, seed, reach) if propagated else None
    case = case_of(shapes, rope, kind, count, seed, model=model)
    coder, want = coder_of(case.layout, model), reference(case)
    assert same(donorcases.referred(case, want), donorcases.rows_alone(case))
    for level in LEVELS:
        assert encoded(coder, case, level) == want
        donorcases.comes_back(partial(decoded, coder, case, want, level), case, 1 + seed % count)


def test_a_model_changes_the_bytes_and_what_is_alike_costs_little() -> None:
    shapes = SHAPES[3]
    model = model_of(shapes, True, 1)
    case = case_of(shapes, True, "near", 64, 1)
    also = case_of(shapes, True, "near", 64, 1, model=model)
    assert encoded(coder_of(case.layout, None), case, LEVELS[-1]) != encoded(
        coder_of(case.layout, model), also, LEVELS[-1]
    )
    sizes = {
        kind: sum(map(len, encoded(coder_of(case.layout, None), case_of(shapes, False, kind, 64, 1), LEVELS[-1]) or []))
        for kind in ("same", "near", "random")
    }
    assert 10 * sizes["same"] < sizes["near"] < sizes["random"]


def test_room() -> None:
    case = case_of(SHAPES[0], True, "near", 64, 1)
    coder = coder_of(case.layout, None)
    size = sum(map(len, encoded(coder, case, LEVELS[-1]) or []))
    for room in (0, 1, 50, 500, size // 2, size - 1):
        assert encoded(coder, case, LEVELS[-1], room) is None
    assert encoded(coder, case, LEVELS[-1], size) is not None


@pytest.mark.parametrize("shapes", [SHAPES[0], [(1, 64, 64), (1, 64, 40)]])  # the latter: rows of whole steps
@pytest.mark.parametrize("kind", ["near", "random", "special"])
@pytest.mark.parametrize("propagated", [False, True])
def test_damage_is_found_and_harms_nothing(kind: str, propagated: bool, shapes: Shapes) -> None:
    rng = np.random.default_rng(3)
    model = model_of(shapes, True, 2) if propagated else None
    case = case_of(shapes, True, kind, 30, 5, model=model)
    coder = coder_of(case.layout, model)
    layers = encoded(coder, case, LEVELS[-1])
    assert layers is not None
    decode, right = partial(decoded, coder, case), partial(same, b=expected(case))
    assert damage_found(layers, part(400), rng, 6, LEVELS, decode, right) > part(320)


def test_every_truncation_is_found() -> None:
    case = case_of(SHAPES[0], True, "near", 9, 5)
    coder = coder_of(case.layout, None)
    layers = encoded(coder, case, LEVELS[-1])
    assert layers is not None
    for shorter in truncations(layers):
        with pytest.raises(CodecError):
            decoded(coder, case, shorter, LEVELS[-1])


def test_another_donor_is_found() -> None:
    case = case_of(SHAPES[0], True, "near", 40, 5)
    coder = coder_of(case.layout, None)
    layers = encoded(coder, case, LEVELS[-1])
    assert layers is not None
    with pytest.raises(CodecError):
        decoded(coder, donorcases.with_another_donor(case), layers, LEVELS[-1])


def test_every_kind_of_damage_is_named() -> None:
    case = case_of(SHAPES[0], True, "special", 20, 5)
    coder = coder_of(case.layout, None)
    layers = encoded(coder, case, LEVELS[-1])
    assert layers is not None

    def changed(at: int, add: int, extra: bytes = b"", where: int | None = None) -> str:
        layer = changed_word(layers[1], at, add)
        if where is not None:
            layer[where:where] = extra
        with pytest.raises(CodecError) as caught:
            decoded(coder, case, [layers[0], bytes(layer), layers[2]], LEVELS[-1])
        return str(caught.value)

    raw_k, raw_v = struct.unpack_from("<2I", layers[1], 0)
    assert "left over" in changed(0, 1, b"\0", 24 + raw_k)
    assert "left over" in changed(8, 1, b"\0\0", 24 + raw_k + raw_v)
    assert "shorter than its header" in changed(12, 1 << 20)
    assert "not those that were encoded" in changed(16, 1)
    assert "not those that were encoded" in changed(20, 1)
    with pytest.raises(CodecError, match="scales out of bounds"):
        decoded(coder, case, [struct.pack("<h", 401) + layers[0][2:], *layers[1:]], LEVELS[-1])
    with pytest.raises(CodecError, match="ends in its scales"):
        decoded(coder, case, [layers[0][:5], *layers[1:]], LEVELS[-1])
    view = laid_out(case.layout, case.block)
    given, views = donorcases.arguments(case, view.rows)
    for sizes in ([1, 1, 1 << 40], [len(layers[0]), 0, 0], [1 << 63, 0, 0]):
        assert _donor.decode(coder, *given, b"".join(layers), sizes, 20) is not None
    assert len(views) == len(case.donors)


def test_calls_that_are_not_in_order_are_refused() -> None:
    shapes = SHAPES[0]
    case = case_of(shapes, True, "near", 20, 5)
    coder, view = coder_of(case.layout, None), laid_out(case.layout, case.block)
    (start, count, rows, runs, tables, angles, _), views = donorcases.arguments(case, view.rows)
    out = bytearray(100_000)

    def refused(match: str, **changed: Any) -> None:
        given = {
            "coder": coder, "start": start, "count": count, "rows": rows, "spans": runs, "donors": tables,
            "angles": angles, "propagated": False, "out": out,
        }  # fmt: skip
        with pytest.raises(ValueError, match=match):
            _donor.encode(**{**given, **changed})

    one, turned = np.array([[0, 5, -1]], np.int64), np.array([[0, 5, 0]], np.int64)
    refused("rows", rows=rows[:, 1:])
    refused("rows", donors=[table[:, 1:] for table in tables])
    refused("level", level="best")
    refused("at least one", spans=runs[:0], donors=[])
    refused("spans", spans=runs.astype(np.int32))
    refused("angles", angles=np.full((1, 2, 4), 16385, np.int16), spans=one, donors=tables[:1])
    refused("angles", angles=np.zeros((1, 2, 3), np.int16), spans=turned, donors=tables[:1])
    refused("angle index out of range", angles=np.zeros((0, 2, 4), np.int16), spans=turned, donors=tables[:1])
    for bad in ([-1, 5, -1], [0, 0, -1], [0, 21, -1], [16, 5, -1], [0, 1 << 62, -1], [1 << 62, 5, -1]):
        refused("disjoint", spans=np.array([bad], np.int64), donors=tables[:1])
    two = np.array([[0, 5, -1], [4, 5, -1]], np.int64)
    refused("disjoint", spans=two, donors=tables[:1] * 2)
    refused("weights", propagated=True)
    known = coder_of(case.layout, model_of(shapes, True, 1))
    assert known.positions == 60 * 128
    for first in (-1, known.positions - 19, 1 << 62, -(1 << 62)):
        refused("positions", coder=known, start=first, propagated=True)
    with pytest.raises(ValueError, match="sizes"):
        _donor.decode(coder, start, count, rows, runs, tables, angles, False, b"", [0, 0], 20)
    assert len(views) == len(tables)


def test_models_that_are_not_in_order_are_refused() -> None:
    layout = donorcases.layout_of(SHAPES[0], True)
    shapes = np.array(SHAPES[0], np.int64)
    for match, changed in (
        ("freqs: every row", {"freqs": np.ones_like(frequencies())}),
        ("freqs: missing", {"freqs": None}),
        ("shapes", {"shapes": shapes[:0]}),
        ("shapes", {"shapes": shapes * 0}),
        ("shapes", {"shapes": shapes << 19}),
        ("weight: missing", {"weight": [None] * 6}),
        ("expected an entry", {"weight": [None] * 5}),
    ):
        with pytest.raises(ValueError, match=match):
            coder_of(layout, None, **changed)


def test_threads_share_a_coder() -> None:
    cases = [case_of(SHAPES[3], True, "near", 64, seed) for seed in range(4)]
    coder = coder_of(cases[0].layout, None)
    threads_agree(lambda case: encoded(coder, case, LEVELS[-1]), cases, 10)


def test_a_thread_that_flushes_subnormal_numbers_codes_the_same() -> None:
    case = case_of(SHAPES[1], True, "near", 30, 4)
    for donor in (case.block, *case.donors):
        for pair in donor:
            for bits in pair:
                bits[:] = bits & 0x807F  # subnormal
    coder = coder_of(case.layout, None)
    want = [encoded(coder, case, level) for level in LEVELS]
    with subnormals_flushed():
        assert [encoded(coder, case, level) for level in LEVELS] == want
