"""The open segment files: as few as the process can afford, the least recently used is closed first."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.tiers.disk.fs import O_DIRECT, FileSystem, NotAFile, close_quietly, lacks_descriptors

T = TypeVar("T")

# A process needs descriptors for other things than its store, which may open more than one.
_SHARE_OF_LIMIT = 4
# How often a call that lacks a descriptor is made, and how much longer the pause before the next time is.
_ATTEMPTS = 8
_PAUSE_S = 0.001


class OpenFile:
    """An open file. It is closed when nobody has this object any more, so a file is never closed while it is read."""

    __slots__ = ("_fs", "fd")

    def __init__(self, fs: FileSystem, fd: int) -> None:
        self._fs = fs
        self.fd = fd

    def __del__(self) -> None:
        close_quietly(self._fs, self.fd)


class SegmentFiles:
    """The open files of the segments. Thread-safe: `_lock` guards `_open` and `direct`; it is a leaf. `_closing` is
    held while files are closed, and comes first.

    Args:
        fs: the file system.
        directory: of the files.
        most: how many stay open; while more are in use at once, more are open.

    Attributes:
        most: see above.
        writable: whether they are opened for writing, too; constant once the first is open.
        direct: whether they are opened past the page cache (O_DIRECT); False once the file system refused that.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for number in (1, 2, 3):
        ...         open(segment_path(folder, number), "xb").close()
        ...     files = SegmentFiles(FileSystem(), folder, most=2)
        ...     used = [files.get(number).fd > 0 for number in (1, 2, 3)]
        ...     print(used, len(files))
        ...     files.close()
        [True, True, True] 2
    """

    def __init__(self, fs: FileSystem, directory: str, most: int) -> None:
        self.direct = bool(O_DIRECT)
        self.writable = True
        self._fs = fs
        self._directory = directory
        self.most = most
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._closing = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, number: int) -> OpenFile:
        """Return the open file of a segment; whoever reads or writes it keeps this object meanwhile.

        Raises:
            OSError: it cannot be opened, also not after all files that nobody uses were closed.
        """
        with self._lock:
            known = self._open.get(number)
            if known is not None:
                self._open.move_to_end(number)
                return known
        made = self._opened(number)
        idle = []  # closed behind the lock
        with self._lock:
            file = self._open.setdefault(number, made)  # another thread may have been faster
            while len(self._open) > self.most:
                idle.append(self._open.popitem(last=False))
        return file

    def drop(self, number: int) -> None:
        """Close the file of a segment that is about to be removed."""
        with self._lock:
            gone = self._open.pop(number, None)
        del gone

    def close(self) -> None:
        """Close all files; those in use when their users are done. Idempotent.

        On return also those are closed that another thread began to close.
        """
        with self._closing:
            with self._lock:
                gone, self._open = self._open, OrderedDict()
            gone.clear()

    def open(self, path: str, flags: int) -> int:
        """Open any file and return its descriptor. If there is none left, those of files that nobody uses are taken.

        Raises:
            OSError: it cannot be opened.
        """
        return self.with_descriptors(self._fs.open, path, flags)

    def with_descriptors(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call that opens a file. If no descriptor is left, those of files that nobody uses are taken.

        Raises:
            OSError: what the call raises.
        """
        for attempt in range(1, _ATTEMPTS):
            try:
                return call(*arguments)
            except OSError as error:
                if not lacks_descriptors(error):
                    raise
            self.close()
            if attempt > 1:  # another thread took what was given back: for a moment, or it keeps it open from now on
                time.sleep(attempt * _PAUSE_S)
        return call(*arguments)

    def _opened(self, number: int) -> OpenFile:
        path, flags = segment_path(self._directory, number), os.O_RDWR if self.writable else os.O_RDONLY
        if self.direct:
            try:
                return OpenFile(self._fs, self.open(path, flags | O_DIRECT))
            except NotAFile:
                raise
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False  # visible in stats(): this file system has no direct I/O
        return OpenFile(self._fs, self.open(path, flags))


def most_open(setting: int) -> int:
    """Return how many segment files may stay open: `setting`, or a quarter of the process's limit if that is less."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return setting if limit == resource.RLIM_INFINITY else max(1, min(setting, limit // _SHARE_OF_LIMIT))


def segment_path(directory: str, number: int) -> str:
    """Where the file of a segment is."""
    return os.path.join(directory, f"{number:08x}.seg")
