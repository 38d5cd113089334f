"""Overwrites what removing leaves behind: dead space of segments, free pages of the catalog and the gaps in others.

See FORMAT.md, "Erase". Nobody may write meanwhile; `DiskTier` sees to that.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence

from kvstore.config import PAGE_BYTES
from kvstore.errors import DiskError
from kvstore.tiers.disk.fs import FileSystem, close_quietly, read_all, write_all

_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_ZEROS = 1 << 20

# LMDB 0.9: a page begins with its number (8), a pad (2), flags (2), and where the gap begins and ends (2, 2), or in the
# first page of a long value how many pages it has (4).
_PAGE = struct.Struct("<QHHHH")
_HEAD_BYTES = 16
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04
_NODE = struct.Struct("<HHHH")
_BIG, _TREE = 0x01, 0x02  # flags of a node: a long value; a tree of its own
_META_MAGIC, _META_MAGIC_AT = 0xBEEFC0DE, 16
_FREE_ROOT_AT, _MAIN_ROOT_AT, _COMMIT_AT = 80, 128, 144  # in a meta page
_ROOT_AT = 40  # in what describes a tree
_NO_PAGE = (1 << 64) - 1


def zero(fs: FileSystem, fd: int, begin: int, end: int) -> bool:
    """Make bytes [begin, end) of a file zeros; durable after a sync. Both are whole pages.

    Returns:
        False if zeros had to be written, because the file system cannot make holes.

    Raises:
        OSError: the disk refuses.
    """
    if fs.next_data(fd, begin) >= end:
        return True
    try:
        fs.punch(fd, begin, end - begin)
        return True
    except OSError as error:
        if error.errno not in _NO_HOLES:
            raise
    zeros = _aligned_zeros(min(_ZEROS, end - begin))
    for offset in range(begin, end, len(zeros)):
        write_all(fs, fd, [zeros[: end - offset]], offset)
    return False


def gaps(live: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of [begin, end) that none of `live`, ranges that rise, covers.

    Example:
        >>> list(gaps([(2, 3), (5, 9)], 1, 9))
        [(1, 2), (3, 5)]
    """
    for first, last in live:
        if begin < first:
            yield begin, first
        begin = max(begin, last)
    if begin < end:
        yield begin, end


def zero_unused_pages(fs: FileSystem, path: str, commit: int) -> None:
    """Make zeros of everything in an LMDB file that its newest commit does not use; durable on return.

    Nobody may write, and no reader may be in an older commit.

    Args:
        commit: number of the newest commit.

    Raises:
        DiskError: the file is not as LMDB writes it; nothing was changed then, or only what nobody uses.
        OSError: the disk refuses.
    """
    fd = fs.open(path, os.O_RDWR)
    try:
        used = _used_pages(fs, fd, fs.size(path) // PAGE_BYTES, commit)
        last = 2
        for number in [*sorted(used), fs.size(path) // PAGE_BYTES]:
            if number > last:
                zero(fs, fd, last * PAGE_BYTES, number * PAGE_BYTES)
            last = number + 1
        for number, (begin, end) in used.items():
            if end > begin:
                # Also what reads as zeros: after a sync that failed this says nothing about the disk.
                write_all(fs, fd, [memoryview(bytes(end - begin))], number * PAGE_BYTES + begin)
        fs.fdatasync(fd)
    finally:
        close_quietly(fs, fd)


def _used_pages(fs: FileSystem, fd: int, count: int, commit: int) -> dict[int, tuple[int, int]]:
    """Every page that the commit leads to, and which bytes of it are a gap."""

    def page_at(number: int) -> bytes:
        if number >= count:
            raise DiskError(f"catalog: page {number} of {count} is named; open the store anew to mend the catalog")
        page = bytearray(PAGE_BYTES)
        read_all(fs, fd, [memoryview(page)], number * PAGE_BYTES)
        return bytes(page)

    meta = page_at(commit % 2)
    if struct.unpack_from("<I", meta, _META_MAGIC_AT)[0] != _META_MAGIC or _u64(meta, _COMMIT_AT) != commit:
        raise DiskError("catalog: its newest meta page is not of the last commit; open the store anew to mend it")
    used: dict[int, tuple[int, int]] = {}
    waiting = [_u64(meta, _FREE_ROOT_AT), _u64(meta, _MAIN_ROOT_AT)]
    while waiting:
        number = waiting.pop()
        if number == _NO_PAGE:
            continue
        page = page_at(number)
        _, _, flags, lower, upper = _PAGE.unpack_from(page)
        if number in used or not flags & (_BRANCH | _LEAF) or not _HEAD_BYTES <= lower <= upper <= PAGE_BYTES:
            raise DiskError(f"catalog: page {number} is damaged; open the store anew to mend the catalog")
        used[number] = lower, upper
        for slot in range(_HEAD_BYTES, lower, 2):
            (node,) = struct.unpack_from("<H", page, slot)
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, node)
            value = node + _NODE.size + key_bytes
            if flags & _BRANCH:
                waiting.append(low | high << 16 | node_flags << 32)
            elif node_flags & _TREE:
                waiting.append(_u64(page, value + _ROOT_AT))
            elif node_flags & _BIG:
                used.update(_long_value(page_at, _u64(page, value), low | high << 16))
    return used


def _long_value(page_at: Callable[[int], bytes], first: int, nbytes: int) -> dict[int, tuple[int, int]]:
    """The pages of a value of its own; what is behind its end is a gap."""
    _, _, flags, low, high = _PAGE.unpack_from(page_at(first))
    pages, end = low | high << 16, _HEAD_BYTES + nbytes
    if not flags & _OVERFLOW or end > pages * PAGE_BYTES:
        raise DiskError(f"catalog: page {first} is damaged; open the store anew to mend the catalog")
    inside = [max(0, min(PAGE_BYTES, end - i * PAGE_BYTES)) for i in range(pages)]
    return {first + i: (begin, PAGE_BYTES) for i, begin in enumerate(inside)}


def _u64(page: bytes, offset: int) -> int:
    return int(struct.unpack_from("<Q", page, offset)[0])


def _aligned_zeros(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))  # whole pages, as O_DIRECT wants them
