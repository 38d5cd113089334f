"""HIGGS: grids as good as the best known, nothing padded, bytes that do not depend on the machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvstore.codecs.aqua import grids as higgs_grids
from kvstore.codecs.aqua.higgs import Higgs, group_of, pack, packed_size, rotate, rotate_back, signs, unpack
from kvstore.errors import CodecError

# The least relative errors of pairs of normal numbers, as published and as measured with others' grids.
LEAST_ERROR = {2: 0.1076, 3: 0.0296, 4: 0.0078}
WIDTHS = [1, 2, 3, 64, 96, 123, 192, 615, 1024, 4096]


def normal(rows: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width), np.float32)


def round_trip(values: np.ndarray, bits: int) -> np.ndarray:
    data = Higgs().encode(values, bits)
    assert len(data) == Higgs().size(*values.shape, bits)
    return Higgs().decode(data, *values.shape, bits)


@pytest.mark.parametrize("bits", higgs_grids.BITS)
def test_a_grid_has_the_error_of_the_best_known(bits: int) -> None:
    x, y = normal(2, 1_000_000)
    found = higgs_grids.grid(bits)[higgs_grids.nearest(x, y, bits)]
    error = ((found[:, 0] - x) ** 2 + (found[:, 1] - y) ** 2).mean(dtype=np.float64) / 2
    assert error == pytest.approx(LEAST_ERROR[bits], rel=0.01)


@pytest.mark.parametrize("bits", higgs_grids.BITS)
def test_every_point_is_the_centre_of_what_is_nearest_to_it(bits: int) -> None:
    """What makes a grid optimal, up to a global choice; a grid moved by a little fails."""
    axis = (np.arange(-320, 320) + 0.5) * 0.02
    x, y = (part.reshape(-1).astype(np.float32) for part in np.meshgrid(axis, axis))
    share = np.exp(-(x.astype(np.float64) ** 2 + y.astype(np.float64) ** 2) / 2)
    found = higgs_grids.nearest(x, y, bits)
    mass = np.bincount(found, share)
    centres = np.stack([np.bincount(found, share * part) / mass for part in (x, y)], axis=1)
    off = np.abs(centres - higgs_grids.grid(bits)).max(axis=1)
    assert (off * mass / mass.sum()).sum() < 1e-3
    assert (np.abs(centres - higgs_grids.grid(bits) - 0.01).max(axis=1) * mass / mass.sum()).sum() > 5e-3


@pytest.mark.parametrize("bits", higgs_grids.BITS)
def test_the_search_finds_what_a_search_of_all_points_finds(bits: int) -> None:
    points = higgs_grids.grid(bits)
    places = np.concatenate(
        [
            normal(4000, 2, seed=1),
            normal(2000, 2, seed=2) * 4,  # many outside of the raster
            np.array([[5, 0], [-5, 5], [4.9999995, -4.9999995], [0, 0], [1e30, -1e30], [3e5, 1]], np.float32),
            points,
            (points + np.roll(points, 1, axis=0)) / 2,
        ]
    ).astype(np.float32)
    with np.errstate(over="ignore"):
        squares = (places[:, None, 0] - points[:, 0]) ** 2 + (places[:, None, 1] - points[:, 1]) ** 2
        found = higgs_grids.nearest(places[:, 0].copy(), places[:, 1].copy(), bits)
    chosen = squares[np.arange(len(places)), found]
    finite = np.isfinite(squares).all(axis=1)
    # Where two are equally near up to a rounding error, either will do.
    assert (chosen[finite] <= squares[finite].min(axis=1) * (1 + 1e-5) + 1e-9).all()
    assert (found == squares.argmin(axis=1)).mean() > 0.998


def test_a_damaged_file_of_grids_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = bytearray(higgs_grids._FILE.read_bytes())
    assert hashlib.sha256(data).hexdigest() == higgs_grids._SHA256
    data[100] ^= 1
    (tmp_path / "grids").write_bytes(data)
    monkeypatch.setattr(higgs_grids, "_FILE", tmp_path / "grids")
    higgs_grids._grids.cache_clear()
    with pytest.raises(RuntimeError, match="damaged"):
        higgs_grids.grid(2)
    monkeypatch.undo()
    assert len(higgs_grids.grid(2)) == 16


def test_signs_are_those_of_the_documented_generator() -> None:
    mask = (1 << 64) - 1

    def splitmix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    states = [(0x4849474753000001 + (i + 1) * 0x9E3779B97F4A7C15) & mask for i in range(300)]
    assert signs(300).tolist() == [-1.0 if splitmix(state) >> 63 else 1.0 for state in states]
    assert 100 < (signs(300) > 0).sum() < 200


@pytest.mark.parametrize(("width", "group"), [(192, 64), (1024, 1024), (4096, 1024), (96, 32), (123, 1), (576, 64)])
def test_a_group_divides_the_row(width: int, group: int) -> None:
    assert group_of(width) == group


@pytest.mark.parametrize("width", WIDTHS)
def test_the_rotation_keeps_lengths_and_comes_back(width: int) -> None:
    values = normal(5, width)
    turned = rotate(values)
    assert np.allclose((turned**2).sum(axis=1), (values**2).sum(axis=1), rtol=1e-5)
    assert np.allclose(rotate_back(turned), values, atol=1e-5)


def test_the_rotation_is_the_hadamard_matrix_with_signs() -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    values = normal(3, 192)
    expected = ((values * signs(192)).reshape(3, 3, 64) @ matrix.T / 8).reshape(3, 192)
    assert np.allclose(rotate(values), expected, atol=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_numbers_are_packed_without_gaps(bits: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, 1001).astype(np.uint8)
    packed = pack(numbers, bits)
    assert len(packed) == packed_size(1001, bits) == (1001 * bits + 7) // 8
    assert np.array_equal(unpack(packed, 1001, bits), numbers)
    whole = sum(int(number) << (bits * place) for place, number in enumerate(numbers))
    assert packed.tobytes() == whole.to_bytes(len(packed), "little")


@pytest.mark.parametrize("bits", higgs_grids.BITS)
def test_a_row_of_192_takes_the_bits_and_one_scale(bits: int) -> None:
    assert Higgs().size(1000, 192, bits) * 8 / 192_000 == bits + 16 / 192


@pytest.mark.parametrize("bits", higgs_grids.BITS)
@pytest.mark.parametrize("width", [64, 192, 1024])
def test_rows_with_outliers_come_back_with_the_error_of_the_grid(width: int, bits: int) -> None:
    values = normal(400, width) * np.exp(normal(400, 1))
    values[:, 5] *= 5  # a channel that would spoil a scale of its own, but for the rotation
    error = ((round_trip(values, bits) - values) ** 2).sum() / (values**2).sum()
    assert error == pytest.approx(LEAST_ERROR[bits], rel=0.12)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_any_width_come_back(width: int) -> None:
    values = normal(3, width) + 1
    assert ((round_trip(values, 4) - values) ** 2).mean() < 0.1


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1.0, 1e37])
def test_rows_of_any_size_come_back(scale: float) -> None:
    values = normal(20, 192) * np.float32(scale)
    found = round_trip(values, 4)
    assert np.abs(found - values).max() <= 0.8 * scale + 1e-41  # below that bf16 has no numbers
    assert np.isfinite(found).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_rows_that_no_scale_fits_are_not_coded(bad: float) -> None:
    values = np.ones((3, 2), np.float32)
    assert Higgs().encode(values, 2) is not None
    values[1] = bad
    assert Higgs().encode(values, 2) is None


@pytest.mark.parametrize("code", [0x7F80, 0x7FC0, 0x8001, 0xFFFF])
def test_a_scale_that_cannot_be_is_refused(code: int) -> None:
    data = Higgs().encode(normal(3, 16), 2)
    data[2:4] = code & 255, code >> 8
    with pytest.raises(CodecError):
        Higgs().decode(data, 3, 16, 2)


def test_bytes_are_those_of_before() -> None:
    """Integers in, so that no other library's normal numbers matter."""
    values = ((np.arange(5 * 192) * 7919 % 257) - 128).astype(np.float32).reshape(5, 192) / 16
    found = {bits: hashlib.sha256(Higgs().encode(values, bits)).hexdigest()[:16] for bits in higgs_grids.BITS}
    assert found == GOLDEN


GOLDEN = {2: "e3a436bba216b4c4", 3: "03ff1fe49277f5cd", 4: "2526c01624f3a9d1"}
