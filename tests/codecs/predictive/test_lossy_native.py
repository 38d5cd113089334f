"""The lossy mode in C++ against the torch program: the same bytes and integers in every twin, values but for rounding,
and what damage does."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from cpulevels import cpu_levels
from hypothesis import given, settings
from hypothesis import strategies as st
from length import FULL, part
from lossycases import SHAPES, VOCABULARY, Case, Shapes, assert_close, case_of, decoded, model_of, reference, target_of

from kvstore.codecs.predictive import _lossy
from kvstore.codecs.predictive.lossy import native_encoder, native_model
from kvstore.codecs.predictive.lossy_model import ESCAPE, LARGEST
from kvstore.codecs.predictive.lossy_reference import HEADER, Block, read_varint, varint
from kvstore.codecs.predictive.lossy_rows import from_bits, quantise
from kvstore.core.layout import SINKS
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
LEVELS = cpu_levels()
DAMAGED = 50_000 if FULL else 1200


@settings(max_examples=part(40), deadline=None)
@given(
    st.sampled_from(SHAPES), st.booleans(), st.sampled_from([1, 5, 64, 123]), st.sampled_from([0, 2, 5000]),
    st.sampled_from([(0.02, 0.05), (0.2, 0.1), (1.5, 3.0)]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_integers_are_those_of_the_encoder_and_values_close(
    shapes: Shapes, rope: bool, n: int, start: int, steps: tuple[float, float], seed: int
) -> None:
    case = case_of(shapes, rope, n, start, steps, seed)
    positions = torch.arange(start, start + n)
    exact = positions < SINKS
    rows = quantise(case.engine, case.steps, case.block.tokens, positions, exact, case.block.layers)
    want, view = reference(case), target_of(case.model, n)[0]
    for level in LEVELS:
        tokens, payload = case.block.tokens.numpy(), b"".join(case.sections)
        traced = _lossy.trace(case.native, tokens, start, payload, case.sizes, view.rows, level)
        assert isinstance(traced, list)
        for i, (numbers, classes, shifts) in enumerate(traced):
            coded = rows.classes[i] >= 0
            signed = np.where(rows.symbols[i] == ESCAPE, rows.escapes[i], rows.symbols[i].astype(int) - LARGEST)
            assert np.array_equal(classes, np.maximum(rows.classes[i], -1))
            assert np.array_equal(numbers, np.where(coded, signed, 0))
            assert np.array_equal(shifts, rows.shifts[i])
        found = decoded(case, level)
        assert_close(case, found, want)
        wanted = 1 + seed % n
        assert all(torch.equal(a[:wanted], b) for a, b in zip(found, decoded(case, level, wanted), strict=True))


def encoded(case: Case, level: str, room: int = 1 << 22, limit: int | None = None) -> list[bytes] | int | None:
    """The sections as the C++ writes them, from a view whose every other tensor has its tokens apart."""
    view, tensors = target_of(case.model, len(case.block.tokens))
    for tensor, bits in zip(tensors, [bits for pair in case.block.layers for bits in pair], strict=True):
        tensor.copy_(from_bits(bits).view(len(bits), len(tensor), -1).transpose(0, 1))
    encoder, out = native_encoder(case.native, case.engine), bytearray(room)
    tokens, steps = case.block.tokens.numpy(), (case.steps.k, case.steps.v)
    sizes = _lossy.encode(
        encoder, tokens, case.block.start, view.rows, steps, case.steps.quarters, out, limit, level=level
    )
    if not isinstance(sizes, tuple):
        return sizes
    ends = np.cumsum(sizes).tolist()
    return [bytes(out[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


@settings(max_examples=part(40), deadline=None)
@given(
    st.sampled_from(SHAPES), st.booleans(), st.sampled_from([1, 5, 64, 123]), st.sampled_from([0, 2, 5000]),
    st.sampled_from([(0.02, 0.05), (0.2, 0.1), (1.5, 3.0), (40.0, 90.0)]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_the_encoder_writes_the_bytes_of_the_plain_program(
    shapes: Shapes, rope: bool, n: int, start: int, steps: tuple[float, float], seed: int
) -> None:
    case = case_of(shapes, rope, n, start, steps, seed)
    for level in LEVELS:
        assert encoded(case, level) == case.sections, level


def test_the_encoder_refuses_what_does_not_fit() -> None:
    case = case_of(SHAPES[0], True, 20, 2, (0.2, 0.1), 1)
    size = sum(case.sizes)
    for level in LEVELS:
        assert encoded(case, level, room=size) == case.sections
        assert encoded(case, level, room=size - 1) is None
        assert encoded(case, level, limit=size) == case.sections
        assert encoded(case, level, limit=size - 1) == _lossy.FALL_BACK


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_numbers_that_are_not_finite_are_not_encoded(bits: int) -> None:
    case = case_of(SHAPES[0], True, 20, 2, (0.2, 0.1), 1)
    case.block.layers[3][1][19, 15] = bits
    assert [encoded(case, level) for level in LEVELS] == [_lossy.FALL_BACK] * len(LEVELS)


def test_threads_share_an_encoder() -> None:
    case = case_of(SHAPES[0], True, 64, 5, (0.2, 0.2), 1)
    with ThreadPoolExecutor(4) as pool:
        assert all(found == case.sections for found in pool.map(lambda _: encoded(case, LEVELS[-1]), range(12)))


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("0.k.analysis: numbers must be finite", {"analysis": lambda x: [y * np.nan for y in x]}),
        ("0.k.analysis: expected a contiguous array", {"analysis": lambda x: [y[1:] for y in x]}),
        ("entry for K and V", {"focus": lambda x: x[1:]}),
        ("0.k.focus: expected a contiguous array", {"focus": lambda x: [y[1:] for y in x]}),
        ("0.k.basis: expected a contiguous array", {"basis": lambda x: [y.astype(np.int16) for y in x]}),
        ("price: expected numbers from 0", {"price": lambda x: -x}),
        ("escape: expected finite numbers", {"escape": lambda x: x * np.inf}),
        ("centroids: numbers must be finite", {"centroids": lambda x: x * np.nan}),
    ],
)
def test_encoders_that_are_not_in_order_are_refused(
    match: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(SHAPES[0], True, 4, 8, (0.2, 0.2), 1)
    real = _lossy.Encoder
    monkeypatch.setattr(_lossy, "Encoder", lambda native, **arrays: arrays)
    arrays: Any = native_encoder(case.native, case.engine)
    for name, changed in change.items():
        arrays[name] = changed(arrays[name])
    with pytest.raises(ValueError, match=match):
        real(case.native, **arrays)


def test_the_comparison_would_see_another_prediction() -> None:
    case = case_of(SHAPES[0], True, 64, 8, (0.2, 0.2), 1)
    want = reference(case)
    assert_close(case, want, want)
    other = Block((case.block.tokens + 1) % VOCABULARY, case.block.start, case.block.layers)
    moved = Case(case.model, case.engine, case.native, case.steps, other, case.sections)
    with pytest.raises(AssertionError):
        assert_close(case, decoded(moved, LEVELS[-1]), want)


def test_every_kind_of_number_comes_up() -> None:
    """What the comparison with the encoder rests on: escapes, components that are not coded, rows of other steps."""
    case = case_of(SHAPES[0], True, 64, 0, (0.05, 0.05), 3)
    view = target_of(case.model, 64)[0]
    tokens, payload = case.block.tokens.numpy(), b"".join(case.sections)
    traced = _lossy.trace(case.native, tokens, 0, payload, case.sizes, view.rows)
    assert isinstance(traced, list)
    assert max(int(np.abs(numbers).max()) for numbers, _, _ in traced) > LARGEST
    assert any((classes[SINKS:] < 0).any() for _, classes, _ in traced)
    assert len({int(s) for _, _, shifts in traced for s in shifts}) > 2
    assert all((classes[:SINKS] < 0).all() and (classes[SINKS:] >= 0).any() for _, classes, _ in traced)


def test_positions_that_are_not_known_are_refused() -> None:
    case = case_of(SHAPES[0], True, 16, 6384, (0.2, 0.2), 1)
    view, payload = target_of(case.model, 16)[0], b"".join(case.sections)
    assert case.native.positions == case.model.base.positions == 6400
    assert _lossy.decode(case.native, np.arange(16), 6384, payload, case.sizes, view.rows, 16) is None
    for start in (-1, 6385, 1 << 62, -(1 << 62)):
        wrong = _lossy.decode(case.native, np.arange(16), start, payload, case.sizes, view.rows, 16)
        assert "positions" in str(wrong)


# -- hostile bytes -----------------------------------------------------------------------------------------------------


def _damage(sections: list[bytes], turn: int, rng: np.random.Generator) -> list[bytes]:
    bad = [bytearray(section) for section in sections]
    at = int(rng.integers(len(bad)))
    which = bad[at]
    match turn % 6:
        case 0:  # a bit anywhere
            which[int(rng.integers(len(which)))] ^= 1 << int(rng.integers(8))
        case 1:  # the header
            bad[0][int(rng.integers(HEADER.size))] = int(rng.integers(256))
        case 2:
            del which[int(rng.integers(len(which))) :]
        case 3:
            which += rng.bytes(int(rng.integers(1, 80)))
        case 4:  # the count of escapes
            begin = 0 if at else HEADER.size
            which[begin : begin + 1] = rng.bytes(int(rng.integers(1, 6)))
        case _:  # rubbish to the end
            begin = int(rng.integers(0 if at else HEADER.size, len(which)))
            which[begin:] = rng.bytes(len(which) - begin)
    return [bytes(section) for section in bad]


@pytest.mark.faults
@pytest.mark.parametrize("start", [0, 100])
def test_damage_is_refused_alike_by_all_twins_and_harms_nothing(start: int) -> None:
    case, rng = case_of(SHAPES[0], True, 20, start, (0.1, 0.1), 2), np.random.default_rng(3)
    refused = 0
    for turn in range(DAMAGED):
        bad = _damage(case.sections, turn, rng)
        texts, found = set(), []
        for level in LEVELS:
            try:
                found.append(decoded(case, level, sections=bad))
                texts.add("")
            except CodecError as error:
                texts.add(str(error))
        assert len(texts) == 1
        refused += texts != {""}
        if turn % 8 == 0 and turn < 1200:  # slow
            try:
                reference(case, bad)
            except CodecError:
                assert texts != {""}
            else:
                assert texts == {""}
    assert 2 / 3 < refused / DAMAGED < 1


def test_every_kind_of_damage_is_named() -> None:
    case = case_of(SHAPES[0], True, 20, 0, (0.1, 0.1), 2)

    def changed(layer: int, section: bytes) -> str:
        sections = list(case.sections)
        sections[layer] = section
        with pytest.raises(CodecError) as caught:
            decoded(case, LEVELS[-1], sections=sections)
        return str(caught.value)

    first, second = case.sections[:2]
    fields = list(HEADER.unpack_from(first))
    for field, value, text in (
        (0, 4, "another mode"), (1, 21, "more exact rows"), (2, 401, "steps"), (3, -401, "steps"),
        (4, 0.0, "step sizes"), (5, float("nan"), "step sizes"), (5, 1e6, "step sizes"),
    ):  # fmt: skip
        other = [*fields[:field], value, *fields[field + 1 :]]
        assert text in changed(0, HEADER.pack(*other) + first[HEADER.size :])
    assert "header" in changed(0, first[: HEADER.size - 1])
    assert "number of escapes" in changed(1, b"")
    assert "number of escapes" in changed(1, b"\xff" * 5 + second)
    assert "exact rows" in changed(1, second[:20])
    assert "in its escapes" in changed(1, struct.pack("<5B", 0xFF, 0xFF, 0xFF, 0xFF, 0x7F) + second[1:])
    listed, begin = read_varint(second, 0)
    end = begin + 2 * SINKS * sum(part.width for part in case.model.base.parts[1]) + 2 * listed
    assert listed
    for more, escapes in ((1, second[begin:end] + b"\0\0"), (-1, second[begin : end - 2])):
        assert "few or too many escapes" in changed(1, varint(listed + more) + escapes + second[end:])
    assert "stream" in changed(3, case.sections[3] + b"\0\0")
    view, payload = target_of(case.model, 20)[0], b"".join(case.sections)
    for sizes in ([1 << 40, 1, 1, 1], [len(payload), 0, 0, 0], [1 << 63, 0, 0, 0], [*case.sizes[:3], 0]):
        assert _lossy.decode(case.native, np.arange(20), 0, payload, sizes, view.rows, 20) is not None


def test_numbers_beyond_all_floats_harm_nothing() -> None:
    """The largest step times the largest escapes: infinite values, and those that are none."""
    case = case_of(SHAPES[0], True, 20, 0, (0.01, 0.01), 5)
    first = case.sections[0]
    fields = list(HEADER.unpack_from(first))
    fields[4:6] = 9e5, 9e5
    sections = [HEADER.pack(*fields) + first[HEADER.size :], *case.sections[1:]]
    for level in LEVELS:
        decoded(case, level, sections=sections)


# -- models and calls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "name", "change"),
    [
        ("levels: numbers must rise", "levels", lambda x: x[::-1].copy()),
        ("levels: expected 1 to 16", "levels", lambda x: x[:0]),
        ("levels: expected numbers from -400", "levels", lambda x: x * 100),
        ("levels", "levels", lambda x: x.astype(np.int32)),
        ("0.k.uses: layer 0", "uses", lambda x: x + 1),
        ("1.k.uses", "uses", lambda x: np.where(x > 0, 32, 0).astype(np.uint8)),
        ("1.k.uses: no inputs", "uses", lambda x: x * 0),
        ("uses", "uses", lambda x: x[1:]),
        ("1.k.weight", "weight", lambda x: [y if y is None else y[:-1].copy() for y in x]),
        ("1.k.weight", "weight", lambda x: [None] * len(x)),
        ("1.k.weight: .* from -127", "weight", lambda x: [y if y is None else np.full_like(y, -128) for y in x]),
        ("1.k.bias: .* from -2684", "bias", lambda x: [y if y is None else np.full_like(y, 1 << 29) for y in x]),
        ("1.k.out_scale: .* positive", "out_scale", lambda x: [y if y is None else y * 0 for y in x]),
        ("0.k.basis", "basis", lambda x: [y[1:].copy() for y in x]),
        ("0.k.component: numbers must be finite and positive", "component", lambda x: [y * np.inf for y in x]),
        ("0.k.unit: numbers must be finite and positive", "unit", lambda x: [-y for y in x]),
        ("0.k.scale: expected numbers from -400", "scale", lambda x: [np.full_like(y, 401) for y in x]),
        ("0.k.adapt: expected numbers from -4096", "adapt", lambda x: [np.full_like(y, 4097) for y in x]),
        ("entry for K and V", "adapt", lambda x: x[1:]),
        ("freqs", "freqs", lambda x: x * 0),
        ("row_freqs", "row_freqs", lambda x: x[1:]),
        ("centroids: expected numbers", "centroids", lambda x: x * np.nan),
        ("expect: expected numbers from 1", "expect", lambda x: x * 0),
        ("centroids", "centroids", None),
    ],
)  # fmt: skip
def test_models_that_are_not_in_order_are_refused(
    match: str, name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(SHAPES[0], True, 1)
    real, made = _lossy.Model, []

    def build(base: dict[str, Any], own: dict[str, Any]) -> _lossy.Model:
        made.append((base, own))
        return real(base, own)

    monkeypatch.setattr(_lossy, "Model", build)
    native_model(model)
    base, own = made[0]
    if change is None:
        del own[name]
    else:
        own[name] = change(own[name])
    with pytest.raises(ValueError, match=match):
        real(base, own)


def test_calls_that_are_not_in_order_are_refused() -> None:
    case = case_of(SHAPES[0], True, 4, 8, (0.2, 0.2), 1)
    view, payload, tokens = target_of(case.model, 4)[0], b"".join(case.sections), np.arange(4)
    with pytest.raises(ValueError, match="tokens"):
        _lossy.decode(case.native, tokens.astype(np.float32), 8, payload, case.sizes, view.rows, 4)
    with pytest.raises(ValueError, match="rows"):
        _lossy.decode(case.native, tokens, 8, payload, case.sizes, view.rows[:, 1:], 4)
    with pytest.raises(ValueError, match="level"):
        _lossy.decode(case.native, tokens, 8, payload, case.sizes, view.rows, 4, level="best")
    with pytest.raises(ValueError, match="wanted"):
        _lossy.decode(case.native, tokens, 8, payload, case.sizes, view.rows, 5)
    with pytest.raises(ValueError, match="sizes"):
        _lossy.decode(case.native, tokens, 8, payload, case.sizes[1:], view.rows, 4)
    encoder, out = native_encoder(case.native, case.engine), bytearray(9)
    for steps in ((0.0, 1.0), (1.0, float("nan")), (1e6, 1.0)):
        with pytest.raises(ValueError, match="steps"):
            _lossy.encode(encoder, tokens, 8, view.rows, steps, (0, 0), out)
    with pytest.raises(ValueError, match="quarters"):
        _lossy.encode(encoder, tokens, 8, view.rows, (1.0, 1.0), (0, 401), out)
    with pytest.raises(ValueError, match="rows"):
        _lossy.encode(encoder, tokens, 8, view.rows[:, 1:], (1.0, 1.0), (0, 0), out)
    for start in (-1, 6397, 1 << 62):
        assert _lossy.encode(encoder, tokens, start, view.rows, (1.0, 1.0), (0, 0), out) == _lossy.FALL_BACK


def test_threads_share_a_model() -> None:
    case = case_of(SHAPES[1], True, 64, 5, (0.2, 0.2), 1)
    want = decoded(case, LEVELS[-1])
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: decoded(case, LEVELS[-1]), range(20)):
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
