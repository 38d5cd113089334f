"""Values as files below a folder that machines share, for example over a network."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kvstore.errors import RemoteError, RemoteFull, RemoteGarbled, RemoteRefused, RemoteUnavailable
from kvstore.tiers.disk.fs import FileSystem, NotAFile
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engine import RemoteLimits
from kvstore.tiers.remote.engines.counts import Counts
from kvstore.tiers.remote.engines.files import ValueFiles
from kvstore.tiers.remote.engines.threads import Threads
from kvstore.tiers.remote.engines.writing import counted_put
from kvstore.tiers.remote.keys import check_keys, check_prefix
from kvstore.tiers.remote.values import scatter

T = TypeVar("T")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class FolderEngine:
    """A `RemoteEngine` in a folder: `folder:///path`.

    A value is written under a temporary name and then linked to its own, so readers see all of it or nothing, and of
    two writers one wins. Nothing is locked, and nothing is synced: after a power cut a value may be short or gone.
    Calls to the file system run in threads, since a file server that hangs cannot be interrupted; 16 of them can hang
    before all calls are late. Nothing expires; `touch` sets a file's time, and `ages` goes by that.

    Args:
        path: made if it is missing, at opening or, if that fails, with the next write; this is logged as a warning.
        make: False to refuse a path that is missing, and to write nothing at opening.
        max_value_bytes, parcel_bytes: see `RemoteLimits`.
        timeout_s: for opening.
        fs: file calls.

    Raises:
        ConfigError: without `make`, there is no such folder.
        RemoteError: without `make`, it could not be looked at.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     engine = FolderEngine(folder)
        ...     engine.put("kvs1/a", [b"value"], timeout_s=60), list(engine.list("kvs1/", timeout_s=60))
        (True, ['kvs1/a'])
    """

    def __init__(
        self,
        path: str,
        *,
        max_value_bytes: int = 1 << 30,
        timeout_s: float = 5.0,
        fs: FileSystem | None = None,
        parcel_bytes: int = 0,
        make: bool = True,
    ) -> None:
        self._files = ValueFiles(path, fs)
        self._name = f"folder:{self._files.path}"
        self._counts = Counts()
        self._threads = Threads(self._name, most=16)
        self._max_value_bytes = max_value_bytes
        self._parcel_bytes = parcel_bytes
        if not make:
            self._run(self._files.check, Deadline(timeout_s))
            return
        try:
            self._run(self._files.prepare, Deadline(timeout_s))
        except RemoteError:
            self._counts.add(probes_failed=1)

    @property
    def limits(self) -> RemoteLimits:
        return RemoteLimits(
            self._max_value_bytes,
            has_put_if_absent=self._files.has_links,
            has_ages=True,
            keeps_use=True,
            parcel_bytes=self._parcel_bytes,
        )

    def endpoint(self, key: str) -> str:
        return self._name

    def get_into(self, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        check_keys(key)
        with self._counts.call():
            value = self._run(lambda: self._files.read(key, buffer.nbytes), Deadline(timeout_s))
            if value is not None:
                buffer.cast("B")[: len(value)] = value
                self._counts.add(bytes_read=len(value))
            return None if value is None else len(value)

    def get_parts_into(self, key: str, offset: int, buffers: Sequence[memoryview], timeout_s: float) -> int | None:
        check_keys(key)
        with self._counts.call():
            count = sum(buffer.nbytes for buffer in buffers)
            value = self._run(lambda: self._files.read_part(key, offset, count), Deadline(timeout_s))
            if value is None:
                return None
            self._counts.add(bytes_read=len(value))
            return scatter(value, buffers)

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        timeout_s: float,
        ttl_s: float | None = None,
        over: bool = False,
    ) -> bool:
        def write(views: list[memoryview], deadline: Deadline) -> bool:
            late = threading.Event()
            try:
                return self._run(lambda: self._files.write(key, views, late, over), deadline)
            finally:
                late.set()

        return counted_put(self._counts, key, parts, self._max_value_bytes, timeout_s, write)

    def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        check_keys(*keys)
        with self._counts.call():
            deadline = Deadline(timeout_s)
            return self._run(lambda: [self._files.is_there(key) for key in keys if deadline.left_s()], deadline)

    def touch(self, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None:
        check_keys(*keys)
        with self._counts.call():
            deadline = Deadline(timeout_s)
            self._run(lambda: sum(self._files.touch(key) for key in keys if deadline.left_s()), deadline)

    def ages(self, keys: Sequence[str], timeout_s: float) -> list[float | None]:
        check_keys(*keys)
        with self._counts.call():
            deadline = Deadline(timeout_s)
            return list(self._run(lambda: self._ages(keys, deadline), deadline))

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        check_keys(*keys)
        with self._counts.call():
            deadline = Deadline(timeout_s)
            return self._run(lambda: sum(self._files.remove(key) for key in keys if deadline.left_s()), deadline)

    def list(self, prefix: str, timeout_s: float) -> Iterator[str]:
        check_prefix(prefix)
        inner, _, _ = prefix.rpartition("/")
        left = [inner]
        while left:
            folder = left.pop()
            with self._counts.call():
                deeper, keys = self._run(partial(self._files.look, folder), Deadline(timeout_s))
            left += deeper
            yield from (key for key in keys if key.startswith(prefix))

    def stats(self) -> Mapping[str, float]:
        return self._counts.values()

    def close(self) -> None:
        self._threads.close()

    def _ages(self, keys: Sequence[str], deadline: Deadline) -> Sequence[float | None]:
        now = self._files.now()
        return [self._files.age(key, now) for key in keys if deadline.left_s()]

    def _run(self, work: Callable[[], T], deadline: Deadline) -> T:
        try:
            return self._threads.run(work, deadline)
        except OSError as error:
            raise _typed(error, self._name) from error


def _typed(error: OSError, name: str) -> RemoteError:
    kind: type[RemoteError] = RemoteUnavailable
    if error.errno in _FULL:
        kind = RemoteFull
    elif error.errno in _REFUSED:
        kind = RemoteRefused
    elif isinstance(error, NotAFile):
        kind = RemoteGarbled
    return kind(f"{name}: {error}")
