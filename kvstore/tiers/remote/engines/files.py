"""The files of a folder of values. Calls take as long as the file system does, and raise `OSError`."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from kvstore.errors import ConfigError
from kvstore.tiers.disk.fs import FileSystem, close_quietly, read_all, write_all
from kvstore.tiers.remote.keys import is_key
from kvstore.tiers.remote.values import too_large

_log = logging.getLogger("kvstore.remote_folder_made")
_MARK = "~"  # begins the names of what is no part of a key
_NEW = "~new"
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


class ValueFiles:
    """Values as files: the key kvs1/ab/cdef is the file kvs1/ab/~cd/cdef. Thread-safe.

    Args:
        path: the folder; `prepare` makes it.
        fs: file calls.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = ValueFiles(folder)
        ...     files.prepare()
        ...     files.write("kvs1/a", [memoryview(b"value")], threading.Event()), files.read("kvs1/a", limit=9)
        (True, bytearray(b'value'))
    """

    def __init__(self, path: str, fs: FileSystem | None = None) -> None:
        self.path = os.path.abspath(path)
        self.has_links = False
        self._is_prepared = False
        self._fs = fs or FileSystem()
        self._numbers = itertools.count()

    def check(self) -> None:
        """Change nothing. Raises `ConfigError` if there is no such folder."""
        if not self._is_a_folder():
            raise ConfigError(f"{self.path}: there is no such folder; name one that is there, or mount it first")

    def prepare(self) -> None:
        """Make the folders, and find out whether files can have two names here."""
        was_there = self._is_a_folder()
        self._fs.mkdir(os.path.join(self.path, _NEW))
        if not was_there:
            _log.warning(
                "%s: there was no such folder, and it was made for the remote tier. If something should be mounted "
                "there, nothing is, and values fill the disk of this machine: mount it, and open the store again",
                self.path,
            )
        first, second = self._temporary(), self._temporary()
        close_quietly(self._fs, self._fs.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            self._fs.link(first, second)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            self.has_links = True
            self._fs.unlink(second)
        finally:
            self._fs.unlink(first)
        self._is_prepared = True

    def _is_a_folder(self) -> bool:
        try:
            self._fs.names(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _temporary(self) -> str:
        name = f"{os.uname().nodename}.{os.getpid()}.{id(self):x}.{next(self._numbers)}"
        return os.path.join(self.path, _NEW, name)

    def read(self, key: str, limit: int) -> bytearray | None:
        """Return a value, or None. In memory of its own: nobody may write into the caller's once it has given up."""
        return self._read(key, 0, limit, is_whole=True)

    def read_part(self, key: str, offset: int, count: int) -> bytearray | None:
        """Return so many bytes of a value from `offset` on, fewer where it ends before, or None; as `read` does."""
        return self._read(key, offset, count, is_whole=False)

    def _read(self, key: str, offset: int, limit: int, is_whole: bool) -> bytearray | None:
        try:
            path = self._file(key)
            size = max(0, self._fs.size(path) - offset)
            if is_whole and size > limit:
                raise too_large(size, limit)
            fd = self._fs.open(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            data = bytearray(min(size, limit))
            read_all(self._fs, fd, [memoryview(data)], offset)
            return data
        finally:
            close_quietly(self._fs, fd)

    def write(self, key: str, views: Sequence[memoryview], late: threading.Event, over: bool = False) -> bool:
        """Store a value, unless there is one, which `over` replaces, or `late` is set before all is written; return
        whether it did."""
        if not self._is_prepared:
            self.prepare()
        if not over and self.is_there(key):
            return False
        path, temporary = self._file(key), self._temporary()
        try:
            fd = self._fs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                write_all(self._fs, fd, views, 0)
            finally:
                close_quietly(self._fs, fd)
            if late.is_set():
                return False  # the caller may have changed the parts meanwhile
            self._fs.mkdir(os.path.dirname(path))
            if over or not self.has_links:
                self._fs.rename(temporary, path)
                return True
            self._fs.link(temporary, path)
        except FileExistsError:
            return False
        else:
            return True
        finally:
            with suppress(FileNotFoundError):
                self._fs.unlink(temporary)

    def is_there(self, key: str) -> bool:
        try:
            return self._fs.kind(self._file(key)) == "a file"
        except (FileNotFoundError, NotADirectoryError):
            return False

    def touch(self, key: str) -> bool:
        """Make a value as young as one that was written now; return whether there is one."""
        try:
            self._fs.touch(self._file(key))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def now(self) -> float:
        """Return the time of a file that is written now: by the clock that `age` goes by, which may be a server's."""
        if not self._is_prepared:
            self.prepare()
        path = self._temporary()
        close_quietly(self._fs, self._fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            return self._fs.modified(path)
        finally:
            self._fs.unlink(path)

    def age(self, key: str, now: float) -> float | None:
        """Return how many seconds before `now` a value was written or touched; None if there is none."""
        try:
            return max(0.0, now - self._fs.modified(self._file(key)))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def remove(self, key: str) -> bool:
        try:
            self._fs.unlink(self._file(key))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def look(self, folder: str) -> tuple[list[str], list[str]]:
        """(folders below, keys) of one folder; of keys kvs1/a/b that is kvs1/a."""
        below: list[str] = []
        keys: list[str] = []
        for name in self._names_in(os.path.join(self.path, folder)):
            if not name.startswith(_MARK):
                below.append(f"{folder}/{name}".lstrip("/"))
            elif name != _NEW:
                inner = os.path.join(self.path, folder, name)
                found = [(one, f"{folder}/{one}".lstrip("/")) for one in self._names_in(inner)]
                keys += [key for one, key in found if is_key(key) and self._file(key) == os.path.join(inner, one)]
        return below, keys

    def _file(self, key: str) -> str:
        head, _, name = key.rpartition("/")
        return os.path.join(self.path, head, _MARK + name[:2], name)

    def _names_in(self, path: str) -> list[str]:
        try:
            return self._fs.names(path)
        except (FileNotFoundError, NotADirectoryError):
            return []
