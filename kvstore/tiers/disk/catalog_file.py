"""The catalog's file as bytes: what must be true of it before LMDB maps it, and how a smaller copy takes its place.

LMDB reads its file through a mapping. A page that is in use and that the file does not have ends the process by SIGBUS,
so the file is looked at first, here and by `kvstore.tiers.disk.environment.check`. The layout is that of LMDB 0.9.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.config import PAGE_BYTES
from kvstore.tiers.disk.fs import FileSystem, close_quietly, read_all, write_all

META_BYTES = 2 * PAGE_BYTES
DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"
_HEADER_BYTES = 16
_FREE_ROOT, _MAIN_ROOT, _LAST_PAGE, _COMMIT = 80, 128, 136, 144  # where a meta page has them
_ROOT_OF_DATABASE = 40
_BRANCH, _LEAF = 0x01, 0x02  # kinds of pages
_IN_OVERFLOW, _IS_DATABASE = 0x01, 0x02  # kinds of values
_NO_PAGE = (1 << 64) - 1
_CUT_SHORT = "it was cut short: pages that are in use are missing at its end"


@dataclass(frozen=True)
class Metas:
    """The two meta pages of a catalog's file. Immutable.

    Attributes:
        pages: their bytes.
    """

    pages: bytes

    @classmethod
    def read(cls, fs: FileSystem, path: str) -> Metas:
        """Read them. Raises `OSError`, also if the file is too short."""
        pages = bytearray(META_BYTES)
        fd = fs.open(path, os.O_RDONLY)
        try:
            read_all(fs, fd, [memoryview(pages)], 0)
        finally:
            close_quietly(fs, fd)
        return cls(bytes(pages))

    @property
    def commits(self) -> tuple[int, int]:
        """Numbers of the commits that wrote the two pages. LMDB goes by the higher one."""
        return self._number(0, _COMMIT), self._number(1, _COMMIT)

    @property
    def agree(self) -> bool:
        """Whether the pages are of commits n and n - 1, each in its place.

        A flipped bit in the higher number would silently undo the last commit.
        """
        even, odd = self.commits
        return even == odd == 0 or (even % 2 == 0 and odd % 2 == 1 and abs(even - odd) == 1)

    @property
    def end(self) -> int:
        """Bytes up to the last page that the newer commit knows, in use or not."""
        return (self._number(self._newer, _LAST_PAGE) + 1) * PAGE_BYTES

    @property
    def roots(self) -> list[int]:
        """The root pages of the newer commit: of the free pages, and of everything else."""
        found = [self._number(self._newer, place) for place in (_FREE_ROOT, _MAIN_ROOT)]
        return [page for page in found if page != _NO_PAGE]

    @property
    def _newer(self) -> int:
        even, odd = self.commits
        return 1 if odd > even else 0

    def _number(self, meta: int, place: int) -> int:
        return int(struct.unpack_from("<Q", self.pages, meta * PAGE_BYTES + place)[0])


def problem_of_pages(fs: FileSystem, path: str) -> str:
    """Return what is wrong with the pages of the trees that `environment.check` does not look for; "" for nothing.

    Pages that are in use may be missing at the end of the file: LMDB writes a page when it is first used, so that free
    ones may be missing there, too. And the nodes of a page must fill it: LMDB moves all that lie before one that it
    deletes by the length which that says to have.

    The caller has checked the rest of the structure.

    Raises:
        OSError: the file cannot be read.
    """
    size, roots = fs.size(path), Metas.read(fs, path).roots
    fd, page, seen = fs.open(path, os.O_RDONLY), bytearray(PAGE_BYTES), set(roots)
    try:
        while roots:
            here = roots.pop() * PAGE_BYTES
            if here + PAGE_BYTES > size:
                return _CUT_SHORT
            read_all(fs, fd, [memoryview(page)], here)
            found = _Page.of(page)
            if found.end > size:
                return _CUT_SHORT
            if not found.is_full:
                return "a node is longer or shorter than the room it takes"
            below = set(found.below) - seen
            seen |= below
            roots += below
    except struct.error:
        return _CUT_SHORT
    finally:
        close_quietly(fs, fd)
    return ""


def renumbered(fs: FileSystem, fd: int, commit: int) -> None:
    """Make a compacted copy, in an open file, that of commit number `commit`, so that it can take the original's place.

    A compacted copy begins again with commit 1. But LMDB keeps the last number beside its file, too, in its lock file,
    and a store's readers go by it. Not durable on return.

    Raises:
        OSError: the file cannot be read or written.
    """
    pages = bytearray(META_BYTES)
    read_all(fs, fd, [memoryview(pages)], 0)
    newer = Metas(bytes(pages))._newer
    page = pages[newer * PAGE_BYTES : (newer + 1) * PAGE_BYTES]
    for place in (0, 1):
        struct.pack_into("<Q", page, 0, place)
        struct.pack_into("<Q", page, _COMMIT, commit if commit % 2 == place else commit - 1)
        pages[place * PAGE_BYTES : (place + 1) * PAGE_BYTES] = page
    write_all(fs, fd, [memoryview(pages)], 0)


class _Page(NamedTuple):
    """A page of a tree.

    Attributes:
        below: the pages that it leads to.
        end: where the last page of a long value ends, in bytes; 0 if it has none.
        is_full: whether its nodes lie one behind the other, up to the end of the page.
    """

    below: list[int]
    end: int
    is_full: bool

    @classmethod
    def of(cls, page: bytearray) -> _Page:
        """Take it apart. Raises `struct.error` if it is none."""
        flags, lower, upper = struct.unpack_from("<HHH", page, 10)
        below, end, lengths = [], 0, {}
        for slot in range(_HEADER_BYTES, min(lower, PAGE_BYTES), 2):
            (node,) = struct.unpack_from("<H", page, slot)
            low, high, kind, key_bytes = struct.unpack_from("<HHHH", page, node)
            value, value_bytes, child = node + 8 + key_bytes, low | high << 16, _NO_PAGE
            if flags & _BRANCH:
                child, value_bytes = value_bytes | kind << 32, 0
            elif flags & _LEAF and kind & _IN_OVERFLOW:
                (first,) = struct.unpack_from("<Q", page, value)
                pages = -(-(_HEADER_BYTES + value_bytes) // PAGE_BYTES)
                end = max(end, (first + pages) * PAGE_BYTES)
                value_bytes = 8
            elif flags & _LEAF and kind & _IS_DATABASE:
                (child,) = struct.unpack_from("<Q", page, value + _ROOT_OF_DATABASE)
            if child not in (0, _NO_PAGE):
                below.append(child)
            lengths[node] = 8 + key_bytes + value_bytes
        for node, length in sorted(lengths.items()):
            if node != upper:
                return cls(below, end, False)
            upper += length + length % 2
        return cls(below, end, upper == PAGE_BYTES)
