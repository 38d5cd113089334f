"""Rows of differences in pages of 256 values: a scale, 4 bits a value, and the largest few kept as values.

A page of w values, w being 256 or what is left of the row: its scale, bf16; the numbers of steps plus 7, from 0 to 14,
4 bits each, the first of two in the low half; then its corrections, as many as `top` in 256 values (rounded down):
their places in the page, a byte each, rising; and their values, as the cache has them. The steps of a corrected value
count for nothing.

A value that is not corrected is wrong by half a step at the most, before it is rounded to the cache's type. All
operations are in float32, each rounded by itself, so that all machines write and read the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.errors import CodecError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PAGE = 256
STEPS = 7  # to each side of zero
_INFINITE = 0x7F80  # the first bf16 that is not a finite number above zero


@dataclass(frozen=True)
class _Page:
    """Where a page is: its first value and the one behind it; its first byte, and how many values are corrected."""

    begin: int
    end: int
    at: int
    corrected: int


@dataclass(frozen=True)
class Pages:
    """How rows are cut. Immutable.

    width: values of a row. item: bytes of a value in the cache. top: corrections in 256 values.
    """

    width: int
    item: int
    top: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a coded row."""
        return sum(self._bytes(min(PAGE, self.width - begin)) for begin in range(0, self.width, PAGE))

    def encode(self, differences: Floats, values: Bytes) -> Bytes | None:
        """Code rows.

        Args:
            differences: `[rows, width]`.
            values: what they are the differences of, as the cache has them, `[rows, width, item]`.

        Returns:
            uint8 `[rows, row_bytes]`; None if a scale is not finite.
        """
        rows = np.arange(len(differences))[:, None]
        out = np.empty((len(differences), self.row_bytes), np.uint8)
        for page in self._pages():
            cut = differences[:, page.begin : page.end]
            size = np.abs(cut)
            places = _largest(size, page.corrected)
            size[rows, places] = 0
            scale = _rounded_up(size.max(axis=1) / np.float32(STEPS))
            if (scale >= _INFINITE).any():
                return None
            step = _number(scale)[:, None]
            steps = np.rint(cut / np.where(step > 0, step, np.float32(np.inf))).clip(-STEPS, STEPS)
            steps[rows, places] = 0
            codes, numbers, kept, whole = self._split(out, page)
            codes[:] = scale[:, None].astype("<u2").view(np.uint8)
            numbers[:] = _packed((steps + STEPS).astype(np.uint8))
            kept[:] = places
            whole[:] = values[:, page.begin : page.end][rows, places].reshape(len(rows), -1)
        return out

    def decode(self, data: Bytes) -> Floats:
        """Return the differences of coded rows, float32 `[rows, width]`; those of corrected values mean nothing.

        Raises:
            CodecError: the rows have a scale, a number of steps or a place that no encoder writes.
        """
        found = np.empty((len(data), self.width), np.float32)
        for page in self._pages():
            codes, numbers, kept, _ = self._split(data, page)
            scale = np.ascontiguousarray(codes).view("<u2")[:, 0].astype(np.uint32)
            width = page.end - page.begin
            steps = _unpacked(numbers, width)
            if (scale >= _INFINITE).any() or (steps > 2 * STEPS).any():
                raise CodecError("tsc: a page has a scale that is not finite, or a value of more than 7 steps")
            if (kept[:, 1:] <= kept[:, :-1]).any() or (kept >= width).any():
                raise CodecError("tsc: the corrections of a page are not in order, or outside of it")
            found[:, page.begin : page.end] = (steps.astype(np.float32) - STEPS) * _number(scale)[:, None]
        return found

    def correct(self, data: Bytes, values: Bytes) -> None:
        """Put the corrections of coded rows into `values`, uint8 `[rows, width, item]`."""
        rows = np.arange(len(data))[:, None]
        for page in self._pages():
            _, _, kept, whole = self._split(data, page)
            values[rows, page.begin + kept.astype(np.int64)] = whole.reshape(len(data), page.corrected, self.item)

    def _pages(self) -> Iterator[_Page]:
        at = 0
        for begin in range(0, self.width, PAGE):
            width = min(PAGE, self.width - begin)
            yield _Page(begin, begin + width, at, self.top * width // PAGE)
            at += self._bytes(width)

    def _bytes(self, width: int) -> int:
        return 2 + (width + 1) // 2 + self.top * width // PAGE * (1 + self.item)

    def _split(self, data: Bytes, page: _Page) -> tuple[Bytes, Bytes, Bytes, Bytes]:
        """Of a page of all rows: scales, numbers of steps, places, values that are corrected."""
        sizes = (2, (page.end - page.begin + 1) // 2, page.corrected, page.corrected * self.item)
        ends = page.at + np.cumsum((0, *sizes))
        scale, numbers, kept, whole = (data[:, a:b] for a, b in pairwise(ends.tolist()))
        return scale, numbers, kept, whole


def _largest(size: Floats, count: int) -> npt.NDArray[np.int64]:
    """Places of the `count` largest numbers of each row, rising; of equal ones the first. size: none is negative."""
    width = size.shape[1]
    order = np.uint64(PAGE - 1) - np.arange(width, dtype=np.uint64)
    keys = size.view(np.uint32).astype(np.uint64) << np.uint64(8) | order  # no two are equal
    chosen = np.partition(keys, width - count, axis=1)[:, width - count :] if count else keys[:, :0]
    return np.sort(PAGE - 1 - (chosen & np.uint64(PAGE - 1)).astype(np.int64), axis=1)


def _rounded_up(numbers: Floats) -> npt.NDArray[np.uint32]:
    """The least bf16 that is not below each number, none of which is negative."""
    found: npt.NDArray[np.uint32] = numbers.view(np.uint32) + np.uint32(0xFFFF) >> np.uint32(16)
    return found


def _number(scale: npt.NDArray[np.uint32]) -> Floats:
    return (scale.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _packed(numbers: Bytes) -> Bytes:
    """4 bits each, the first of two in the low half; an odd last one has a 0 beside it."""
    even = np.zeros((len(numbers), (numbers.shape[1] + 1) // 2 * 2), np.uint8)
    even[:, : numbers.shape[1]] = numbers
    found: Bytes = even[:, 0::2] | even[:, 1::2] << 4
    return found


def _unpacked(data: Bytes, width: int) -> Bytes:
    pairs: Bytes = np.stack((data & 15, data >> 4), axis=2)
    found: Bytes = pairs.reshape(len(data), 2 * data.shape[1])[:, :width]
    return found
