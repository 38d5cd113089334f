"""The disk tier: records in segments, the catalog as the truth about them.

A group of records becomes visible in this order: bytes written, segments synced, catalog committed. Space comes back
in the reverse: catalog committed, then the segment is reused. Nothing is ever overwritten that the catalog knows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstore.config import GIB, MIB, MIN_SEGMENTS, PAGE_BYTES, StoreConfig
from kvstore.errors import CorruptStore, KVStoreError
from kvstore.identity import ModelIdentity
from kvstore.metrics import Metrics
from kvstore.record import FLAG_PINNED, RecordHeader, padded
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.disk import catalog as catalog_module
from kvstore.tiers.disk.catalog import Catalog, CatalogError, Entry, Scan
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.lock import WriterLock
from kvstore.tiers.disk.recovery import DATA_FILE, entry_of, rebuild
from kvstore.tiers.disk.segments import Extent, OutOfSpace, Segments
from kvstore.tiers.disk.superblock import Superblock

# Live records may take this share of the segments; the rest is what makes recycling cheap.
_LIVE_SHARE = 0.9
# A segment is worth emptying for reuse when at most this share of it is live.
_WORTH_EMPTYING = 0.5
# One that is fuller than this frees too little to be worth it, whatever happens.
_FULL = 0.95


@dataclass(frozen=True)
class Draft:
    """A sealed record in memory, to be written. parent: record number of the block before it, 0 for none."""

    header: RecordHeader
    parent: int
    buffer: Buffer


class DiskTier:
    """Thread-safe. `evict` names the next record to give up (0 when there is none) after the index has forgotten it;
    `alive` says whether a drafted record is still wanted when its group is committed."""

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        identity: ModelIdentity,
        config: StoreConfig,
        read_only: bool,
        metrics: Metrics,
        pool: BufferPool,
        evict: Callable[[], int],
        alive: Callable[[int], bool],
    ) -> None:
        """Opens or makes the store at `path`. Raises FormatVersion, IdentityMismatch, StoreLocked, CorruptStore."""
        self.read_only = read_only
        self.metrics = metrics
        self._fs = fs
        self._path = path
        self._config = config
        self._pool = pool
        self._evict = evict
        self._alive = alive
        self._lock = threading.RLock()  # segments and which catalog is open
        self._write_lock = threading.RLock()  # one writer at a time; taken before _lock
        self._writer = WriterLock(fs, path)
        self._segment_directory = os.path.join(path, "segments")
        self._catalog_directory = os.path.join(path, "catalog")
        self._catalog_file = os.path.join(self._catalog_directory, DATA_FILE)
        self._bytes_per_token = identity.layout.bytes_per_token
        self.last_record = 0
        superblock = self._open_superblock(identity)
        try:
            self.segments = Segments(
                fs, self._segment_directory, config.segment_bytes, self._max_segments(), superblock.store_id
            )
            self.catalog = self._open_catalog()
            try:
                self.seen_version = self.catalog.version()
                self.namespaces = self.catalog.namespaces()
                self.scan: Scan | None = self._scan_and_open_segments()
            except BaseException:
                self.catalog.close()
                raise
        except BaseException:
            self._writer.release()
            raise

    # ---- opening -------------------------------------------------------------------------------------------------

    def _open_superblock(self, identity: ModelIdentity) -> Superblock:
        config = self._config
        if not self.read_only:
            for directory in (self._path, self._segment_directory, self._catalog_directory):
                self._fs.mkdir(directory)
            self._writer.take()
        try:
            superblock = Superblock.read(self._fs, self._path)
            if superblock is None:
                if self.read_only or self._fs.names(self._segment_directory):
                    raise CorruptStore(f"{self._path}: there is no store.json; this is no store, or it was damaged")
                superblock = Superblock.new(identity, config.block_tokens, config.segment_bytes)
                superblock.write(self._fs, self._path)
            superblock.check(self._path, identity, config.block_tokens, config.segment_bytes)
        except BaseException:
            self._writer.release()
            raise
        return superblock

    def _open_catalog(self) -> Catalog:
        # A live writer has checked the file when it opened it, and changes it under a reader's eyes.
        trusted = self.read_only and not self._writer.is_free()
        if not trusted and os.path.basename(self._catalog_file) in self._fs.names(self._catalog_directory):
            problems = catalog_module.check(self._catalog_directory)
            if problems:
                self.metrics.add("catalog_damaged")
                if self.read_only:
                    raise CorruptStore(f"{self._catalog_file}: {problems[0]}; open the store for writing to rebuild it")
                return self._rebuild_catalog()
        try:
            return self._new_catalog()
        except CatalogError as error:
            if self.read_only:
                raise CorruptStore(
                    f"{self._catalog_file}: {error}; open the store for writing to rebuild it"
                ) from error
            return self._rebuild_catalog()

    def _new_catalog(self) -> Catalog:
        budget = self._config.disk.bytes
        return Catalog(self._catalog_directory, min(max(budget // 4, 64 * MIB), 64 * GIB), self.read_only)

    def _rebuild_catalog(self) -> Catalog:
        damaged = self._catalog_file + ".damaged"
        if os.path.basename(self._catalog_file) in self._fs.names(self._catalog_directory):
            self._fs.rename(self._catalog_file, damaged)
        names = self._fs.names(self._segment_directory)
        numbers = sorted(int(n[:8], 16) for n in names if n.endswith(".seg") and len(n) == 12)
        catalog, found = rebuild(
            self._fs, self._segment_directory, damaged, numbers, self._config.segment_bytes, self._new_catalog
        )
        self.metrics.add("catalog_rebuilt")
        self.metrics.add("catalog_rebuilt_records", found.records)
        self.metrics.add("catalog_rebuilt_sessions", found.sessions)
        if os.path.basename(damaged) in self._fs.names(self._catalog_directory):
            self._fs.unlink(damaged)
        return catalog

    def _scan_and_open_segments(self) -> Scan:
        scan = self.catalog.scan()
        rows = scan.entries
        ends = (rows["page"].astype(np.uint64) + rows["pages"]) * PAGE_BYTES
        sound = (ends <= self._config.segment_bytes) & (rows["page"] > 0) & (rows["pages"] > 0)
        present = {int(n[:8], 16) for n in self._fs.names(self._segment_directory) if n.endswith(".seg")}
        sound &= np.isin(rows["segment"], np.array(sorted(present), dtype=np.uint32))
        bad_keys = [int(r).to_bytes(8, "big") for r in rows["record"][~sound]] + scan.damaged
        if bad_keys:
            self.metrics.add("damaged_entries", len(bad_keys))
            if not self.read_only:
                self.catalog.purge(bad_keys)
        scan = scan.subset(sound)
        self._open_segments(scan)
        self._records, self._tokens = len(scan.entries), len(scan.tokens)
        return scan

    def _open_segments(self, scan: Scan) -> None:
        rows = scan.entries
        numbers, where = np.unique(rows["segment"], return_inverse=True)
        ends = np.zeros(len(numbers), np.int64)
        np.maximum.at(ends, where, (rows["page"].astype(np.int64) + rows["pages"]) * PAGE_BYTES)
        live = np.bincount(where, rows["pages"], len(numbers)).astype(np.int64) * PAGE_BYTES
        used = {int(n): (int(e), int(b)) for n, e, b in zip(numbers, ends, live, strict=True)}
        damaged = self.segments.open_existing(used, not self.read_only)
        if damaged:
            self.metrics.add("damaged_segments", len(damaged))
        if not self.segments.direct:
            self.metrics.add("fallback_buffered_io")

    def close(self) -> None:
        """Closes files and releases the writer lock. Idempotent."""
        with self._write_lock, self._lock:
            self.catalog.close()
            self.segments.close()
            self._writer.release()

    # ---- reading -------------------------------------------------------------------------------------------------

    def locate(self, records: Sequence[int]) -> list[Entry | None]:
        """Where records lie; None where they are not on disk. Every entry's segment is held until `release`."""
        with self._lock:
            try:
                entries = self.catalog.get(records)
            except CatalogError:
                self.metrics.add("catalog_errors")
                return [None] * len(records)
            return [e if e is not None and self._hold(e.extent.segment) else None for e in entries]

    def release(self, entries: Iterable[Entry]) -> None:
        """Ends the hold of `locate`."""
        with self._lock:
            for entry in entries:
                self.segments.release(entry.extent.segment)

    def read(self, entries: Sequence[Entry], buffers: Sequence[Buffer]) -> None:
        """Reads records that follow each other in one segment, each into its buffer (`extent.nbytes` long), with
        one call. Raises OSError. The caller holds the segment and checks what was read."""
        first = entries[0].extent
        self.segments.read(first.segment, [buffer.view for buffer in buffers], first.offset)

    def entry(self, record: int) -> Entry | None:
        """What the catalog says of a record now; nothing is held."""
        return self._known([record])[0]

    def holds(self, record: int) -> bool:
        """Whether the catalog knows the record."""
        return self.entry(record) is not None

    def stats(self) -> dict[str, int]:
        """bytes: pages of live records. raw_bytes: what they hold, uncoded. file_bytes: all segment files."""
        with self._lock:
            segments = self.segments
            return {
                "bytes": segments.live_bytes,
                "budget": self._config.disk.bytes,
                "records": self._records,
                "tokens": self._tokens,
                "raw_bytes": self._tokens * self._bytes_per_token,
                "file_bytes": segments.file_bytes,
                "catalog_bytes": self._catalog_bytes(),
                "segments": len(segments.by_number),
                "free_segments": len(segments.free),
                "direct_io": int(segments.direct),
            }

    def _hold(self, segment: int) -> bool:
        if self.segments.hold(segment):
            return True
        return self.read_only and self.segments.add_for_reading(segment) and self.segments.hold(segment)

    # ---- writing -------------------------------------------------------------------------------------------------

    def namespace(self, digest: bytes) -> int:
        """The number of a namespace, new ones are made. Raises `CatalogError`."""
        if digest not in self.namespaces:
            with self._write_lock:
                self.namespaces[digest] = self.catalog.namespace(digest)
        return self.namespaces[digest]

    def write(
        self,
        drafts: Sequence[Draft],
        superseded: Sequence[int] = (),
        changed: Sequence[tuple[int, float | None, bool]] = (),
        sessions: Sequence[tuple[bytes, bytes | None]] = (),
    ) -> set[int] | None:
        """Makes a group durable: records, the removal of those they supersede, changed (record, expiry, pinned)
        of stored ones, and sessions, in one commit. Returns the records that are now on disk (None where the commit
        failed); the others were dropped and counted. Never raises for a full or failing disk."""
        with self._write_lock:
            try:
                for digest in {draft.header.namespace for draft in drafts}:
                    self.namespace(digest)
            except CatalogError:
                self.metrics.add("catalog_errors")
                self._reopen_catalog()
                return None
            placed = self._write_records(drafts)
            try:
                entries = [
                    entry_of(d.header, extent, d.parent, self.namespaces[d.header.namespace]) for d, extent in placed
                ]
                entries = [entry for entry in entries if self._alive(entry.record)]
                written = {entry.record for entry in entries}
                for (_, expiry, pinned), entry in zip(changed, self._known([c[0] for c in changed]), strict=True):
                    if entry is not None:
                        entries.append(_changed(entry, expiry, pinned))
                gone = [e for e in self._known(superseded) if e is not None]
                if not self._commit(entries, gone, sessions):
                    return None
            finally:
                self._release_all(extent for _, extent in placed)
            self.metrics.add("disk_written_records", len(written))
            self.metrics.add("disk_written_bytes", sum(extent.nbytes for _, extent in placed))
            return written

    def remove(self, records: Sequence[int]) -> int:
        """Forgets records, durably; returns how many there were. Raises `CatalogError`."""
        with self._write_lock:
            entries = [e for e in self._known(records) if e is not None]
            if entries:
                self.catalog.commit(removed=entries)
                self._settle((), entries)
            return len(entries)

    def _write_records(self, drafts: Sequence[Draft]) -> list[tuple[Draft, Extent]]:
        placed: list[tuple[Draft, Extent]] = []
        self.segments.max_segments = self._max_segments()
        for draft in drafts:
            extent = self._place(padded(draft.header.record_bytes))
            if extent is None:
                self.metrics.add("dropped_no_space")
            else:
                placed.append((draft, extent))
        try:
            self.segments.write([e for _, e in placed], [d.buffer.view for d, _ in placed])
            self.segments.sync({e.segment for _, e in placed})
        except OSError:
            self.metrics.add("disk_write_errors")
            self.metrics.add("dropped_write_error", len(placed))
            with self._lock:
                self.segments.abandon_current()
            self._release_all(extent for _, extent in placed)
            return []
        return placed

    def _place(self, nbytes: int) -> Extent | None:
        with self._lock:
            for _ in range(3):
                try:
                    if not self.segments.has_room(nbytes):
                        self._reclaim()
                    return self.segments.place(nbytes)
                except (OutOfSpace, CatalogError):
                    continue
                except OSError:
                    # The disk itself is full before the budget is: live with the segments there are.
                    self.metrics.add("disk_full")
                    self.segments.max_segments = len(self.segments.by_number)
            return None

    def _release_all(self, extents: Iterable[Extent]) -> None:
        with self._lock:
            for extent in extents:
                self.segments.release(extent.segment)

    def _commit(
        self, entries: Sequence[Entry], gone: Sequence[Entry], sessions: Sequence[tuple[bytes, bytes | None]]
    ) -> bool:
        if not (entries or gone or sessions):
            return True
        before = [e for e in self._known([entry.record for entry in entries]) if e is not None]
        try:
            self.catalog.commit(entries, gone, sessions)
        except CatalogError:
            self.metrics.add("catalog_errors")
            self.metrics.add("dropped_catalog_error", len(entries))
            self._reopen_catalog()
            return False
        self._settle(entries, [*gone, *before])
        return True

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
        except CatalogError:
            self.metrics.add("catalog_errors")
            return [None] * len(records)

    def _reopen_catalog(self) -> None:
        """After a failed write of its own LMDB may refuse everything until it is opened anew."""
        with self._lock:
            self.catalog.close()
            try:
                self.catalog = self._new_catalog()
                self.metrics.add("catalog_reopened")
            except KVStoreError:
                self.metrics.add("catalog_lost")

    # ---- space ---------------------------------------------------------------------------------------------------

    def _max_segments(self) -> int:
        """How many segments fit the budget beside the catalog, the one in reserve included."""
        return max(MIN_SEGMENTS, (self._config.disk.bytes - self._catalog_bytes()) // self._config.segment_bytes + 1)

    def _catalog_bytes(self) -> int:
        try:
            return self._fs.size(self._catalog_file)
        except OSError:
            return 0

    def _reclaim(self) -> None:
        """Makes a free segment: evicts what the index gives up, then moves what still lives in the emptiest
        segment into the reserve. Raises `OutOfSpace` where everything is pinned."""
        segments, size = self.segments, self._config.segment_bytes - PAGE_BYTES
        self.metrics.add("disk_reclaims")
        limit = int((segments.max_segments - 1) * size * _LIVE_SHARE)
        # Without a segment in reserve nothing can be moved: then one must be emptied by eviction alone.
        most_left = size * _WORTH_EMPTYING if segments.available() else 0
        evicted: list[Entry] = []
        live = segments.live_bytes
        left = {s.number: s.live for s in segments.by_number.values() if s is not segments.current}

        def enough() -> bool:
            return live <= limit and min(left.values(), default=0) <= most_left

        while not enough() and (record := self._evict()):
            entry = self._known([record])[0]
            if entry is not None:
                evicted.append(entry)
                live -= entry.extent.nbytes
                if entry.extent.segment in left:
                    left[entry.extent.segment] -= entry.extent.nbytes
        self._commit_moves((), evicted)
        self.metrics.add("disk_evicted_records", len(evicted))
        if segments.available() <= 1:
            self._empty_a_segment()

    def _empty_a_segment(self) -> None:
        segment = self.segments.emptiest()
        if segment is None or segment.live > (self._config.segment_bytes - PAGE_BYTES) * _FULL:
            raise OutOfSpace
        moved, lost, held = [], [], []
        try:
            for entry in self.catalog.in_segment(segment.number):
                buffer = self._pool.take(entry.extent.nbytes)
                try:
                    self.segments.read(segment.number, [buffer.view], entry.extent.offset)
                except OSError:
                    lost.append(entry)
                    continue
                extent = self.segments.place(entry.extent.nbytes, reserve=True)
                held.append(extent)
                self.segments.write([extent], [buffer.view])
                moved.append((entry, replace(entry, extent=extent)))
            self.segments.sync({extent.segment for extent in held})
            self._commit_moves([new for _, new in moved], [*lost, *(old for old, _ in moved)])
        finally:
            self._release_all(held)
        self.metrics.add("disk_moved_records", len(moved))
        self.metrics.add("disk_lost_records", len(lost))

    def _commit_moves(self, added: Sequence[Entry], removed: Sequence[Entry]) -> None:
        if not (added or removed):
            return
        try:
            self.catalog.commit(added, removed)
        except CatalogError as error:
            self.metrics.add("catalog_errors")
            self._reopen_catalog()
            raise OutOfSpace from error
        self._settle(added, removed)


def _changed(entry: Entry, expiry: float | None, pinned: bool) -> Entry:
    flags = entry.flags | FLAG_PINNED if pinned else entry.flags & ~FLAG_PINNED
    return replace(entry, expiry=entry.expiry if expiry is None else expiry, flags=flags)
