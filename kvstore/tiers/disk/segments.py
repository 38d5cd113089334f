"""Segment files: preallocated, filled from front to back, and recycled when nothing in them lives any more.

Steady-state writes therefore hit extents that were written before, which is what makes one fdatasync cheap. What is
live in a segment is not written in it: the catalog says so. Large records also go between those that still live in a
segment, as in threaded logging (F2FS, FAST 2015): then nothing has to be moved.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection, Iterable, Sequence

from kvstore.config import PAGE_BYTES
from kvstore.tiers.disk.emptier import Emptier
from kvstore.tiers.disk.files import SegmentFiles, segment_path
from kvstore.tiers.disk.fs import FileSystem, NotAFile, close_quietly, read_all, write_all
from kvstore.tiers.disk.segment import Extent, Hold, Segment, Space, taken
from kvstore.tiers.disk.segment_file import is_segment_file, segment_header, segment_numbers

_MAX_NUMBER = 1 << 31  # a file with a larger one is not ours: we count from 1


class OutOfSpace(Exception):
    """No segment has room, and no further one can be made. The disk tier reclaims space, or drops the record."""


class Segments:
    """All segment files of a store. Not thread-safe: the disk tier guards it.

    The writer fills one segment at a time. One empty segment stays in reserve, so that live records can always be
    moved out of a segment that is to be recycled.

    Args:
        fs: the file system.
        directory: of the files; it must exist.
        segment_bytes: size of every file.
        max_segments: the most files, the one in reserve included.
        store_id: 16 bytes, written into every file.
        open_files: how many of the files stay open.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> segments = Segments(FileSystem(), folder.name, 1 << 20, max_segments=4, store_id=bytes(16))
        >>> extent = segments.place(4096)
        >>> segments.born(extent)
        >>> segments.settle(extent)
        >>> segments.live_bytes
        4096
        >>> segments.close()
        >>> folder.cleanup()
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        segment_bytes: int,
        max_segments: int,
        store_id: bytes,
        open_files: int = 256,
    ) -> None:
        self.fs = fs
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.max_segments = max_segments
        self.store_id = store_id
        self.files = SegmentFiles(fs, directory, open_files)
        self.by_number: dict[int, Segment] = {}
        self.free: dict[int, Segment] = {}  # empty ones by number, in the order in which they are used next
        self.lingering: set[int] = set()  # empty segments that were read when they became empty
        self.leftover: set[int] = set()  # segments that are used no more, whose files could not be removed yet
        self.current: Segment | None = None
        self._live = 0  # bytes of all segments
        self._emptier = Emptier(self.by_number)
        self._spaces: list[Space] = []  # where records go in the current segment
        self.refills: dict[int, list[Space]] = {}  # the same of segments that come next, in this order
        self.next_number = 1

    # ---- opening -------------------------------------------------------------------------------------------------

    def open_existing(self, used: dict[int, tuple[int, int]], writable: bool) -> list[int]:
        """Takes in the files of the directory. used: per segment (end of its last live record, live bytes).

        Files that the catalog does not mention are free space. Returns the segments that are missing, cut short of
        their last record, or no files. Raises OSError if the process has not what it takes to look, such as
        descriptors.
        """
        self.files.writable = writable
        damaged = []
        present = set(segment_numbers(self.fs, self.directory))
        for number in sorted(present | set(used)):
            end, live = used.get(number, (PAGE_BYTES, 0))
            if number < _MAX_NUMBER:
                self.next_number = max(self.next_number, number + 1)
            try:
                segment = self._take_in(number, end, live, writable)
            except (NotAFile, FileNotFoundError):
                damaged.append(number)
                continue
            if segment is None:
                continue
            if segment.sealed:
                damaged.append(number)
            self.by_number[number] = segment
            if live == 0 and not segment.sealed:
                self.free[segment.number] = segment
        self._live = sum(s.live for s in self.by_number.values())
        self._emptier = Emptier(self.by_number)
        # Go on where the emptiest one stopped, so that reopening often does not waste what is left of each.
        started = [s for s in self.by_number.values() if s.live > 0 and not s.sealed]
        self._fill(min(started, key=lambda s: s.end, default=None))
        for number in list(self.by_number)[:1]:
            with contextlib.suppress(OSError):
                self.files.get(number)  # finds out whether this file system has direct I/O
        return damaged

    def _take_in(self, number: int, end: int, live: int, writable: bool) -> Segment | None:
        """A segment whose file is there; None if it is nothing of this store's, or must be left alone."""
        size = self.fs.size(segment_path(self.directory, number))
        if live > 0:
            # Cut short: what can still be read is read, nothing is written to it again.
            return Segment(number, end, live, sealed=size < self.segment_bytes)
        try:
            ours = self._is_ours(number)
        except PermissionError:
            return None  # somebody took our rights to it: it is neither used nor removed
        if ours:
            return Segment(number, end)
        if writable:  # never finished, or somebody else's
            with contextlib.suppress(OSError):
                self.fs.unlink(segment_path(self.directory, number))
        return None

    def is_ours(self, number: int) -> bool:
        """Whether a file is a whole segment of this store, as far as can be said now."""
        try:
            return self._is_ours(number)
        except OSError:
            return False

    def _is_ours(self, number: int) -> bool:
        path = segment_path(self.directory, number)
        return is_segment_file(self.fs, path, number, self.segment_bytes, self.store_id)

    def add_for_reading(self, number: int) -> bool:
        """Takes in a segment that a writer process made since; False where the file is not there."""
        try:
            self.fs.size(segment_path(self.directory, number))
        except OSError:
            return False
        self.by_number[number] = Segment(number)
        return True

    def close(self) -> None:
        self.files.close()
        self.by_number.clear()
        self.lingering.clear()
        self.free.clear()
        self.refills.clear()
        self._live = 0
        self._fill(None)

    # ---- writing -------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Segments that are not empty."""
        return len(self.by_number) - len(self.free)

    def available(self) -> int:
        """Empty segments there are or may be made."""
        self._recycle_lingering()
        return max(0, self.max_segments - self.used)

    def shed(self) -> None:
        """Removes empty segments that there is no room for any more: the catalog grew, or the budget is smaller now."""
        for number in list(self.leftover):
            self._unlink(number)
        while self.free and len(self.by_number) > self.max_segments:
            self._delete(self.free.popitem()[1])

    def has_room(self, sizes: Iterable[int]) -> bool:
        """Whether `place` succeeds for records of these sizes, in this order, without anything being evicted and
        without touching the reserve."""
        spaces, fresh, refills = list(self._spaces), self.available() - 1, list(reversed(self.refills.values()))
        for nbytes in sizes:
            while taken(spaces, nbytes) is None:
                if fresh > 0:
                    fresh -= 1
                    spaces = [(PAGE_BYTES, self.segment_bytes)]
                    if nbytes > self.segment_bytes - PAGE_BYTES:
                        return False
                elif refills:
                    spaces = list(refills.pop())
                else:
                    return False
        return True

    @property
    def room(self) -> int:
        """Bytes that can be written before another segment has to be free or made."""
        return sum(end - begin for spaces in (self._spaces, *self.refills.values()) for begin, end in spaces)

    def place(self, nbytes: int, reserve: bool = False) -> Extent:
        """Takes whole pages of the current segment, or of the next one, and holds the segment: the caller settles it
        when the record is committed or given up. reserve: may use the last empty segment.

        Raises `OutOfSpace` where there is no segment, `OSError` where the disk is full.
        """
        while (extent := self.place_here(nbytes)) is None:
            if self.available() > (0 if reserve else 1):
                if nbytes > self.segment_bytes - PAGE_BYTES:
                    raise OutOfSpace
                self._next()
            elif self.refills:
                self._next_refill()
            else:
                raise OutOfSpace
        return extent

    def place_here(self, nbytes: int) -> Extent | None:
        """As `place`, but in the current segment; None if it has no room for so much."""
        begin = taken(self._spaces, nbytes)
        if begin is None:
            return None
        assert self.current is not None
        self.current.writes += 1
        return Extent(self.current.number, begin, nbytes)

    def settle(self, extent: Extent) -> None:
        """The record placed there was committed, or given up."""
        segment = self.by_number[extent.segment]
        segment.writes -= 1
        self._recycle(segment)

    def give_back_current(self) -> None:
        """The segment being filled is empty again, if nothing of what was written to it came to anything: a move that
        failed must not take the reserve."""
        segment = self.current
        if segment is not None and not segment.live and not segment.writes:
            self._fill(None)
            self._recycle(segment)

    def _fill(self, segment: Segment | None, spaces: list[Space] | None = None) -> None:
        """Records go to this segment from now on; spaces: between its records, None for behind them."""
        self.current = segment
        if segment is None:
            self._spaces = []
        else:
            self._spaces = [(segment.end, self.segment_bytes)] if spaces is None else spaces

    def seal(self, number: int) -> None:
        """A sync of the segment failed: nothing is written to it again."""
        segment = self.by_number[number]
        segment.sealed = True
        self.refills.pop(number, None)
        if self.current is segment:
            self._fill(None)

    def abandon(self, numbers: Iterable[int]) -> None:
        """The next record starts a new segment: one of these, or the current one, failed to take a write."""
        for number in numbers:
            self.by_number[number].worn = True
            self.refills.pop(number, None)
        self._fill(None)

    # ---- space ---------------------------------------------------------------------------------------------------

    def born(self, extent: Extent) -> None:
        """The catalog now knows the record there."""
        self.by_number[extent.segment].live += extent.nbytes
        self._live += extent.nbytes

    def died(self, extent: Extent) -> None:
        """The catalog no longer knows the record there. An empty segment is recycled."""
        segment = self.by_number.get(extent.segment)
        if segment is not None:
            segment.live -= extent.nbytes
            self._live -= extent.nbytes
            segment.deaths += 1
            self._emptier.died(segment)
            self._recycle(segment)

    def roomiest(self, least: int) -> Segment | None:
        """The segment with the most bytes of dead records, at least so many, that may be written between its live ones
        now; None if there is none."""

        def usable(segment: Segment) -> bool:
            filling = segment is self.current or segment.number in self.refills or segment.writes
            return not filling and segment.is_left

        return self._emptier.find(self.segment_bytes - PAGE_BYTES - least, usable)

    def refill(self, number: int, spaces: list[Space]) -> None:
        """Let records go to these spaces of a segment, which no live record takes and no read needs."""
        self.refills[number] = spaces

    def hold(self, number: int) -> Hold | None:
        """A reader is about to read the segment: it is not recycled as long as the result exists. None where there is
        no such segment."""
        segment = self.by_number.get(number)
        if segment is None:
            return None
        made = Hold(number, segment.deaths)
        # The callback is one call into C: it runs wherever the last reference goes, and needs no lock.
        segment.readers.add(weakref.ref(made, segment.readers.discard))
        return made

    def released(self, numbers: Iterable[int]) -> None:
        """Holds of these segments have gone. If nobody says so, it is noticed when space is needed."""
        for number in numbers:
            segment = self.by_number.get(number)
            if segment is not None:
                self._recycle(segment)

    def _recycle_lingering(self) -> None:
        for number in list(self.lingering):
            segment = self.by_number.get(number)
            if segment is None or not segment.readers:
                self.lingering.discard(number)
                self.released([number])

    def emptiest(self, most: int, last: Collection[int] = ()) -> Segment | None:
        """The segment that costs least to empty: fewest live bytes, and at most `most`; not the one being filled. Those
        of `last` only where there is no other."""
        found = [segment for segment in self.settled() if segment.live <= most]
        return min(found, key=lambda s: (s.number in last, s.live), default=None)

    def settled(self) -> list[Segment]:
        """Segments with live records and no writes under way."""
        return [s for s in self.by_number.values() if s is not self.current and s.live > 0 and not s.writes]

    @property
    def live_bytes(self) -> int:
        return self._live

    @property
    def file_bytes(self) -> int:
        return len(self.by_number) * self.segment_bytes

    def read(self, segment: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Reads neighbouring records with one call. Raises OSError. The caller holds the segment."""
        file = self.files.get(segment)
        read_all(self.fs, file.fd, buffers, offset)

    def _recycle(self, segment: Segment) -> None:
        if segment.live > 0 or segment.writes > 0 or segment is self.current or segment.number in self.free:
            return
        if segment.readers:
            self.lingering.add(segment.number)
            return
        segment.end = PAGE_BYTES
        self.refills.pop(segment.number, None)
        segment.worn = False
        if segment.sealed:
            self._delete(segment)
        else:
            self.free[segment.number] = segment

    def _delete(self, segment: Segment) -> None:
        del self.by_number[segment.number]
        self.refills.pop(segment.number, None)
        self.files.drop(segment.number)
        self._unlink(segment.number)

    def _unlink(self, number: int) -> None:
        """Removes the file; one that cannot be removed now is tried again, at last as free space at the next open."""
        self.leftover.add(number)
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                self.fs.unlink(segment_path(self.directory, number))
            self.leftover.discard(number)

    def _next(self) -> None:
        self._leave()
        self.shed()
        if not self.free:
            self.add(self.make())
        self._fill(self.free.pop(next(iter(self.free))))

    def _next_refill(self) -> None:
        self._leave()
        number = next(iter(self.refills))
        self._fill(self.by_number[number], self.refills.pop(number))

    def _leave(self) -> None:
        full = self.current
        self._fill(None)
        if full is not None:
            self._recycle(full)

    def lacks_file(self, nbytes: int, reserve: bool = False) -> bool:
        """Whether `place` would have to make a file. Whoever must not wait for the disk calls `make` and `add` then."""
        fits = taken(list(self._spaces), nbytes) is not None
        if fits or self.available() <= (0 if reserve else 1) or self.free:
            return False
        full = self.current
        return full is None or full.live > 0 or full.writes > 0 or bool(full.readers)

    def make(self) -> Segment:
        """Makes the file of one more segment, durably, and nothing else. Raises OSError."""
        number, path = self.next_number, segment_path(self.directory, self.next_number)
        fd = self.files.with_descriptors(self.fs.open, path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            # On a full disk the call fails but may leave a file of all that was left.
            self.fs.allocate(fd, self.segment_bytes)
            header = segment_header(number, self.segment_bytes, self.store_id)
            write_all(self.fs, fd, [memoryview(header)], 0)
            self.fs.fdatasync(fd)
            self.files.with_descriptors(self.fs.sync_directory, self.directory)
        except OSError:
            with contextlib.suppress(OSError):
                self.fs.unlink(path)
            raise
        finally:
            close_quietly(self.fs, fd)
        return Segment(number)

    def add(self, made: Segment) -> None:
        """Takes in what `make` returned, as free space."""
        self.next_number = made.number + 1
        self.by_number[made.number] = made
        self.free[made.number] = made
