"""The catalog's file as bytes: what must be true of it before LMDB maps it, and how a smaller copy takes its place.

LMDB reads its file through a mapping. A page that is in use and that the file does not have ends the process by SIGBUS,
so the file is looked at first, here and by `kvstore.tiers.disk.environment.check`. The layout is that of LMDB 0.9.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

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


def is_cut_short(fs: FileSystem, path: str) -> bool:
    """Return whether the file lacks pages, at its end, that are in use.

    Free pages at its end may be missing: LMDB writes a page when it is first used. So a file that is shorter than its
    meta pages say is walked through. The caller has checked its structure (`environment.check`), which looks at no
    page of a long value but the first.

    Raises:
        OSError: the file cannot be read.
    """
    size = fs.size(path)
    metas = Metas.read(fs, path)
    if metas.end <= size:
        return False
    fd = fs.open(path, os.O_RDONLY)
    try:
        return _end_in_use(fs, fd, metas.roots, size) > size
    except struct.error:
        return True
    finally:
        close_quietly(fs, fd)


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


def _end_in_use(fs: FileSystem, fd: int, roots: list[int], size: int) -> int:
    """Where the last page ends that the trees with these roots use; anything above `size` if some are beyond it."""
    end, page, seen = 0, bytearray(PAGE_BYTES), set(roots)
    while roots:
        here = roots.pop() * PAGE_BYTES
        end = max(end, here + PAGE_BYTES)
        if end > size:
            return end
        read_all(fs, fd, [memoryview(page)], here)
        flags, lower = struct.unpack_from("<HH", page, 10)
        for slot in range(_HEADER_BYTES, min(lower, PAGE_BYTES), 2):
            (node,) = struct.unpack_from("<H", page, slot)
            low, high, kind, key_bytes = struct.unpack_from("<HHHH", page, node)
            value = node + 8 + key_bytes
            below = 0
            if flags & _BRANCH:
                below = low | high << 16 | kind << 32
            elif flags & _LEAF and kind & _IN_OVERFLOW:
                (first,) = struct.unpack_from("<Q", page, value)
                pages = -(-(_HEADER_BYTES + (low | high << 16)) // PAGE_BYTES)
                end = max(end, (first + pages) * PAGE_BYTES)
            elif flags & _LEAF and kind & _IS_DATABASE:
                (below,) = struct.unpack_from("<Q", page, value + _ROOT_OF_DATABASE)
            if below not in (0, _NO_PAGE) and below not in seen:
                seen.add(below)
                roots.append(below)
    return end
