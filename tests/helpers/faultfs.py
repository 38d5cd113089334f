"""File systems that fail on purpose, below the store's own seam (`kvstore.tiers.disk.fs`)."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.config import PAGE_BYTES
from kvstore.tiers.disk.fs import FileSystem

CALLS = (
    "open", "close", "pwritev", "preadv", "fdatasync", "punch", "allocate", "truncate", "rename", "unlink",
    "mkdir", "names", "size", "kind", "sync_directory", "lock",
)  # fmt: skip


@dataclass
class Fault:
    """The `nth` call named `call` (any call where it is "") fails with `code`; with sticky every later one as well.

    code: an errno, or "short": half is written or read. hits: how often it struck.
    """

    call: str
    nth: int
    code: int | str
    sticky: bool = False
    seen: int = 0
    hits: int = 0

    def strikes(self, call: str) -> bool:
        if self.call not in ("", call):
            return False
        self.seen += 1
        strike = self.seen >= self.nth if self.sticky else self.seen == self.nth
        self.hits += strike
        return strike


class FaultFS(FileSystem):
    """Counts calls and injects faults. `fault` may be set and cleared at any time.

    resynced: files that were synced again after a sync of them had failed, though something that it was to make durable
        had not been written or given up since: the kernel may have dropped it, so that the second sync proves nothing.
    before: called before every call, with its name.
    """

    def __init__(self, fault: Fault | None = None, before: Callable[[str], None] | None = None) -> None:
        self.fault = fault
        self.before = before
        self.resynced: list[int] = []
        self._written: dict[tuple[int, int], set[int]] = {}  # pages by inode, since the last sync
        self._dropped: dict[tuple[int, int], set[int]] = {}  # those that a failed sync may have cost
        self._lock = threading.RLock()

    def forget_failed_syncs(self) -> None:
        """The store was closed: another life of it writes anew what it syncs."""
        with self._lock:
            self._written.clear()
            self._dropped.clear()

    def _error(self, call: str) -> int | str | None:
        if self.before is not None:
            self.before(call)
        with self._lock:
            fault = self.fault
            return fault.code if fault is not None and fault.strikes(call) else None

    def _check(self, call: str) -> None:
        code = self._error(call)
        if code is not None:
            # A "short" call makes no sense for most: those fail outright.
            number = code if isinstance(code, int) else errno.EIO
            raise OSError(number, os.strerror(number))

    def open(self, path: str, flags: int) -> int:
        self._check("open")
        fd = super().open(path, flags)
        if flags & (os.O_TRUNC | os.O_EXCL):  # a new file in an inode that may have had another life
            with self._lock:
                self._written.pop(_inode(fd), None)
                self._dropped.pop(_inode(fd), None)
        return fd

    def close(self, fd: int) -> None:
        # Linux closes the descriptor even where close reports an error.
        super().close(fd)
        self._check("close")

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        code = self._error("pwritev")
        self._touch(fd, offset, sum(map(len, buffers)))
        if code == "short":
            data = b"".join(buffers)
            return os.pwritev(_buffered(fd), [data[: len(data) // 2]], offset)
        if code is not None:
            raise OSError(code, "injected")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        code = self._error("preadv")
        if code == "short":
            return max(0, super().preadv(fd, buffers, offset) - 512)
        if code is not None:
            raise OSError(code, "injected")
        return super().preadv(fd, buffers, offset)

    def _touch(self, fd: int, offset: int, nbytes: int, written: bool = True) -> None:
        pages = set(range(offset // PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES)))
        with self._lock:
            self._dropped.get(_inode(fd), set()).difference_update(pages)
            if written:
                self._written.setdefault(_inode(fd), set()).update(pages)

    def fdatasync(self, fd: int) -> None:
        inode = _inode(fd)
        with self._lock:
            if self._dropped.get(inode):
                self.resynced.append(fd)
            written = self._written.pop(inode, set())
        try:
            self._check("fdatasync")
        except OSError:
            with self._lock:
                self._dropped.setdefault(inode, set()).update(written)
            raise
        super().fdatasync(fd)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        self._check("punch")
        super().punch(fd, offset, nbytes)
        self._touch(fd, offset, nbytes, written=False)  # a hole is of the file system's own books

    def allocate(self, fd: int, nbytes: int) -> None:
        code = self._error("allocate")
        if code is not None:
            # As the real call on a full disk: it fails and leaves a file of all that was left.
            os.posix_fallocate(fd, 0, max(1, nbytes // 3))
            raise OSError(errno.ENOSPC if code == "short" else code, "injected")
        super().allocate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._check("truncate")
        super().truncate(fd, nbytes)

    def rename(self, source: str, target: str) -> None:
        self._check("rename")
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._check("unlink")
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self._check("mkdir")
        super().mkdir(path)

    def names(self, path: str) -> list[str]:
        self._check("names")
        return super().names(path)

    def size(self, path: str) -> int:
        self._check("size")
        return super().size(path)

    def kind(self, path: str) -> str:
        self._check("kind")
        return super().kind(path)

    def sync_directory(self, path: str) -> None:
        self._check("sync_directory")
        super().sync_directory(path)

    def lock(self, fd: int) -> bool:
        self._check("lock")
        return super().lock(fd)


class PowerCutFS(FaultFS):
    """Remembers what the disk under it would still hold after a power cut.

    Every write first saves what it overwrites. `cut(target)` copies the store's directory as it would be found after
    the power came back: of every write that was not synced a random part of its sectors is undone.
    """

    def __init__(self, rng: random.Random, sector: int = 512) -> None:
        super().__init__()
        self._rng = rng
        self._sector = sector
        self._unsynced: dict[str, list[tuple[int, bytes]]] = {}

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        with self._lock:
            self._unsynced.setdefault(path, []).append((offset, _peek(path, sum(map(len, buffers)), offset)))
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        with self._lock:
            pending = len(self._unsynced.get(path, ()))
        super().fdatasync(fd)
        with self._lock:
            del self._unsynced.get(path, [])[:pending]

    def unlink(self, path: str) -> None:
        super().unlink(path)
        with self._lock:
            self._unsynced.pop(path, None)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        with self._lock:
            self._unsynced[target] = self._unsynced.pop(source, [])

    def cut(self, source: str, target: str) -> int:
        """Returns how many sectors were lost. No call of the store may be under way."""
        shutil.copytree(source, target)
        lost = 0
        with self._lock:
            for path, writes in self._unsynced.items():
                copy = os.path.join(target, os.path.relpath(path, source))
                if not os.path.exists(copy):
                    continue
                with open(copy, "r+b") as file:
                    for offset, before in reversed(writes):
                        for begin in range(0, len(before), self._sector):
                            if self._rng.random() < 0.5:
                                file.seek(offset + begin)
                                file.write(before[begin : begin + self._sector])
                                lost += 1
        return lost


def _inode(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _peek(path: str, nbytes: int, offset: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, nbytes, offset)
    finally:
        os.close(fd)


def _buffered(fd: int) -> int:
    """The descriptor, with direct I/O off for good: half a write need not be aligned."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_DIRECT:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return fd
