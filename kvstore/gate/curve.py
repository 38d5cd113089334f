"""Seconds as a sum of costs that cannot be negative, fitted to what was observed, robust against what is not usual.

Observations of about the same size share a cell, which keeps the newest: a thousand short passes do not make the fit
forget what a long one took.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Observation = tuple[tuple[float, ...], float]  # features, seconds
Seen = tuple[int, tuple[float, ...], float]  # its number, and an observation
PriorRow = tuple[tuple[float, ...], float]  # an equation that is expected: factors of the coefficients, and their sum

_IN_CELL = 5
_MOST_CELLS = 64
_LEAST_WEIGHT = 0.02  # of what was observed long ago: it still says how seconds grow with size
_USUAL = 0.25  # a relative deviation up to which an observation counts in full
_ROUNDS = 3
_SAME = 1e-12


class Curve:
    """seconds = sum of coefficient x feature. Not thread-safe: its owner has the lock.

    Args:
        half_life: after so many newer observations one counts half.
        least: of a cell only the quickest counts: the others waited for something else.
        parts: `[n, n]`, the coefficients are a sum of its columns, none of which is negative; each alone if not given.

    Example:
        >>> line = Curve(half_life=8)
        >>> for size in (10.0, 100.0, 1000.0):
        ...     line.observe((1.0, size), 0.5 + 0.01 * size)
        >>> [round(float(x), 3) for x in line.fit(list)]
        [0.5, 0.01]
    """

    def __init__(self, half_life: float, least: bool = False, parts: F64 | None = None) -> None:
        self._half_life, self._least, self._parts = half_life, least, parts
        self._cells: dict[tuple[int, ...], deque[Seen]] = {}
        self._count = 0
        self._fitted: F64 | None = None

    def __len__(self) -> int:
        return sum(map(len, self._cells.values()))

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        """Note that something with these features took so long. All numbers are finite and above 0."""
        cell = tuple(int(math.log2(x)) for x in features[1:])
        self._count += 1
        self._cells.setdefault(cell, deque(maxlen=_IN_CELL)).append((self._count, features, seconds))
        if len(self._cells) > _MOST_CELLS:
            del self._cells[min(self._cells, key=lambda name: self._cells[name][-1][0])]
        self._fitted = None

    def observations(self) -> list[Observation]:
        """Return what is kept, the oldest first."""
        kept = sorted(one for cell in self._cells.values() for one in cell)
        return [(features, seconds) for _, features, seconds in kept]

    def restore(self, observations: Sequence[Observation]) -> None:
        """Take in what was observed long ago: anything newer counts at least twice as much."""
        for features, seconds in observations:
            self.observe(features, seconds)
        self._count += math.ceil(self._half_life)

    def fit(self, prior: Callable[[], Sequence[PriorRow]]) -> F64:
        """Return the coefficients, at least one observation given.

        Args:
            prior: gives equations, in seconds that are shares, that hold where nothing was observed; asked again after
                each observation.
        """
        if self._fitted is None:
            self._fitted = self._solved(prior())
        return self._fitted

    def _solved(self, prior: Sequence[PriorRow]) -> F64:
        kept = [one for cell in self._cells.values() for one in (_quickest(cell) if self._least else cell)]
        seconds = np.array([seconds for _, _, seconds in kept])
        rows = np.array([features for _, features, _ in kept]) / seconds[:, None]  # so errors are relative
        ages = self._count - np.array([index for index, _, _ in kept])
        weights = np.maximum(0.5 ** (ages / self._half_life), _LEAST_WEIGHT)
        more = np.array([factors for factors, _ in prior]).reshape(-1, rows.shape[1])
        wanted = np.array([value for _, value in prior])
        parts = np.eye(rows.shape[1]) if self._parts is None else self._parts
        rows, more = rows @ parts, more @ parts
        found, usual = np.zeros(rows.shape[1]), np.ones(len(rows))
        for _ in range(_ROUNDS):
            scale = np.sqrt(weights * usual)
            found = _non_negative(np.vstack([rows * scale[:, None], more]), np.concatenate([scale, wanted]))
            before, usual = usual, _USUAL / np.maximum(np.abs(rows @ found - 1), _USUAL)
            if (usual == before).all():
                break  # nothing is unusual: another round would find the same
        return np.asarray(parts @ found)


def _quickest(cell: Iterable[Seen]) -> list[Seen]:
    """The quickest for its size."""
    return [min(cell, key=lambda one: one[2] / one[1][-1])]


def _non_negative(rows: F64, wanted: F64) -> F64:
    """Least squares without negative coefficients. There are so few that every subset of them is tried, at once: by
    the products of the columns, for a get waits for this."""
    length = np.sqrt((rows * rows).sum(0))
    unit = rows / length
    products, aims = unit.T @ unit, unit.T @ wanted
    among, outside = _subsets(len(length))
    # Outside of a subset stands the identity, whose coefficient is 0. Columns that say the same share what they say.
    some = np.linalg.solve(products * among + outside, (among.diagonal(0, 1, 2) * aims)[..., None])[..., 0]
    errors = ((some @ unit.T - wanted) ** 2).sum(1)
    errors[(some < 0).any(1)] = math.inf
    best = int((errors <= errors.min() + _SAME).argmax())  # the smallest of those that are as good
    return np.asarray(some[best] / length)


@cache
def _subsets(width: int) -> tuple[F64, F64]:
    """Every subset of the coefficients, the smaller before the larger: `[2 ** width, width, width]` ones where row and
    column belong to it; and what to add there, to be invertible."""
    members = np.array(sorted(product((0.0, 1.0), repeat=width), key=sum))
    among = members[:, :, None] * members[:, None, :]
    return among, (1 + _SAME - among) * np.eye(width)
