"""One writer per store: an advisory lock on a file that names its holder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import weakref

from kvstore.errors import StoreLocked
from kvstore.tiers.disk.fs import FileSystem, close_quietly, read_file, write_all

_NAME = "writer.lock"
_LIMIT = 4096


class WriterLock:
    """The lock that only one writer of a store can hold, from `take` to `release`.

    The system releases it when the process dies, whatever the file says. For one thread at a time.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = WriterLock(FileSystem(), folder)
        ...     lock.take()
        ...     print(lock.is_free())
        ...     lock.release()
        ...     print(lock.is_free())
        False
        True
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._path = os.path.join(directory, _NAME)
        self._fd: int | None = None
        _locks.add(self)

    def take(self) -> None:
        """Take the lock. Raises `StoreLocked`, naming the holder, if another process has it."""
        fd = self._fs.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._take(fd)
        except BaseException:
            close_quietly(self._fs, fd)
            raise
        self._fd = fd

    def _take(self, fd: int) -> None:
        # A read-only process probes the lock for an instant when it opens the store: try more than once.
        attempts = 5
        while not self._fs.lock(fd):
            attempts -= 1
            if attempts:
                time.sleep(0.02)
                continue
            raise StoreLocked(
                f"{os.path.dirname(self._path)} is open for writing in {self.holder()}",
                "close it there, share that KVStore object, open it with SharedKVStore in all processes, or with "
                "read_only=True in this one",
            )
        # Only for the message above: whether the lock is held is the system's to say, not the file's.
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        with contextlib.suppress(OSError):
            self._fs.truncate(fd, 0)
            write_all(self._fs, fd, [memoryview(text)], 0)

    def holder(self) -> str:
        """Return who holds the lock, as the file says."""
        try:
            found = json.loads(read_file(self._fs, self._path, _LIMIT))
            return f"process {int(found['pid'])} on {found['host']}"
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return "another process"

    def is_free(self) -> bool:
        """Return whether no process holds the lock at the moment."""
        try:
            fd = self._fs.open(self._path, os.O_RDONLY)
        except OSError:
            return True
        try:
            return self._fs.lock(fd)
        finally:
            close_quietly(self._fs, fd)

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._fs.unlock(fd)  # closing is not enough where a forked child has the file open too
            close_quietly(self._fs, fd)

    def leave_to_parent(self) -> None:
        """In a forked child: close the file without giving the lock back, so that it dies with its holder."""
        fd, self._fd = self._fd, None
        if fd is not None:
            close_quietly(self._fs, fd)


_locks: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_locks):
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
