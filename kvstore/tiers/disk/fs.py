"""The one seam to the file system: every raw file call of the disk tier, so that tests can make each of them fail.

LMDB makes its own calls; see catalog.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence

O_DIRECT = getattr(os, "O_DIRECT", 0)
_MAX_BUFFERS = 512  # below IOV_MAX, which is 1024 on Linux


class FileSystem:
    """File calls as the system has them; errors are OSError. Stateless and thread-safe.

    Tests inherit from it to make calls fail.

    Example:
        >>> import tempfile
        >>> fs = FileSystem()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_file(fs, os.path.join(folder, "a"), b"text")
        ...     fs.names(folder), read_file(fs, os.path.join(folder, "a"), limit=100)
        (['a'], b'text')
    """

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def sync_directory(self, path: str) -> None:
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            close_quietly(self, fd)

    def lock(self, fd: int) -> bool:
        """Take the exclusive lock of an open file; return False if somebody holds it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Give the lock back, even if a forked child still has the file open."""
        fcntl.flock(fd, fcntl.LOCK_UN)


def write_all(fs: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers one after the other from `offset` on.

    Raises:
        OSError: also for a short write, which means a full or failing disk; its rest would not be aligned.
    """
    for begin in range(0, len(buffers), _MAX_BUFFERS):
        part = buffers[begin : begin + _MAX_BUFFERS]
        want = sum(len(b) for b in part)
        if fs.pwritev(fd, part, offset) != want:
            raise OSError(errno.EIO, f"short write: the disk did not take all of {want} bytes")
        offset += want


def read_all(fs: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill all buffers from `offset` on. Raises `OSError`, also if the file ends before."""
    for begin in range(0, len(buffers), _MAX_BUFFERS):
        part = buffers[begin : begin + _MAX_BUFFERS]
        want = sum(len(b) for b in part)
        if fs.preadv(fd, part, offset) != want:
            raise OSError(errno.EIO, f"short read: the file ends within the {want} bytes from {offset}")
        offset += want


def close_quietly(fs: FileSystem, fd: int) -> None:
    """Close a file, and ignore errors: what had to be durable was synced, and Linux frees the descriptor anyway."""
    with contextlib.suppress(OSError):
        fs.close(fd)


def read_file(fs: FileSystem, path: str, limit: int) -> bytes:
    """Return the contents of a small file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is larger than `limit` bytes.
    """
    size = fs.size(path)
    if size > limit:
        raise ValueError(f"{path}: expected at most {limit} bytes, found {size}")
    fd = fs.open(path, os.O_RDONLY)
    try:
        data = bytearray(size)
        read_all(fs, fd, [memoryview(data)], 0)
        return bytes(data)
    finally:
        close_quietly(fs, fd)


def write_file(fs: FileSystem, path: str, data: bytes) -> None:
    """Replace a small file, whole or not at all. Durable on return. Raises `OSError`."""
    temporary = path + ".new"
    fd = fs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(fs, fd, [memoryview(data)], 0)
        fs.fdatasync(fd)
    finally:
        close_quietly(fs, fd)
    fs.rename(temporary, path)
    fs.sync_directory(os.path.dirname(path))
