"""Round to nearest between the least and the largest value of a group of values, as Quanto codes caches.

Coded rows: of every group the least value and the step, fp16 each, row after row; then the numbers of steps of every
value, `bits` each, first bits lowest, without gaps. The last group of a row may be short.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.codecs.aqua.higgs import Bytes, Floats, pack, packed_size, unpack
from kvstore.errors import CodecError


class MinMax:
    """Codes `[rows, width]` float32 with 2, 3 or 4 bits a value and 32 a group.

    number: of this way to code, in headers. group: values that share a scale; None for a whole row.
    """

    bits = (2, 3, 4)

    def __init__(self, number: int, group: int | None) -> None:
        self.number = number
        self._group = group

    def size(self, rows: int, width: int, bits: int) -> int:
        """Bytes of so many coded rows."""
        return 4 * rows * self._groups(width) + packed_size(rows * width, bits)

    def encode(self, values: Floats, bits: int) -> Bytes | None:
        """The coded rows; None where a value, or a scale as fp16, is not finite."""
        if not np.isfinite(values).all():
            return None
        rows, width = values.shape
        sides = np.empty((rows, self._groups(width), 2), np.float16)
        numbers = np.empty((rows, width), np.uint8)
        steps = np.float32((1 << bits) - 1)
        for place, part in self._parts(width):
            cut = values[:, part]
            least = cut.min(axis=1)
            with np.errstate(over="ignore", invalid="ignore"):
                sides[:, place, 0] = least
                # From the least value as it is kept, so that the largest stays within reach.
                sides[:, place, 1] = (cut.max(axis=1) - sides[:, place, 0].astype(np.float32)) / steps
            if not np.isfinite(sides[:, place]).all():
                return None
            low, step = (sides[:, place, side].astype(np.float32)[:, None] for side in range(2))
            step = np.maximum(step, 0)
            number = (cut - low) / np.where(step > 0, step, np.float32(np.inf))
            numbers[:, part] = np.rint(number).clip(0, steps)
        np.maximum(sides[:, :, 1], 0, out=sides[:, :, 1])
        packed = pack(numbers.reshape(-1), bits)
        return np.concatenate([sides.astype("<f2").reshape(-1).view(np.uint8), packed])

    def decode(self, data: Bytes, rows: int, width: int, bits: int) -> Floats:
        """The inverse. data: `size(rows, width, bits)` bytes. Raises `CodecError` for a scale that cannot be."""
        end = 4 * rows * self._groups(width)
        sides = data[:end].view("<f2").astype(np.float32).reshape(rows, self._groups(width), 2)
        if not np.isfinite(sides).all() or (sides[:, :, 1] < 0).any():
            raise CodecError("aqua: the scale of a group is negative or not finite")
        values = unpack(data[end:], rows * width, bits).reshape(rows, width).astype(np.float32)
        for place, part in self._parts(width):
            values[:, part] = values[:, part] * sides[:, place, 1, None] + sides[:, place, 0, None]
        return values

    def _groups(self, width: int) -> int:
        return -(-width // (self._group or width))

    def _parts(self, width: int) -> Iterator[tuple[int, slice]]:
        group = self._group or width
        return enumerate(slice(begin, min(begin + group, width)) for begin in range(0, width, group))
