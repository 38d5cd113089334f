"""The space of the disk tier: what lives where, what is evicted or moved when it runs out, and what is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from kvstore.config import PAGE_BYTES, StoreConfig
from kvstore.core.guard import DISK, DISK_WRITE, Guard
from kvstore.core.session_record import SessionChange
from kvstore.errors import KVStoreError
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk.budget import DiskBudget
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.holes import HoleKeeper
from kvstore.tiers.disk.open import Opening
from kvstore.tiers.disk.reclaim import FULL, LARGE_RECORD, Reclaim, live_limit, spaces_between
from kvstore.tiers.disk.segment import Extent
from kvstore.tiers.disk.segments import OutOfSpace, Segments
from kvstore.tiers.disk.unsynced import Unsynced
from kvstore.tiers.disk.usage import Usage

T = TypeVar("T")

# At most so many segments are emptied before they are needed.
_MOST_AHEAD = 2
# With less free the catalog may not find the pages for a commit.
_LEAST_FREE = 1 << 20
# What could not be removed from the catalog is tried again after so long, if nothing else is written.
_ORPHANS_S = 5.0
# A segment that could not be read is tried again after so many others were emptied, or when there is no other.
_MOVES_UNTIL_RETRY = 16


class DiskSpace:
    """What `DiskTier` stands on: the books of the space, and what happens when it runs out.

    Two locks: who writes, removes or moves records holds `_write_lock` all the while. `_lock` guards the books for a
    moment each, and is never held during a write, a sync or a commit. If both are taken, `_write_lock` comes first.
    For the arguments see `DiskTier`.
    """

    segments: Segments  # its lists and counts are guarded by _lock; its files are written under _write_lock
    catalog: Catalog  # replaced under _lock; written under _write_lock; reads need no lock
    namespaces: dict[bytes, int]  # numbers by digest; changed under _write_lock
    _usage: Usage  # guarded by _lock
    _records: int  # guarded by _lock
    _tokens: int  # guarded by _lock
    _holes: int  # guarded by _lock
    _hole_bytes: int  # guarded by _lock
    _is_full = False  # whether the group found the file system full; by _write_lock
    _last_record: int  # no record that was seen in the catalog has a larger number; a writer: under _write_lock

    def __init__(
        self,
        fs: FileSystem,
        config: StoreConfig,
        metrics: Metrics,
        pool: BufferPool,
        opening: Opening,
        evict: Callable[[], Sequence[int]],
        leaves: Callable[[Sequence[Entry]], None],
        holes: HoleKeeper,
        largest: int,
    ) -> None:
        self.metrics = metrics
        self._fs = fs
        self._config = config
        self._pool = pool
        self._opening = opening
        self._budget = DiskBudget(fs, opening.path, opening.catalog_file, config)
        self._evict = evict
        self._leaves = leaves
        self._hole_keeper = holes
        self._largest = largest
        self._lock = Guard(DISK)
        self._write_lock = Guard(DISK_WRITE)
        self._coming = 0  # new records of the group that is written; by _write_lock
        self._begun: dict[Unsynced, int] = {}  # groups that are being written, and their bytes; by _write_lock
        # Records that the index forgot and the catalog could not, and when to try that again; by _write_lock.
        self._orphans: list[int] = []
        self._orphans_at = 0.0
        self._moves = 0  # segments that were emptied; by _write_lock
        self._outlasted: set[int] = set()  # segments whose readers outlasted a group that waited; by _write_lock
        self._retry_at: dict[int, int] = {}  # segments that could not be read, and until which move; by _write_lock

    def _settle(self, born: Iterable[Entry], died: Iterable[Entry]) -> None:
        with self._lock:
            for entry in born:
                self._count(entry, 1)
                if not entry.is_hole:
                    self.segments.born(entry.extent)
            for entry in died:
                self._count(entry, -1)
                if not entry.is_hole:
                    self.segments.died(entry.extent)

    def _count(self, entry: Entry, sign: int) -> None:
        if entry.is_hole:
            self._holes += sign
            self._hole_bytes += sign * entry.packed_bytes
        else:
            self._records += sign
            self._tokens += sign * len(entry.tokens)
            self._usage.count(entry, sign)

    def _change(
        self,
        added: Sequence[Entry],
        removed: Sequence[Entry],
        sessions: Sequence[SessionChange] = (),
        session_budget: int | None = None,
    ) -> tuple[int, int]:
        """Commits what comes and what goes; of what leaves a hole the entry of that stays, and holes that are none any
        more go, too. An entry that comes takes the place of the one of the same number. Returns what `Catalog.commit`
        does. Raises `CatalogError`; nothing is changed then."""
        keeper = self._hole_keeper
        released = keeper.take_released()
        leaving = {e.record: e for e in self._entries(released) if e is not None and e.is_hole}
        leaving |= {entry.record: entry for entry in removed}
        holes = keeper.kept(list(leaving.values()), {entry.record for entry in added}, self.namespaces)
        added = [*added, *holes]
        known = [entry.record for entry in added if entry.record <= self._last_record]
        before = {e.record: e for e in self._entries(known) if e is not None}
        gone = [entry for record, entry in leaving.items() if record not in before]
        if not (added or gone or sessions):
            return 0, 0
        try:
            sessions_gone = self.catalog.commit(added, gone, sessions, session_budget)
        except CatalogError:
            keeper.give_back(released)
            raise
        self._last_record = max([self._last_record, *(entry.record for entry in added)])
        self._settle(added, [*gone, *before.values()])
        keeper.written(holes)
        return sessions_gone

    def _known(self, records: Sequence[int]) -> list[Entry | None]:
        """The entries of records; None for what is gone, and for holes."""
        return [None if e is None or e.is_hole else e for e in self._entries(records)]

    def _entries(self, records: Sequence[int]) -> list[Entry | None]:
        """The entries of records and of holes."""
        try:
            return self.catalog.get(records)
        except CatalogError as error:
            self.metrics.add(Metric.CATALOG_ERRORS, because=error)
            return [None] * len(records)

    def _remove(self, leaving: Sequence[Entry]) -> None:
        """What the index forgot goes from the catalog: this, and what could not before. Raises `CatalogError`; it is to
        be tried again then."""
        before, self._orphans = self._orphans, [*self._orphans, *(entry.record for entry in leaving)]
        try:
            found = self.catalog.get(before) if before else ()
            self._change((), [*leaving, *(entry for entry in found if entry is not None)])
        except CatalogError:
            self._orphans_at = time.monotonic() + _ORPHANS_S
            self._reopen_catalog()
            raise
        self._orphans = []

    def _remove_orphans(self) -> None:
        """What the index forgot and the catalog could not goes. Raises `CatalogError`, which is counted."""
        if not self._orphans:
            return
        try:
            self._remove(())
        except CatalogError as error:
            self.metrics.add(Metric.CATALOG_ERRORS, because=error)
            raise

    def _is_full_to_the_end(self) -> bool:
        """Whether the file system is so full that the catalog may not be able to grow. Nothing is evicted then, for
        what left the index could not leave the catalog."""
        try:
            return self._is_full and self._fs.free(self._opening.path) < _LEAST_FREE
        except OSError:
            return False

    def _reopen_catalog(self) -> None:
        """After a failed write of its own LMDB may refuse everything until it is opened anew."""
        with self._lock:
            self.catalog.close()
            try:
                self.catalog = self._opening.new_catalog()
                self.metrics.add(Metric.CATALOG_REOPENED)
            except (KVStoreError, OSError) as error:  # also that its folder is gone
                self.metrics.add(Metric.CATALOG_LOST, because=error)

    def _settle_writes(self, extents: Iterable[Extent]) -> None:
        with self._lock:
            for extent in extents:
                self.segments.settle(extent)

    def _shed(self) -> None:
        """What became empty, and the budget has no room for, goes at once."""
        with self._lock:
            self.segments.shed()

    @property
    def capacity(self) -> int:
        """The most bytes of live records that the budget leaves room for, as was measured last."""
        return live_limit(self.segments.max_segments, self._config.segment_bytes)

    @property
    def usual_capacity(self) -> int:
        """The same while the catalog is small; does not change while the store is open."""
        return live_limit(self._budget.usual_segments, self._config.segment_bytes)

    def keep_budget(self, beside: int = 0) -> bool:
        """Bring the files within the budget, which may be smaller than when they were written; evicts for that.

        Args:
            beside: bytes that are about to be written beside the segments. Until they are, the caller keeps others from
                writing (`paused`).

        Returns:
            Whether they are within the budget now.
        """
        with self._write_lock:
            self._set_most(self._most_segments(beside=beside))
            fits = self._budget.fits
            while not self._measured(True, fits, len(self.segments.by_number), beside) and self._give_up_one():
                pass
            return self._measured(False, fits, len(self.segments.by_number), beside)

    def compact(self, move: bool) -> int:
        """Delete the files of empty segments; with `move`, first move what lies in partly empty ones together. Nothing
        is evicted. Durable on return; returns the bytes of the files that are gone."""
        with self._write_lock:
            with self._lock:
                self.segments.available()  # what was read when it became empty may be free by now
                before, full = self.segments.file_bytes, self._config.segment_bytes - PAGE_BYTES
                needed, tries = -(-self.segments.live_bytes // full), len(self.segments.by_number)
            for _ in range(tries if move else 0):
                if self.segments.used <= max(1, needed):
                    break
                try:
                    self._empty_a_segment()
                except OutOfSpace:
                    break
                except OSError as error:
                    self.metrics.add(Metric.DISK_WRITE_ERRORS, because=error)
                    break
            with self._lock:
                most, self.segments.max_segments = self.segments.max_segments, self.segments.used
                self.segments.shed()
                self.segments.max_segments = most
                return before - self.segments.file_bytes

    def _most_segments(self, records: int = 0, beside: int = 0) -> int:
        """How many segments there may be when so many new records are to be written; as many as now if this process has
        no descriptor left to measure it."""
        return self._measured(self.segments.max_segments, self._budget.most_segments, records, beside)

    def _measured(self, otherwise: T, measure: Callable[..., T], *arguments: int) -> T:
        try:
            return self.segments.files.with_descriptors(measure, *arguments)
        except OSError as error:
            self.metrics.add(Metric.DISK_READ_ERRORS, because=error)
            return otherwise

    def _set_most(self, segments: int) -> None:
        """There may be so many segments from now on; empty ones that are too many go."""
        with self._lock:
            self.segments.max_segments = segments
            self.segments.shed()

    def _make_room(self, records: int) -> None:
        """Holds the budget when so many new records are to be written: evicts if the catalog grew into the space of the
        reserve."""
        self._coming = records
        self._set_most(self._most_segments(records))
        while self.segments.available() < 1 and self._give_up_one():
            pass

    def _give_up_one(self) -> bool:
        """Evicts until one segment less is in use, and removes it if it is one too many; False where that fails."""
        before = self.segments.used
        try:
            self._reclaim()
        except (OutOfSpace, CatalogError):
            pass
        except OSError as error:
            self.metrics.add(Metric.DISK_WRITE_ERRORS, because=error)
        with self._lock:
            self.segments.shed()
            return self.segments.used < before

    def _catalog_bytes(self) -> int:
        try:
            return self._fs.size(self._opening.catalog_file)
        except OSError:
            return 0

    def _reclaim(self) -> None:
        """Makes a free segment: evicts what the index gives up, then moves what still lives in the emptiest
        segment into the reserve. Raises `OutOfSpace` where that did not help."""
        self.metrics.add(Metric.DISK_RECLAIMS)
        self._commit_moves((), self._victims(1))
        with self._lock:
            short = self.segments.available() <= 1
        if short:
            self._empty_a_segment()
        # These commits made the catalog grow, too.
        self._set_most(min(self.segments.max_segments, self._most_segments(self._coming)))

    def _evict_ahead(self, nbytes: int) -> list[Entry]:
        """What has to go so that the next group, of about `nbytes`, finds room: its removal is part of this group's
        commit, and the next one need not wait for a commit of its own."""
        if self._orphans or self._is_full_to_the_end():
            return []
        with self._lock:
            segments, size = self.segments, self._config.segment_bytes
            room = segments.room + (segments.available() - 1) * size
            if nbytes and self._are_large():  # what was written is not counted as live yet
                coming = nbytes + sum(self._begun.values())
                return self._victims(1, coming) if self._is_over(coming) else []
        if not nbytes or nbytes <= room:
            return []
        return self._victims(min(_MOST_AHEAD, -(-(nbytes - room) // size)))

    def _are_large(self) -> bool:
        """Whether the records are large enough to be written between others."""
        return self.segments.live_bytes >= LARGE_RECORD * max(1, self._records)

    def _is_over(self, coming: int) -> bool:
        """Whether more would live than may, if so many bytes came."""
        return self.segments.live_bytes + coming > self.capacity

    def _find_room(self, sizes: Sequence[int]) -> None:
        """Evicts, or makes a free segment, so that records find room: one step of several. Raises as `_reclaim`."""
        if self._is_full_to_the_end():
            raise OutOfSpace
        coming = sum(sizes)
        with self._lock:
            evicts = self._are_large() and self._is_over(coming)
        gone = self._victims(1, coming) if evicts else []
        if not gone:
            self._reclaim()
            return
        self.metrics.add(Metric.DISK_RECLAIMS)
        self._commit_moves((), gone)
        self._set_most(min(self.segments.max_segments, self._most_segments(self._coming)))

    def _refill(self, largest: int) -> bool:
        """Lets records of up to `largest` bytes go between those that live in one more segment; False if there is no
        space that is worth it. Raises `CatalogError`."""
        while True:
            with self._lock:
                segment = self.segments.roomiest(largest) if self._are_large() else None
            if segment is None:
                return False
            entries = self.catalog.in_segment(segment.number)  # nothing changes that but who holds the write lock
            spaces = spaces_between(entries, self._config.segment_bytes, largest)
            whole = sum(entry.extent.nbytes for entry in entries) == segment.live  # else an entry is damaged
            with self._lock:
                if spaces and whole:
                    self.segments.refill(segment.number, spaces)
                    return True
                segment.tight = segment.deaths

    def _victims(self, wanted: int, coming: int | None = None) -> list[Entry]:
        """Evicts until `wanted` segments are empty, or one can be emptied at a fair price by moving what is left; with
        `coming`, until so many bytes of large records may live. The index has forgotten the records on return; the
        catalog is the caller's. Raises `CatalogError`, and evicts nothing, while what left before cannot be removed."""
        self._remove_orphans()
        gone: list[Entry] = []
        with self._lock:
            space = Reclaim.of(self.segments, self._unreadable(), coming)
        for _ in range(wanted):
            while not space.enough() and (records := self._evicted(space.needed(self._largest))):
                for found in self._entries(records):
                    if found is not None:
                        gone.append(found)
                    if found is not None and not found.is_hole:
                        space.lose(found.extent)
            if not space.take_empty():
                break
        evicted = [entry for entry in gone if not entry.is_hole]
        self._leaves(evicted)
        self.metrics.add(Metric.DISK_EVICTED_RECORDS, len(evicted))
        return gone

    def _evicted(self, count: int) -> list[int]:
        """Makes the index forget about so many records, and returns them; fewer if there are no more."""
        records: list[int] = []
        while len(records) < count and (more := self._evict()):
            records += more
        return records

    def _empty_a_segment(self) -> None:
        """Moves what lives in the emptiest segment elsewhere: all of it, or nothing. What cannot be read stays where it
        is, for the error may pass."""
        with self._lock:
            segment = self.segments.emptiest(int((self._config.segment_bytes - PAGE_BYTES) * FULL), self._unreadable())
            if segment is None:
                raise OutOfSpace
            self.segments.refills.pop(segment.number, None)  # or its records would be moved to where they are
            held = self.segments.hold(segment.number)
        try:
            moved = self._copied(segment.number)
            try:
                self._commit_moves(moved, ())
            finally:
                self._settle_writes(entry.extent for entry in moved)
        finally:
            del held
            with self._lock:
                self.segments.released([segment.number])
        self._moves += 1
        self._retry_at.pop(segment.number, None)
        self.metrics.add(Metric.DISK_MOVED_RECORDS, len(moved))

    def _unreadable(self) -> set[int]:
        """The segments that are left alone for a while, because moving from them failed."""
        return {number for number, until in self._retry_at.items() if until > self._moves}

    def _unsynced(self) -> Unsynced:
        """What the writes of one group are made with."""
        return Unsynced(self.segments, self._seal, tuple(self._begun))

    def _seal(self, number: int) -> None:
        with self._lock:
            self.segments.seal(number)

    def _placed(self, nbytes: int, reserve: bool = False, unsynced: Unsynced | None = None) -> Extent:
        """As `Segments.place`. If that needs a new file, it is made without `_lock`, so that no get waits for it.

        unsynced: what the caller wrote already, whose files are closed where descriptors are lacking."""
        with self._lock:
            lacking = self.segments.lacks_file(nbytes, reserve)
        made = (unsynced or self._unsynced()).with_descriptors(self.segments.make) if lacking else None
        with self._lock:
            if made is not None:
                self.segments.add(made)
            return self.segments.place(nbytes, reserve)

    def _copied(self, number: int) -> list[Entry]:
        """Copies the records of a segment, durable on return; the caller settles the writes. If one cannot be copied,
        nothing is."""
        copies, unsynced = list[Entry](), self._unsynced()
        try:
            for entry in self.catalog.in_segment(number):
                buffer = self._pool.take(entry.extent.nbytes)
                try:
                    self.segments.read(number, [buffer.view], entry.extent.offset)
                except OSError as error:
                    self.metrics.add(Metric.DISK_READ_ERRORS, because=error)
                    self._retry_at[number] = self._moves + _MOVES_UNTIL_RETRY
                    raise OutOfSpace from error
                extent = self._placed(entry.extent.nbytes, True, unsynced)
                copies.append(replace(entry, extent=extent))
                unsynced.write([extent], [buffer.view])
            unsynced.sync({entry.extent.segment for entry in copies})
        except BaseException:
            self._settle_writes(entry.extent for entry in copies)
            with self._lock:
                self.segments.give_back_current()
            raise
        return copies

    def _commit_moves(self, added: Sequence[Entry], removed: Sequence[Entry]) -> None:
        try:
            self._change(added, removed)
        except CatalogError as error:
            self.metrics.add(Metric.CATALOG_ERRORS, because=error)
            # What was to go is no longer in the index: it must be tried again, or its space would be lost.
            self._orphans += [entry.record for entry in removed] if not added else []
            self._reopen_catalog()
            raise OutOfSpace from error
