"""Round to nearest between the least and the largest value of a group."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.aqua.minmax import MinMax
from kvstore.errors import CodecError

QUANTO, RTN = MinMax(1, 64), MinMax(2, None)
CODERS = pytest.mark.parametrize("coder", [QUANTO, RTN], ids=["quanto", "rtn"])
BITS = pytest.mark.parametrize("bits", [2, 3, 4])


def normal(rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, width), np.float32)


def round_trip(coder: MinMax, values: np.ndarray, bits: int) -> np.ndarray:
    data = coder.encode(values, bits)
    assert len(data) == coder.size(*values.shape, bits)
    return coder.decode(data, *values.shape, bits)


@BITS
def test_bits_a_value(bits: int) -> None:
    assert QUANTO.size(1000, 192, bits) * 8 / 192_000 == bits + 0.5
    assert RTN.size(1000, 192, bits) * 8 / 192_000 == pytest.approx(bits + 32 / 192)


@BITS
@CODERS
@pytest.mark.parametrize("width", [1, 63, 64, 65, 192, 615])
def test_no_value_is_off_by_more_than_half_a_step(coder: MinMax, width: int, bits: int) -> None:
    values = normal(7, width) + 3
    found = round_trip(coder, values, bits)
    group = 64 if coder is QUANTO else width
    for begin in range(0, width, group):
        part = values[:, begin : begin + group]
        step = (part.max(axis=1) - part.min(axis=1)) / (2**bits - 1)
        # fp16 rounds the least value and the step by a share of 2^-11.
        assert (np.abs(found[:, begin : begin + group] - part).max(axis=1) <= step / 2 + 0.01).all()


@BITS
def test_values_on_the_steps_come_back_exactly(bits: int) -> None:
    values = np.tile(np.arange(1 << bits, dtype=np.float32) - 2, (3, 16))
    for coder in (QUANTO, RTN):
        assert np.array_equal(round_trip(coder, values, bits), values)


def test_groups_keep_outliers_to_themselves() -> None:
    values = normal(50, 192)
    values[:, 0] = 40
    errors = [((round_trip(coder, values, 4) - values)[:, 64:] ** 2).mean() for coder in (QUANTO, RTN)]
    assert errors[0] * 10 < errors[1]


@CODERS
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30])
def test_equal_values_come_back(coder: MinMax, value: float) -> None:
    values = np.full((2, 192), value, np.float32)
    assert np.allclose(round_trip(coder, values, 2), values, atol=1e-7)


@CODERS
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6, -1e6])
def test_rows_that_no_scale_fits_are_not_coded(coder: MinMax, bad: float) -> None:
    values = np.ones((3, 64), np.float32)
    assert coder.encode(values, 2) is not None
    values[1, 3] = bad
    assert coder.encode(values, 2) is None


@CODERS
@pytest.mark.parametrize("code", [0x7C00, 0x7E00])
@pytest.mark.parametrize("side", [0, 1])
def test_a_scale_that_cannot_be_is_refused(coder: MinMax, code: int, side: int) -> None:
    data = coder.encode(normal(3, 64), 2)
    data[2 * side : 2 * side + 2] = code & 255, code >> 8
    with pytest.raises(CodecError):
        coder.decode(data, 3, 64, 2)


def test_a_negative_step_is_refused() -> None:
    data = RTN.encode(normal(3, 64), 2)
    data[3] |= 0x80
    with pytest.raises(CodecError):
        RTN.decode(data, 3, 64, 2)
