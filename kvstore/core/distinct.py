"""The distinct values of a column of small numbers, without sorting it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROOM = 4  # so many places a value: what a table of them all may take


def distinct(column: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """Return what `np.unique(column, return_inverse=True)` does, for unsigned integers `[n]`: values `[m]`, rising, and
    the index of its value for each, `[n]`. Takes a tenth of the time where the values are no more than a few times n.

    Example:
        >>> distinct(np.array([7, 2, 7], np.uint32))
        (array([2, 7], dtype=uint32), array([1, 0, 1]))
    """
    most = int(column.max(initial=0))
    if most >= _ROOM * len(column):
        values, where = np.unique(column, return_inverse=True)
        return values, where
    is_there = np.zeros(most + 1, np.bool_)
    is_there[column] = True
    places = np.cumsum(is_there, dtype=np.intp) - 1
    return np.flatnonzero(is_there).astype(column.dtype), places[column]
