"""The parts of a value that is to be stored."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import RemoteTooLarge


def byte_views(parts: Sequence[memoryview | bytes], limit: int) -> tuple[list[memoryview], int]:
    """Return the parts that have any bytes, as flat views, and the size of all.

    Raises:
        RemoteTooLarge: they have more than `limit` bytes.

    Example:
        >>> byte_views([b"ab", b"", b"c"], limit=3)[1]
        3
    """
    views = [view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes]
    size = sum(view.nbytes for view in views)
    if size > limit:
        raise too_large(size, limit)
    return views, size


def too_large(size: int, limit: int) -> RemoteTooLarge:
    """Return the error for a value that does not fit."""
    return RemoteTooLarge(f"a value of {size} bytes: at most {limit} fit")


def scatter(value: memoryview | bytes | bytearray, buffers: Sequence[memoryview]) -> int:
    """Write a value into the buffers, one after the other, as far as it goes; return how many bytes that were.

    Example:
        >>> buffers = [memoryview(bytearray(2)), memoryview(bytearray(3))]
        >>> scatter(b"abcde", buffers), bytes(buffers[0]), bytes(buffers[1])
        (5, b'ab', b'cde')
    """
    data, done = memoryview(value).cast("B"), 0
    for buffer in buffers:
        some = data[done : done + buffer.nbytes]
        buffer.cast("B")[: some.nbytes] = some
        done += some.nbytes
    return done
