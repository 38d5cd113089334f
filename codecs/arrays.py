"""The arrays of a profile's section, each checked when it is taken: the same checks for all codecs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ProfileError

MOST_ROWS = 1 << 24
PROBABILITIES = 4096
"""What the frequencies of a table sum to, for `rans.RansTables` of 12 bits."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SectionArrays:
    """The arrays of a section by name, to be taken one by one and checked. Immutable.

    Every method raises `ProfileError`, naming codec, section and array, if the array is not what the method says.

    Attributes:
        codec, section: names for error messages.
        arrays: the arrays by name.

    Example:
        >>> taken = SectionArrays("mine", "tables", {"scale": np.ones(3, np.float32)})
        >>> taken.positive("scale", width=3)
        array([1., 1., 1.], dtype=float32)
    """

    codec: str
    section: str
    arrays: Mapping[str, Array]

    def error(self, name: str, text: str) -> ProfileError:
        """Make the error to raise for array `name`; `text` says what it must be, and what it is."""
        return ProfileError(f"{self.codec}: the profile's array {self.section}/{name}: {text}")

    def size(self, name: str, axis: int = 0) -> int:
        """Return the length of an axis that may have any length from 1 to 2**24."""
        array = self.arrays.get(name)
        if array is None:
            raise self.error(name, "is missing; make a new profile with `kvstore calibrate`")
        if array.ndim <= axis or not 1 <= array.shape[axis] <= MOST_ROWS:
            found = list(array.shape)
            raise self.error(name, f"expected a size of 1 to {MOST_ROWS} in dimension {axis}, found the shape {found}")
        return int(array.shape[axis])

    def take(self, name: str, dtype: Any, shape: tuple[int, ...], limit: int | None = None) -> Array:
        """Return the array, contiguous.

        Args:
            name: of the array.
            dtype: what it must have.
            shape: what it must have; -1 stands for any size.
            limit: the largest magnitude that a value may have; None for any.
        """
        array = self.arrays.get(name)
        if array is None or array.dtype != dtype or not _fits(array.shape, shape):
            found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise self.error(name, f"expected {np.dtype(dtype)} {list(shape)}, found {found}")
        if limit is not None and array.size and (int(array.min()) < -limit or int(array.max()) > limit):
            raise self.error(name, f"expected numbers from -{limit} to {limit}")
        return np.ascontiguousarray(array)

    def finite(self, name: str, width: int) -> Array:
        """Return the array, float32 `[width]`, finite."""
        array = self.take(name, np.float32, (width,))
        if not np.isfinite(array).all():
            raise self.error(name, "expected finite numbers")
        return array

    def positive(self, name: str, width: int, below: float = math.inf) -> Array:
        """Return the array, float32 `[width]`, finite, above 0 and below `below`."""
        array = self.finite(name, width)
        if not ((array > 0).all() and (array < below).all()):
            raise self.error(name, f"expected finite numbers above 0 and below {below:g}")
        return array

    def frequencies(self, name: str, rows: int, symbols: int) -> Array:
        """Return the array, uint16 `[rows, symbols]`, whose rows sum to PROBABILITIES; frequencies may be 0."""
        array = self.take(name, np.uint16, (rows, symbols))
        if (array.astype(np.int64).sum(1) != PROBABILITIES).any():
            raise self.error(name, f"every row must sum to {PROBABILITIES}")
        return array

    def all_frequencies(self, name: str, rows: int, symbols: int) -> Array:
        """Return the array as `frequencies` does; every frequency must be above 0."""
        array = self.frequencies(name, rows, symbols)
        if not array.all():
            raise self.error(name, "every frequency must be at least 1")
        return array


def _fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(found) == len(wanted) and all(w in (-1, f) for f, w in zip(found, wanted, strict=True))
