"""The space of the disk tier: what lives where, what is evicted or moved when it runs out, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvstore.config import MIN_SEGMENTS, PAGE_BYTES, StoreConfig
from kvstore.core.guard import DISK, DISK_WRITE, Guard
from kvstore.errors import KVStoreError
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk.catalog import Catalog, CatalogError
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.fs import FileSystem, is_passing
from kvstore.tiers.disk.open import Opening
from kvstore.tiers.disk.reclaim import FULL, Space, live_limit
from kvstore.tiers.disk.segments import Extent, OutOfSpace, Segments

_CATALOG_HEADROOM = 2  # a commit adds at most half a segment to the catalog
# At most so many segments are emptied before they are needed.
_MOST_AHEAD = 2


class DiskSpace:
    """What `DiskTier` stands on: the books of the space, and what happens when it runs out.

    Two locks: who writes, removes or moves records holds `_write_lock` all the while. `_lock` guards the books for a
    moment each, and is never held during a write, a sync or a commit. If both are taken, `_write_lock` comes first.
    For the arguments see `DiskTier`.
    """

    segments: Segments  # its lists and counts are guarded by _lock; its files are written under _write_lock
    catalog: Catalog  # replaced under _lock; written under _write_lock; reads need no lock
    _records: int  # guarded by _lock
    _tokens: int  # guarded by _lock

    def __init__(
        self,
        fs: FileSystem,
        config: StoreConfig,
        metrics: Metrics,
        pool: BufferPool,
        opening: Opening,
        evict: Callable[[], Sequence[int]],
        lost: Callable[[int], None],
        leaves: Callable[[Sequence[Entry]], None],
    ) -> None:
        self.metrics = metrics
        self._fs = fs
        self._config = config
        self._pool = pool
        self._opening = opening
        self._evict = evict
        self._lost = lost
        self._leaves = leaves
        self._lock = Guard(DISK)
        self._write_lock = Guard(DISK_WRITE)
        self._orphans: list[int] = []  # records that the index forgot and the catalog could not; by _write_lock

    def _settle(self, born: Iterable[Entry], died: Iterable[Entry]) -> None:
        with self._lock:
            for entry in born:
                self.segments.born(entry.extent)
                self._records += 1
                self._tokens += len(entry.tokens)
            for entry in died:
                self.segments.died(entry.extent)
                self._records -= 1
                self._tokens -= len(entry.tokens)

    def _known(self, records: Sequence[int]) -> list[Entry | None]:
        try:
            return self.catalog.get(records)
        except CatalogError as error:
            self.metrics.add(Metric.CATALOG_ERRORS, because=error)
            return [None] * len(records)

    def _reopen_catalog(self) -> None:
        """After a failed write of its own LMDB may refuse everything until it is opened anew."""
        with self._lock:
            self.catalog.close()
            try:
                self.catalog = self._opening.new_catalog()
                self.metrics.add(Metric.CATALOG_REOPENED)
            except KVStoreError as error:
                self.metrics.add(Metric.CATALOG_LOST, because=error)

    def _settle_writes(self, extents: Iterable[Extent]) -> None:
        with self._lock:
            for extent in extents:
                self.segments.settle(extent)

    def _max_segments(self) -> int:
        """How many segments fit the budget beside the catalog, the one in reserve included."""
        segment_bytes = self._config.segment_bytes
        # The catalog grows with the next commit too.
        catalog = self._catalog_bytes() + segment_bytes // _CATALOG_HEADROOM
        return max(MIN_SEGMENTS, (self._config.disk.bytes - catalog) // segment_bytes + 1)

    @property
    def capacity(self) -> int:
        """The most bytes of live records that the budget leaves room for."""
        return live_limit(self._max_segments(), self._config.segment_bytes)

    def _catalog_bytes(self) -> int:
        try:
            return self._fs.size(self._opening.catalog_file)
        except OSError:
            return 0

    def _reclaim(self) -> None:
        """Makes a free segment: evicts what the index gives up, then moves what still lives in the emptiest
        segment into the reserve. Raises `OutOfSpace` where that did not help."""
        self.metrics.add(Metric.DISK_RECLAIMS)
        evicted = self._victims(1)
        self._commit_moves((), evicted)
        self.metrics.add(Metric.DISK_EVICTED_RECORDS, len(evicted))
        if self.segments.available() <= 1:
            self._empty_a_segment()

    def _evict_ahead(self, nbytes: int) -> list[Entry]:
        """What has to go so that the next group, of about `nbytes`, finds room: its removal is part of this group's
        commit, and the next one need not wait for a commit of its own."""
        with self._lock:
            segments, size = self.segments, self._config.segment_bytes
            room = (size - segments.current.end if segments.current else 0) + (segments.available() - 1) * size
        if not nbytes or nbytes <= room:
            return []
        evicted = self._victims(min(_MOST_AHEAD, -(-(nbytes - room) // size)))
        self.metrics.add(Metric.DISK_EVICTED_RECORDS, len(evicted))
        return evicted

    def _victims(self, wanted: int) -> list[Entry]:
        """Evicts until `wanted` segments are empty, or one can be emptied at a fair price by moving what is left. The
        index has forgotten the records on return; the catalog is the caller's."""
        evicted = [e for e in self._known(self._orphans) if e is not None]
        self._orphans.clear()
        with self._lock:
            space = Space.of(self.segments)
        for entry in evicted:
            space.lose(entry.extent)
        for _ in range(wanted):
            while not space.enough() and (records := self._evict()):
                for found in self._known(records):
                    if found is not None:
                        evicted.append(found)
                        space.lose(found.extent)
            if not space.take_empty():
                break
        self._leaves(evicted)
        return evicted

    def _empty_a_segment(self) -> None:
        with self._lock:
            segment = self.segments.emptiest()
            if segment is None or segment.live > (self._config.segment_bytes - PAGE_BYTES) * FULL:
                raise OutOfSpace
            self.segments.hold(segment.number)
        moved, lost, placed = [], [], []
        try:
            for entry in self.catalog.in_segment(segment.number):
                buffer = self._pool.take(entry.extent.nbytes)
                try:
                    self.segments.read(segment.number, [buffer.view], entry.extent.offset)
                except OSError as error:
                    if is_passing(error):
                        raise OutOfSpace from error  # nothing is wrong with the record: it stays where it is
                    lost.append(entry)
                    continue
                with self._lock:
                    extent = self.segments.place(entry.extent.nbytes, reserve=True)
                placed.append(extent)
                self.segments.write([extent], [buffer.view])
                moved.append((entry, replace(entry, extent=extent)))
            self.segments.sync({extent.segment for extent in placed})
            self._commit_moves([new for _, new in moved], [*lost, *(old for old, _ in moved)])
        finally:
            self._settle_writes(placed)
            with self._lock:
                self.segments.release(segment.number)
        self.metrics.add(Metric.DISK_MOVED_RECORDS, len(moved))
        self.metrics.add(Metric.DISK_LOST_RECORDS, len(lost))
        for entry in lost:
            self._lost(entry.record)
        self._leaves(lost)

    def _commit_moves(self, added: Sequence[Entry], removed: Sequence[Entry]) -> None:
        if not (added or removed):
            return
        try:
            self.catalog.commit(added, removed)
        except CatalogError as error:
            self.metrics.add(Metric.CATALOG_ERRORS, because=error)
            # What was to go is no longer in the index: it must be tried again, or its space would be lost.
            self._orphans += [entry.record for entry in removed] if not added else []
            self._reopen_catalog()
            raise OutOfSpace from error
        self._settle(added, removed)
