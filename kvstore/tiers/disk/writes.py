"""Writes of the disk tier: groups of records, each made durable in one commit, and removals.

A group of records becomes visible in this order: bytes written, segments synced, catalog committed.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvstore.core.record import FLAG_PINNED, RecordHeader, padded
from kvstore.core.session_record import SessionChange
from kvstore.core.workers import Task, Workers
from kvstore.metrics import Metric
from kvstore.tiers.buffers import Buffer
from kvstore.tiers.disk.entry import Entry, entry_of
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.erase import DiskErase
from kvstore.tiers.disk.segment import Extent
from kvstore.tiers.disk.segments import OutOfSpace
from kvstore.tiers.disk.unsynced import Unsynced

_PLACE_ATTEMPTS = 4
# A group waits so long in all for gets that still read segments in which nothing lives any more.
_READERS_S = 0.5


@dataclass(frozen=True)
class SealedRecord:
    """A sealed record in memory, to be written. Immutable.

    Attributes:
        header: of the record.
        parent: record number of the block before it, 0 for none.
        buffer: the whole record.
    """

    header: RecordHeader
    parent: int
    buffer: Buffer


@dataclass(frozen=True)
class _Placed:
    """A record that has a place in a segment; its bytes are being written there."""

    header: RecordHeader
    parent: int
    extent: Extent


@dataclass(frozen=True, eq=False)
class GroupWrite:
    """A group of records that is being written; what `DiskTier.begin` returns. For one thread.

    Attributes:
        placed: its records; those that found no space were dropped.
        writing: the write of their bytes; None where there is nothing to be written to.
        unsynced: what they are written with.
    """

    placed: Sequence[_Placed] = ()
    writing: Task[None] | None = None
    unsynced: Unsynced | None = None

    @property
    def extents(self) -> Sequence[Extent]:
        """Where the records lie."""
        return [row.extent for row in self.placed]

    def wait(self) -> None:
        """Return when the bytes are written, or the write has failed."""
        if self.writing is not None:
            self.writing.is_done(-1)


class DiskWrites(DiskErase):
    """What `DiskTier` does to make changes durable. Thread-safe: see `DiskSpace` for the locks."""

    _beside: Workers  # the thread that writes the bytes of a group while the one before is committed
    _alive: Callable[[int], bool]  # whether a record is still wanted; called under _write_lock
    _quotas: Callable[[Sequence[tuple[int, bytes, int]]], tuple[Sequence[int], Collection[int]]] | None

    @property
    def session_budget(self) -> int:
        """Bytes that sessions may take, of the tier's budget."""
        return self._config.most_session_bytes

    def namespace(self, digest: bytes) -> int:
        """Return the number of a namespace; a new one is durable on return. Raises `CatalogError`."""
        if digest not in self.namespaces:
            with self._write_lock:
                self.namespaces[digest] = self.catalog.namespace(digest)
        return self.namespaces[digest]

    def write(
        self,
        sealed: Sequence[SealedRecord],
        superseded: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
        changed: Sequence[tuple[int, float | None, bool]] = (),
        sessions: Sequence[SessionChange] = (),
    ) -> set[int] | None:
        """Make a group durable in one commit. Never raises for a full or failing disk.

        Args:
            sealed: records to write.
            superseded: (records to remove, records that replace them); one stays if what begins where it does cannot be
                written.
            changed: (record, expiry, pinned) of stored records.
            sessions: changes, the oldest first.

        Returns:
            The records of the group that are now on disk; the others were dropped and counted. None if the commit
            failed: nothing changed.
        """
        with self._write_lock:
            return self.finish(self.begin(sealed), superseded, changed, sessions)

    def begin(self, sealed: Sequence[SealedRecord], beside: bool = False) -> GroupWrite:
        """Place the records of a group, and begin to write them; nobody finds them before `finish`, which each group
        needs, in the order in which they were begun. The caller keeps others from writing meanwhile (`paused`).

        Args:
            sealed: records to write.
            beside: write on a thread of its own, while the caller finishes the group before; the buffers are held until
                that is done. Otherwise they are written on return.
        """
        self._write_lock.check_held()
        try:
            for digest in {record.header.namespace for record in sealed}:
                self.namespace(digest)
        except CatalogError as error:
            self.metrics.add(Metric.CATALOG_ERRORS, because=error)
            self._reopen_catalog()
            return GroupWrite()
        placed, unsynced = self._place_all(sealed), self._unsynced()
        extents = [extent for _, extent in placed]
        writing = Task(_write, unsynced, extents, [record.buffer for record, _ in placed])
        group = GroupWrite([_Placed(x.header, x.parent, extent) for x, extent in placed], writing, unsynced)
        self._begun[unsynced] = sum(extent.nbytes for extent in extents)
        if beside:
            self._beside.start(writing)
        else:
            writing()
        return group

    def finish(
        self,
        group: GroupWrite,
        superseded: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
        changed: Sequence[tuple[int, float | None, bool]] = (),
        sessions: Sequence[SessionChange] = (),
    ) -> set[int] | None:
        """Make a group durable that was begun. Arguments and result: see `write`."""
        self._write_lock.check_held()
        if group.writing is None or group.unsynced is None:
            return None
        try:
            with contextlib.suppress(CatalogError):
                self._remove_orphans()
            placed = group.placed if self._is_synced(group, group.writing, group.unsynced) else ()
            ahead = {entry.record: entry for entry in self._evict_ahead(sum(row.extent.nbytes for row in placed))}
            entries = {
                row.header.record_id: entry_of(
                    row.header, row.extent, row.parent, self.namespaces[row.header.namespace]
                )
                for row in placed
                if self._alive(row.header.record_id)
            }
            if self._quotas is not None:
                ahead |= self._within_quotas(self._quotas, placed, entries)
            self._leave_orphaned_members(entries, ahead)
            gone = {e.record: e for e in self._replaced(superseded, entries)} | ahead
            written = set(entries)
            for (record, expiry, pinned), stored in zip(changed, self._known([c[0] for c in changed]), strict=True):
                # The record may be of this very group, changed by an earlier put of it, or on its way out.
                entry = entries.get(record, stored)
                if entry is not None and record not in gone:
                    entries[record] = _changed(entry, expiry, pinned)
            if not self._commit(list(entries.values()), list(gone.values()), sessions):
                self._orphans += ahead
                return None
        finally:
            del self._begun[group.unsynced]
            self._settle_writes(group.extents)
            self._shed()
        self._count_written(written, placed)
        return written

    def _is_synced(self, group: GroupWrite, writing: Task[None], unsynced: Unsynced) -> bool:
        """Makes the bytes of a group durable; False, and its records are dropped, where that fails."""
        numbers = {extent.segment for extent in group.extents}
        try:
            writing.result()
            unsynced.sync(numbers)
        except OSError as error:
            self.metrics.add(Metric.DISK_WRITE_ERRORS, because=error)
            self.metrics.add(Metric.DROPPED_WRITE_ERROR, len(group.placed))
            with self._lock:
                self.segments.abandon(numbers)
            return False
        return True

    def _count_written(self, written: set[int], placed: Sequence[_Placed]) -> None:
        members = [row for row in placed if row.header.donors]
        self.metrics.add(Metric.DISK_WRITTEN_RECORDS, len(written))
        self.metrics.add(Metric.DISK_WRITTEN_BYTES, sum(row.extent.nbytes for row in placed))
        self.metrics.add(Metric.DISK_WRITTEN_RAW_BYTES, sum(row.header.raw_bytes for row in placed))
        self.metrics.add(Metric.DISK_WRITTEN_MEMBER_BYTES, sum(row.extent.nbytes for row in members))
        self.metrics.add(Metric.DISK_WRITTEN_MEMBER_RAW_BYTES, sum(row.header.raw_bytes for row in members))

    def rewrite(self, sealed: Sequence[tuple[Entry, SealedRecord]]) -> set[int]:
        """Put the same blocks, coded otherwise, in place of records, in one commit. Never raises for a failing disk.

        Evicts nothing: without room it changes nothing. A record that left or moved meanwhile is left alone.

        Args:
            sealed: where each record was when it was read, and what takes its place, under the same number.

        Returns:
            The records that were rewritten, durably.
        """
        with self._write_lock:
            now = self._known([was.record for was, _ in sealed])
            rows = [
                (entry, new)
                for (was, new), entry in zip(sealed, now, strict=True)
                if entry is not None and entry.extent == was.extent
            ]
            self._set_most(self._most_segments(len(rows)))
            moved, unsynced = list[Entry](), self._unsynced()
            try:
                for entry, new in rows:
                    nbytes = padded(new.header.record_bytes)
                    with self._lock:
                        if not self.segments.has_room([nbytes]):
                            break
                    extent = self._placed(nbytes, unsynced=unsynced)
                    moved.append(replace(entry, extent=extent, codec=new.header.codec))
                    unsynced.write([extent], [new.buffer.view])
                unsynced.sync({entry.extent.segment for entry in moved})
                self._commit_moves(moved, ())
            except OutOfSpace:
                return set()
            except OSError as error:
                self.metrics.add(Metric.DISK_WRITE_ERRORS, because=error)
                with self._lock:
                    self.segments.abandon(entry.extent.segment for entry in moved)
                return set()
            finally:
                self._settle_writes(entry.extent for entry in moved)
            return {entry.record for entry in moved}

    def remove(self, records: Sequence[int]) -> int:
        """Forget records and holes, durably on return; return how many records there were.

        Of a record that others continue a hole stays. Holes that wait to be written are written, too.

        Raises:
            CatalogError: the catalog cannot be written; the removal is tried again: with the next writes, at the next
                call, by `finish_removals`, and when the store is closed.
        """
        with self._write_lock:
            try:
                entries = [entry for entry in self.catalog.get(records) if entry is not None]
            except CatalogError:
                self._orphans += records
                raise
            gone = [entry for entry in entries if not entry.is_hole]
            self._leaves(gone)
            self._remove(entries)
            self._shed()
            return len(gone)

    def expire_sessions(self) -> None:
        """Remove the sessions whose time is over; a failure is counted, and it is tried again at the next call."""
        with self._write_lock:
            try:
                self.metrics.add(Metric.EXPIRED_SESSIONS, self.catalog.expire_sessions())
            except CatalogError:
                self.metrics.add(Metric.CATALOG_ERRORS)
                self._reopen_catalog()

    def _replaced(
        self, superseded: Sequence[tuple[Sequence[int], Sequence[int]]], entries: Mapping[int, Entry]
    ) -> list[Entry]:
        """The superseded records that can go: what takes their place is there."""
        gone = []
        for records, by in superseded:
            there = {entries[record].start for record in by if record in entries}
            gone += [e for e in self._entries(records) if e is not None and (len(there) == len(by) or e.start in there)]
        return gone

    def save_traffic(
        self, records: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint32], history: bytes | None = None
    ) -> None:
        """See `Catalog.save_traffic`. Raises `CatalogError`."""
        with self._write_lock:
            self.catalog.save_traffic(records, counts, history)

    def save_history(self, history: bytes) -> None:
        """See `Catalog.save_history`. Raises `CatalogError`."""
        with self._write_lock:
            self.catalog.save_history(history)

    def _within_quotas(
        self,
        quotas: Callable[[Sequence[tuple[int, bytes, int]]], tuple[Sequence[int], Collection[int]]],
        placed: Sequence[_Placed],
        entries: dict[int, Entry],
    ) -> dict[int, Entry]:
        """Takes those out of `entries` that have no room within the quotas of their namespaces; returns what is to go
        for the others."""
        digests = {row.header.record_id: row.header.namespace for row in placed}
        records, refused = quotas([(r, digests[r], entry.nbytes) for r, entry in entries.items()])
        for record in refused:
            del entries[record]
        gone = [entry for entry in self._entries(records) if entry is not None]
        evicted = [entry for entry in gone if not entry.is_hole]
        self._leaves(evicted)
        self.metrics.add(Metric.DISK_EVICTED_RECORDS, len(evicted))
        return {entry.record: entry for entry in gone}

    def _leave_orphaned_members(self, entries: dict[int, Entry], gone: Collection[int]) -> None:
        """Takes those out of `entries` whose donors are neither among them nor stored and staying."""
        needed = {donor for entry in entries.values() for donor in entry.donors}
        if not needed:
            return
        stored = {e.record for e in self._known(sorted(needed)) if e is not None and e.record not in gone}
        orphaned = [r for r, e in entries.items() if not stored.union(entries).issuperset(e.donors)]
        for record in orphaned:
            del entries[record]
            self.metrics.add(Metric.DROPPED_MEMBERS)

    def _place_all(self, sealed: Sequence[SealedRecord]) -> list[tuple[SealedRecord, Extent]]:
        """Finds places for the records of a group; those that find none are dropped, and counted."""
        placed: list[tuple[SealedRecord, Extent]] = []
        self._is_full = False
        self._make_room(len(sealed))
        patient_until = time.monotonic() + _READERS_S
        sizes = [len(record.buffer.view) for record in sealed]  # whole pages
        self._make_room_for(sizes, patient_until)
        for record, nbytes in zip(sealed, sizes, strict=True):
            try:
                extent = self._place(nbytes, patient_until)
            except OSError as error:  # a failing disk is no reason to evict anything
                self.metrics.add(Metric.DISK_WRITE_ERRORS, because=error)
                self.metrics.add(Metric.DROPPED_WRITE_ERROR, because=error)
                continue
            if extent is None:
                self.metrics.add(Metric.DROPPED_NO_SPACE, because=self._why_full())
            else:
                placed.append((record, extent))
        return placed

    def _make_room_for(self, sizes: Sequence[int], patient_until: float) -> None:
        """Reclaims space until a group finds room, as far as that helps. Later nothing can be moved out of a segment
        that records of the group were placed in, and few segments may be left to empty."""
        for _ in range(_PLACE_ATTEMPTS + sum(sizes) // self._config.segment_bytes):
            try:
                if self._has_room(sizes, patient_until):
                    return
                self._find_room(sizes)
            except (OutOfSpace, CatalogError, OSError):
                return  # placing the records will say what is wrong

    def _place(self, nbytes: int, patient_until: float) -> Extent | None:
        """Finds a place for one record; None if there is no room. Raises `OSError` if the disk fails."""
        with self._lock:
            extent = self.segments.place_here(nbytes)
        if extent is not None:
            return extent
        for _ in range(_PLACE_ATTEMPTS):
            try:
                if self._has_room([nbytes], patient_until):
                    return self._placed(nbytes)
                self._find_room([nbytes])
            except (OutOfSpace, CatalogError):
                continue
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # The disk itself is full before the budget is: live with the segments there are.
                self._is_full = True
                self.metrics.add(Metric.DISK_FULL, because=error)
                self.segments.max_segments = len(self.segments.by_number)
        return None

    def _why_full(self) -> str:
        with self._lock:
            segments = self.segments
            if self._is_full:
                return f"the file system is full: it has no room for a segment of {segments.segment_bytes} bytes"
            live = segments.live_bytes / max(1, segments.used * segments.segment_bytes)
            return (
                f"{segments.used} of {segments.max_segments} segments in use, {live:.0%} of their bytes live, "
                f"{len(segments.lingering)} wait for gets that read there"
            )

    def _has_room(self, sizes: Sequence[int], until: float) -> bool:
        """Whether records can be placed. Waits until then for segments that only their readers keep, at the latest
        until `until`, of `time.monotonic`: before anything more is evicted for it. Waits for the same readers once."""
        while True:
            with self._lock:
                if self.segments.has_room(sizes):
                    return True
            if self._refill(max(sizes, default=0)):
                continue
            with self._lock:
                self._outlasted &= self.segments.lingering
                hoped_for = self.segments.lingering - self._outlasted
            if not hoped_for:
                return False
            if time.monotonic() >= until:
                self._outlasted |= hoped_for
                return False
            time.sleep(0.001)

    def _commit(self, entries: Sequence[Entry], gone: Sequence[Entry], sessions: Sequence[SessionChange]) -> bool:
        if not (entries or gone or sessions):
            return True
        try:
            expired, evicted = self._change(entries, gone, sessions, self.session_budget)
        except CatalogError as error:
            self.metrics.add(Metric.CATALOG_ERRORS, because=error)
            self.metrics.add(Metric.DROPPED_CATALOG_ERROR, len(entries))
            self._reopen_catalog()
            return False
        self.metrics.add(Metric.EXPIRED_SESSIONS, expired)
        self.metrics.add(Metric.EVICTED_SESSIONS, evicted)
        return True


def _write(unsynced: Unsynced, extents: Sequence[Extent], buffers: Sequence[Buffer]) -> None:
    unsynced.write(extents, [buffer.view for buffer in buffers])


def _changed(entry: Entry, expiry: float | None, pinned: bool) -> Entry:
    flags = entry.flags | FLAG_PINNED if pinned else entry.flags & ~FLAG_PINNED
    return replace(entry, expiry=entry.expiry if expiry is None else expiry, flags=flags)
