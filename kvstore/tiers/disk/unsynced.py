"""What a group has written to segment files, and is not synced yet."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvstore.tiers.disk.files import OpenFile
from kvstore.tiers.disk.fs import lacks_descriptors, write_all
from kvstore.tiers.disk.segment import Extent, runs_of
from kvstore.tiers.disk.segments import Segments

T = TypeVar("T")


class Unsynced:
    """Writes to segments that become durable together. For one thread at a time; each group has its own.

    Files that were written and not synced stay open: an error of the disk is told to who had the file open then. Where
    the process has no descriptor left they are synced early and closed, also those of `others` while these wait.

    Args:
        segments: where the records were placed.
        seal: is called with the number of a segment whose sync failed: the kernel may have dropped the dirty pages and
            marked them clean, so a second sync would prove nothing.
        others: groups that are not synced yet; of those that are still being written nothing is closed.

    Attributes:
        is_written: whether the last `write` has ended.

    Example:
        >>> import tempfile
        >>> from kvstore.tiers.buffers import BufferPool
        >>> from kvstore.tiers.disk.fs import FileSystem
        >>> folder = tempfile.TemporaryDirectory()
        >>> segments = Segments(FileSystem(), folder.name, 1 << 20, max_segments=4, store_id=bytes(16))
        >>> extent, group = segments.place(4096), Unsynced(segments, segments.seal)
        >>> group.write([extent], [BufferPool(keep_bytes=0).take(4096).view])
        >>> group.sync([extent.segment])
        >>> segments.close()
        >>> folder.cleanup()
    """

    def __init__(self, segments: Segments, seal: Callable[[int], None], others: Sequence[Unsynced] = ()) -> None:
        self._segments = segments
        self._seal = seal
        self._others = others
        self.is_written = False
        self._syncing = threading.Lock()  # the thread of another group may sync early what is written here
        self._open: dict[int, OpenFile] = {}
        self._synced: set[int] = set()  # written, and synced so that fewer files are open

    def write(self, extents: Sequence[Extent], buffers: Sequence[memoryview]) -> None:
        """Write buffers to their extents, neighbours with one call. Durable only after `sync`. Raises: OSError."""
        self.is_written = False
        try:
            for first, last in runs_of(extents):
                file = self._to_be_written(extents[first].segment)
                write_all(self._segments.fs, file.fd, buffers[first:last], extents[first].offset)
        except BaseException:
            self._end()  # the caller gives up all that it wrote since the last sync
            raise
        finally:
            self.is_written = True

    def sync(self, numbers: Iterable[int]) -> None:
        """Make segments durable. Raises: OSError, also for a segment that was sealed meanwhile."""
        with self._syncing:
            try:
                for number in numbers:
                    self._sync_now(number)
            finally:
                self._end()

    def _sync_now(self, number: int) -> None:
        if self._segments.by_number[number].sealed:  # since the records to be synced were placed there
            raise OSError(errno.EIO, f"segment {number} is sealed: an earlier sync of it failed")
        if number not in self._synced:
            self._sync(number, self._open.get(number) or self._segments.files.get(number))

    def with_descriptors(self, call: Callable[..., T], *arguments: Any) -> T:
        """As of `SegmentFiles`; if none is left, files that wait for their sync are synced and closed for it."""
        files = self._segments.files
        try:
            return files.with_descriptors(call, *arguments)
        except OSError as error:
            if not lacks_descriptors(error) or not (self._open or self._others):
                raise
        self._sync_early()
        for other in self._others:
            if other.is_written:
                other.give_way()
        return files.with_descriptors(call, *arguments)

    def give_way(self) -> None:
        """Sync and close the files now, whatever thread this is; `sync` raises then if that failed."""
        with self._syncing, contextlib.suppress(OSError):  # the segment is sealed
            self._sync_early()

    def _to_be_written(self, number: int) -> OpenFile:
        """The open file of a segment, which stays open until it is synced."""
        if number not in self._open:
            self._synced.discard(number)
            if 2 * len(self._open) >= self._segments.files.most:
                self._sync_early()
            self._open[number] = self.with_descriptors(self._segments.files.get, number)
        return self._open[number]

    def _sync_early(self) -> None:
        while self._open:
            number, file = self._open.popitem()
            self._sync(number, file)
            self._synced.add(number)

    def _sync(self, number: int, file: OpenFile) -> None:
        try:
            self._segments.fs.fdatasync(file.fd)
        except OSError:
            self._seal(number)
            raise

    def _end(self) -> None:
        self._open.clear()
        self._synced.clear()
        self._others = ()
