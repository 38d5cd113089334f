"""Reads numbers from bytes that may be anything; every length is checked before it is used."""

from __future__ import annotations

import struct
from typing import Any

from kvstore.errors import MalformedState


class Fields:
    """Little-endian fields of `data`, one after the other. Not thread-safe.

    Attributes:
        place: the next byte.

    Example:
        >>> fields = Fields(b"GGUF" + bytes([3, 0, 0, 0]), "file")
        >>> bytes(fields.take(4)), fields.number("I")
        (b'GGUF', 3)
    """

    def __init__(self, data: Any, what: str) -> None:
        self._data = memoryview(data)
        self._what = what
        self.place = 0

    @property
    def left(self) -> int:
        """Bytes that were not taken yet."""
        return len(self._data) - self.place

    def take(self, length: int) -> memoryview:
        """Return the next `length` bytes, without copying them.

        Raises:
            MalformedState: there are fewer.
        """
        if not 0 <= length <= self.left:
            raise MalformedState(f"{self._what}: {length} bytes are named at byte {self.place}, {self.left} are left")
        self.place += length
        return self._data[self.place - length : self.place]

    def number(self, code: str) -> Any:
        """Return the next number, of a code of `struct`. Raises as `take`."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def release(self) -> None:
        """Give the data back, which may then be closed."""
        self._data.release()
