"""Computes the grids of HIGGS: `python -m tools.make_higgs_grids --out codecs/aqua/grids.bin`.

A grid of n points is the one that codes a pair of normal numbers with the least mean squared error. Lloyd's algorithm
on the plane cut into small squares, each weighted by its share of the distribution: an integral, so that nothing is
fitted to a sample. The best of several seeded starts on a coarse plane is refined on a fine one. Takes a few minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvstore.codecs.aqua.grids import POINTS

REACH = 6.5  # deviations; what lies outside has a share of 1e-9
COARSE, FINE = 0.06, 0.02  # sides of the squares
STARTS = 6
ROUNDS, FINE_ROUNDS = 200, 150
OVERSHOOT = 1.7  # Lloyd's steps are lengthened so much: it converges slowly where cells are nearly hexagons
AT_ONCE = 1 << 15  # squares
Grid = npt.NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute the grids of HIGGS.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    grids = []
    for points in POINTS:
        starts = [descend(plane(COARSE), start(points, seed), ROUNDS) for seed in range(STARTS)]
        grid = descend(plane(FINE), min(starts, key=lambda found: error(plane(COARSE), found)), FINE_ROUNDS)
        grids.append(ordered(grid.numpy()))
        print(f"{points} points: relative error {error(plane(FINE), torch.from_numpy(grids[-1])):.6f}", flush=True)
    args.out.write_bytes(np.concatenate(grids).astype("<f4").tobytes())


def plane(side: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Centres of squares `[m, 2]` and their shares `[m]`, float64; the outermost ring is left out of a circle."""
    axis = torch.arange(-REACH + side / 2, REACH, side, dtype=torch.float64)
    centres = torch.cartesian_prod(axis, axis)
    centres = centres[centres.pow(2).sum(1) < REACH**2]
    share = (-centres.pow(2).sum(1) / 2).exp()
    return centres, share / share.sum()


def start(points: int, seed: int) -> torch.Tensor:
    """Seeded points `[points, 2]`, wider than the distribution, as those of the best grids are."""
    rng = np.random.default_rng((points, seed))
    return torch.from_numpy(rng.standard_normal((points, 2)) * 2**0.5)


def descend(cells: tuple[torch.Tensor, torch.Tensor], grid: torch.Tensor, rounds: int) -> torch.Tensor:
    """Moves every point towards the centre of what is nearest to it; the last rounds move it there."""
    for number in range(rounds):
        mass, moment, _ = sums(cells, grid)
        centre = torch.where(mass[:, None] > 0, moment / mass[:, None].clamp_min(1e-300), grid / 2)
        grid = grid + (centre - grid) * (OVERSHOOT if number < rounds - 20 else 1.0)
    return grid


def error(cells: tuple[torch.Tensor, torch.Tensor], grid: torch.Tensor) -> float:
    """The mean squared error of a number, relative to its variance of one."""
    return sums(cells, grid)[2] / 2


def sums(cells: tuple[torch.Tensor, torch.Tensor], grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Of every point of the grid: the share that is nearest to it, and its first moment; and the squared error."""
    mass, moment = torch.zeros(len(grid), dtype=torch.float64), torch.zeros_like(grid)
    squares = 0.0
    for centres, share in _pieces(cells):
        # Squares of norms are left out: they do not change which point is nearest.
        nearest = torch.addmm((grid.pow(2).sum(1) / -2).float(), centres.float(), grid.float().T).argmax(1)
        mass += torch.bincount(nearest, share, len(grid))
        for axis in range(2):
            moment[:, axis] += torch.bincount(nearest, share * centres[:, axis], len(grid))
        squares += float(((centres - grid[nearest]).pow(2).sum(1) * share).sum())
    return mass, moment, squares


def _pieces(cells: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(cells[0].split(AT_ONCE), cells[1].split(AT_ONCE), strict=True)


def ordered(grid: Grid) -> Grid:
    """By ring and angle, so that the file does not depend on the order that a start came in."""
    return grid[np.lexsort((np.arctan2(grid[:, 1], grid[:, 0]), np.hypot(grid[:, 0], grid[:, 1]).round(3)))]


if __name__ == "__main__":
    main()
