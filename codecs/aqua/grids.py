"""The grids of HIGGS (arXiv 2411.17525): 16, 64 and 256 points that code pairs of normal numbers with 2, 3 and 4 bits
a number, at the least mean squared error.

They were computed once (tools/make_higgs_grids.py) and are part of the format: the file never changes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

POINTS = (16, 64, 256)
BITS = (2, 3, 4)  # a number; a pair takes one point
SIDE = 256  # of the raster that finds the nearest point
REACH = 5.0  # deviations that the raster covers

_FILE = Path(__file__).with_name("grids.bin")
_SHA256 = "b82c060dc5338647e8507ceb10567d2f1dfd6b8ddc67803866416552e69263ea"

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint8]


@lru_cache(maxsize=1)
def _grids() -> dict[int, Floats]:
    data = _FILE.read_bytes()
    if hashlib.sha256(data).hexdigest() != _SHA256:
        raise RuntimeError(f"{_FILE} is damaged; install kvstore again")
    parts = np.split(np.frombuffer(data, "<f4").astype(np.float32).reshape(-1, 2), np.cumsum(POINTS)[:-1])
    return dict(zip(BITS, parts, strict=True))


def grid(bits: int) -> Floats:
    """The points `[4**bits, 2]`, float32. bits: 2, 3 or 4. Raises `RuntimeError` where the installed file is not the
    one of this format."""
    return _grids()[bits]


@dataclass(frozen=True)
class _Raster:
    """Of every square of a raster the points that may be nearest to a place in it, the lowest number first.

    candidates: `[SIDE * SIDE, most]` uint8, the last repeated; sure: `[SIDE * SIDE]`, whether there is one only.
    """

    candidates: Indices
    sure: npt.NDArray[np.bool_]


@lru_cache(maxsize=len(BITS))
def _raster(bits: int) -> _Raster:
    points = grid(bits).astype(np.float64)
    axis = (np.arange(SIDE) + 0.5) * (2 * REACH / SIDE) - REACH
    centres = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 1, 2)
    # A point is nearest somewhere in a square only if its distance to the centre exceeds the least by no more than
    # the square's diagonal; a little more, for the search rounds to float32.
    slack = 2 * REACH / SIDE * 2**0.5 + 1e-3
    near = []
    for part in np.array_split(centres, SIDE):
        distance = np.sqrt(((part - points) ** 2).sum(axis=2))
        near.append(distance <= distance.min(axis=1, keepdims=True) + slack)
    square, number = np.nonzero(np.concatenate(near))
    counts = np.bincount(square)
    starts = np.cumsum(counts) - counts
    table = np.empty((len(counts), counts.max()), np.uint8)
    table[:] = number[starts + counts - 1][:, None]
    table[square, np.arange(len(square)) - starts[square]] = number
    return _Raster(table, counts == 1)


def nearest(x: Floats, y: Floats, bits: int) -> Indices:
    """The number of the point nearest to each (x, y), the lowest where several are; x, y: `[n]` float32, finite.

    As a search of all points would find it, at a fraction of its cost.
    """
    points, raster = grid(bits), _raster(bits)
    scale = np.float32(SIDE / (2 * REACH))
    column, row = (((part + np.float32(REACH)) * scale).clip(0, SIDE - 1).astype(np.int32) for part in (x, y))
    square = column * SIDE + row
    found: Indices = raster.candidates[square, 0]
    inside = np.maximum(np.abs(x), np.abs(y)) < REACH
    near = np.flatnonzero(inside & ~raster.sure[square])
    found[near] = _best(x[near], y[near], points, raster.candidates[square[near]].T)
    far = np.flatnonzero(~inside)
    every = np.broadcast_to(np.arange(len(points), dtype=np.uint8)[:, None], (len(points), len(far)))
    found[far] = _best(x[far], y[far], points, every)
    return found


def _best(x: Floats, y: Floats, points: Floats, candidates: Indices) -> Indices:
    """candidates: `[k, n]`, k of them for each (x, y)."""
    best: Indices = candidates[0].copy()
    least = np.full(len(x), np.inf, np.float32)
    across, up = np.ascontiguousarray(points[:, 0]), np.ascontiguousarray(points[:, 1])
    for candidate in candidates:
        distance = (x - across[candidate]) ** 2 + (y - up[candidate]) ** 2
        better = distance < least
        least = np.where(better, distance, least)
        best = np.where(better, candidate, best)
    return best
