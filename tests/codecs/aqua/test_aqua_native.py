"""AQUA-KV in C++ against the plain program: the same bytes and numbers at every CPU level, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from aquacases import LAYOUT, cache_of, decode, dump_of, encode, error, info_of, smooth_rows
from cpulevels import cpu_levels

from kvstore.calibration.aqua.fit import fit
from kvstore.codecs.aqua import _aqua
from kvstore.codecs.aqua.codec import IN_DOUBLE, PREDICTED, AquaCodec
from kvstore.codecs.aqua.grids import grid
from kvstore.codecs.aqua.higgs import Higgs, signs
from kvstore.codecs.aqua.native import NativeHiggs, turns_of
from kvstore.codecs.aqua.predictors import rounded
from kvstore.codecs.aqua.tensors import rows_of, store_rows
from kvstore.core.rope import rotate
from kvstore.errors import CodecError

LEVELS = cpu_levels()
WIDTHS = (1, 7, 32, 96, 123, 192, 576, 1024)


def numbers(rows: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, width)) * np.exp(3 * rng.standard_normal((rows, 1)))
    values[rows // 2] = 0
    values[0, 0] = 1e4  # beyond the grid's reach
    return values.astype(np.float32)


def coder(bits: int, width: int) -> _aqua.Higgs:
    return _aqua.Higgs(bits, signs(width), grid(bits).reshape(-1).copy())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rows_are_coded_as_the_plain_program_codes_them(bits: int, level: str) -> None:
    for width in WIDTHS:
        for rows in (1, 15, 16, 37):
            values = numbers(rows, width, seed=rows)
            expected, native = Higgs().encode(values, bits), coder(bits, width)
            out, back = np.empty_like(expected), np.empty(rows * width, np.float32)
            assert native.encode_rows(values.reshape(-1), out, level)
            assert np.array_equal(out, expected), (width, rows)
            assert native.decode_rows(out, back, level) is None
            assert np.array_equal(back.reshape(rows, width), Higgs().decode(expected, rows, width, bits))


def places(bits: int, rng: np.random.Generator) -> np.ndarray:
    """Places in the plane at which the nearest point is easy to miss: between points, on the borders of the cells whose
    lists csrc/aqua/candidates.h keeps, around and beyond what these cover; and others."""
    points = grid(bits)
    reach = np.abs(points).max() + 1
    apart = ((points[:, None] - points[None]) ** 2).sum(2)
    between = [(points + points[order]) / 2 for order in np.argsort(apart, axis=1)[:, 1:4].T]
    border = rng.choice(np.linspace(-reach, reach, 65), 400)
    other = rng.uniform(-reach, reach, 400)
    far = rng.uniform(reach, 7.5, 100) * rng.choice([-1, 1], 100)
    columns = [(border, other), (other, border), (border, border[::-1]), (far, other[:100]), (other[:100], far)]
    found = [*between, *(np.stack(pair, axis=1) for pair in columns), rng.standard_normal((400, 2)), points]
    return np.concatenate(found).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_nearest_point_is_found_at_every_place(bits: int, level: str) -> None:
    at, width = places(bits, np.random.default_rng(bits)), 129  # an odd number of values is not rotated
    values = np.zeros((len(at), width), np.float32)
    values[:, :2] = at * signs(width)[:2]
    values[:, -1] = np.sqrt(width - np.square(at, dtype=np.float64).sum(axis=1))  # so that the scale is 1
    expected = Higgs().encode(values, bits)
    assert expected is not None
    assert (expected[: 2 * len(at)].view("<u2") == 0x3F80).all()
    out = np.empty_like(expected)
    assert coder(bits, width).encode_rows(values.reshape(-1), out, level)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_predictions_are_sums_in_the_order_of_the_inputs(level: str) -> None:
    rng = np.random.default_rng(0)
    for n, m, outputs in ((1, 0, 1), (5, 3, 7), (192, 0, 192), (64, 33, 81), (17, 16, 48)):
        weights = rng.standard_normal((n + m + 1, outputs)).astype(np.float16).astype(np.float32)
        for rows in (1, 8, 13):
            x = rounded(rng.standard_normal((rows, n + m)).astype(np.float32))
            x[0, 0], x[-1, -1] = -(2.0**-81), -(2.0**100)
            if rows > 8:
                x[3:6, 0] = np.nan, np.inf, 2.0**101
            used = np.where(np.abs(x) < 2.0**101, x, np.nan)
            used = np.where(np.abs(used) < 2.0**-80, 0, used).astype(np.float32)
            expected = np.broadcast_to(weights[-1], (rows, outputs)).copy()
            for i in range(n + m):
                expected += used[:, i, None] * weights[i]
            found = np.empty(rows * outputs, np.float32)
            parts = [np.ascontiguousarray(part).reshape(-1) for part in (x[:, :n], x[:, n:])]
            _aqua.Predictor(weights.reshape(-1), outputs).predict(parts[: 1 + bool(m)], found, level)
            assert np.array_equal(found.reshape(rows, outputs), expected, equal_nan=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("guessed", [False, True])
def test_a_side_is_coded_as_its_steps_one_by_one(level: str, sinks: int, guessed: bool) -> None:
    heads, tokens, dim, bits = 3, 37, 32, 3
    rows, width = tokens - sinks, heads * dim
    tensor = torch.from_numpy(numbers(heads * tokens, dim)).view(heads, tokens, dim).bfloat16()
    positions = np.arange(100, 100 + rows)
    values = rotate(rows_of(tensor[:, sinks:]), heads, positions, LAYOUT.rope, -1)
    guess = numbers(rows, width, seed=3) if guessed else None
    expected = Higgs().encode(values - guess if guessed else values, bits)
    decoded = Higgs().decode(expected, rows, width, bits)
    decoded = guess + decoded if guessed else decoded
    wanted = tensor.clone()
    store_rows(wanted[:, sinks:], rotate(decoded, heads, positions, LAYOUT.rope, 1))
    native, cos_sin = coder(bits, width), turns_of(LAYOUT.rope, dim, 100, rows)
    flat = None if guess is None else guess.reshape(-1)
    out, found = np.empty_like(expected), np.empty(rows * width, np.float32)
    words = tensor.view(torch.uint16).numpy().reshape(-1)
    assert native.encode(words, heads, sinks, *cos_sin, flat, None, [], out, found, level)
    assert np.array_equal(out, expected)
    assert np.array_equal(found.reshape(rows, width), rounded(decoded))
    back = tensor.clone()
    back[:, sinks:] = 7
    words = back.view(torch.uint16).numpy().reshape(-1)
    assert native.decode(words, heads, sinks, *cos_sin, flat, None, [], out, found, level) is None
    assert torch.equal(back, wanted)
    assert np.array_equal(found.reshape(rows, width), rounded(decoded))


def test_layers_that_were_predicted_in_double_precision_are_still_decoded() -> None:
    predictors = fit(dump_of(4), 2)
    kv, info = cache_of(smooth_rows(64, seed=50)), info_of(64)
    payload, sizes = encode(AquaCodec(predictors, 2), info, kv)
    older = bytearray(payload)
    for start in np.cumsum(sizes)[:-1].tolist():
        assert older[start] == PREDICTED
        older[start] = IN_DOUBLE
    new, old = (decode(AquaCodec(predictors, 2), info, bytes(x), sizes) for x in (payload, older))
    assert error(old, new, begin=0) < 1e-4
    assert error(old, kv) == pytest.approx(error(new, kv), rel=0.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_has_no_scale_is_not_coded(bad: float) -> None:
    values = numbers(20, 64)
    values[18, 3] = bad
    assert NativeHiggs().encode(values, 2) is None
    data = NativeHiggs().encode(numbers(20, 64), 2)
    data[2 * 19 + 1] |= 0x80
    with pytest.raises(CodecError, match="scale"):
        NativeHiggs().decode(data, 20, 64, 2)


def to_four(inputs: int) -> _aqua.Predictor:
    return _aqua.Predictor(np.zeros(4 * inputs + 4, np.float32), 4)


def of_side(
    heads: int = 2,
    sinks: int = 0,
    turns: Sequence[np.ndarray | None] = (None, None),
    guess: np.ndarray | None = None,
    predictor: _aqua.Predictor | None = None,
    inputs: Sequence[np.ndarray] = (),
) -> bool:
    """Two tokens of four numbers."""
    out, found = np.zeros(6, np.uint8), np.zeros(8, np.float32)
    return coder(2, 4).encode(np.zeros(8, np.uint16), heads, sinks, *turns, guess, predictor, list(inputs), out, found)


def test_arguments_that_fit_are_taken() -> None:
    assert of_side()
    assert of_side(guess=np.zeros(8, np.float32))
    assert of_side(predictor=to_four(1), inputs=[np.zeros(2, np.float32)])


@pytest.mark.parametrize("level", LEVELS)
def test_a_side_is_predicted_as_it_is_coded(level: str) -> None:
    rng, rows, width = np.random.default_rng(1), 21, 64
    words = (rng.standard_normal(rows * width).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    weights = rng.standard_normal((49, width)).astype(np.float16).astype(np.float32).reshape(-1)
    inputs = [rounded(rng.standard_normal((rows, n)).astype(np.float32)).reshape(-1) for n in (32, 16)]
    predictor, native = _aqua.Predictor(weights, width), coder(3, width)
    guess = np.empty(rows * width, np.float32)
    predictor.predict(inputs, guess, level)
    results = []
    for how in ((guess, None, []), (None, predictor, inputs)):
        out, found = np.empty(Higgs().size(rows, width, 3), np.uint8), np.empty(rows * width, np.float32)
        assert native.encode(words, 2, 0, None, None, *how, out, found, level)
        back, again = np.empty_like(words), np.empty_like(found)
        assert native.decode(back, 2, 0, None, None, *how, out, again, level) is None
        assert np.array_equal(found, again)
        results.append((out, found, back))
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))
    assert not np.array_equal(words, results[0][2])


REFUSED: dict[str, Callable[[], object]] = {
    "bits": lambda: _aqua.Higgs(5, signs(4), grid(4).reshape(-1).copy()),
    "signs": lambda: _aqua.Higgs(2, np.zeros(4, np.float32), grid(2).reshape(-1).copy()),
    "no-signs": lambda: _aqua.Higgs(2, np.zeros(0, np.float32), grid(2).reshape(-1).copy()),
    "points": lambda: _aqua.Higgs(2, signs(4), grid(3).reshape(-1).copy()),
    "points-nan": lambda: _aqua.Higgs(2, signs(4), np.full(32, np.nan, np.float32)),
    "dtype": lambda: coder(2, 4).encode_rows(np.zeros(8), np.zeros(8, np.uint8)),
    "ragged": lambda: coder(2, 4).encode_rows(np.zeros(7, np.float32), np.zeros(8, np.uint8)),
    "out": lambda: coder(2, 4).encode_rows(np.zeros(8, np.float32), np.zeros(5, np.uint8)),
    "data": lambda: coder(2, 4).decode_rows(np.zeros(5, np.uint8), np.zeros(8, np.float32)),
    "weights": lambda: _aqua.Predictor(np.zeros(7, np.float32), 2),
    "weights-large": lambda: _aqua.Predictor(np.full(6, 7e4, np.float32), 2),
    "inputs": lambda: _aqua.Predictor(np.zeros(6, np.float32), 2).predict(
        [np.zeros(9, np.float32)], np.zeros(6, np.float32)
    ),
    "heads": lambda: of_side(heads=3),
    "sinks": lambda: of_side(heads=1, sinks=3),
    "pairs": lambda: of_side(turns=[np.zeros(4, np.float32)] * 2),
    "two guesses": lambda: of_side(guess=np.zeros(8, np.float32), predictor=to_four(1), inputs=[np.zeros(2, "f4")]),
    "predictor": lambda: of_side(predictor=_aqua.Predictor(np.zeros(6, np.float32), 2), inputs=[np.zeros(4, "f4")]),
    "its inputs": lambda: of_side(predictor=to_four(1), inputs=[np.zeros(4, np.float32)]),
    "ragged inputs": lambda: of_side(predictor=to_four(1), inputs=[np.zeros(3, np.float32)]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arrays_that_do_not_fit_are_refused(what: str) -> None:
    with pytest.raises(ValueError, match=r"\w+: "):
        REFUSED[what]()
