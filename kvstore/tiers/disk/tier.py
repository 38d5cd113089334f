"""The disk tier: records in segments, the catalog as the truth about them.

A group of records becomes visible in this order: bytes written, segments synced, catalog committed. Space comes back
in the reverse: catalog committed, then the segment is reused. Nothing is ever overwritten that the catalog knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.config import StoreConfig
from kvstore.core.guard import Guard
from kvstore.core.identity import ModelIdentity
from kvstore.core.workers import Workers
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.base import StorageTier
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.disk.ahead import SegmentReads
from kvstore.tiers.disk.budget import largest_record
from kvstore.tiers.disk.entry import Entry, Scan
from kvstore.tiers.disk.environment import CatalogDamaged, CatalogError
from kvstore.tiers.disk.files import most_open
from kvstore.tiers.disk.fs import LARGE_REQUESTS, PART_REQUESTS, FileSystem, reads_ahead
from kvstore.tiers.disk.holes import HoleKeeper, NoHoles
from kvstore.tiers.disk.lock import WriterLock
from kvstore.tiers.disk.open import Opening, told
from kvstore.tiers.disk.segment import Hold
from kvstore.tiers.disk.segments import Segments
from kvstore.tiers.disk.survey import Survey, segment_problems
from kvstore.tiers.disk.usage import Usage, Use
from kvstore.tiers.disk.writes import DiskWrites

_ROOMY = 2  # what codecs add to blocks that they do not make smaller is far less
_TURNS = 3  # how often a reader asks where records lie, if a segment that it was told of is gone


class DiskTier(DiskWrites, StorageTier[Entry]):
    """Records in segment files, with the catalog as the truth about them.

    Thread-safe: see `DiskSpace` for which lock guards what.

    Args:
        fs, path: of the store.
        identity: of the store; it must be the one that the store was made with.
        config: settings of the store.
        read_only: open it beside a writer, and never write.
        metrics: where faults are counted.
        pool: for the buffers of records that are moved.
        evict: makes the index forget the next records to give up together, and returns them ([] for none).
        alive: says whether a record is still wanted when its group is committed.
        leaves: called with the entries that the catalog gives up because their records were forgotten, and not because
            newer ones took their place.
        holes: says what stays of records that leave the middle of their sequences.
        quotas: makes the index forget what namespaces must give up for (record, digest of its namespace, bytes) of what
            is about to be durable; returns these, and which of the coming ones have no room. None: there are no quotas.

    Attributes:
        digest: 32 bytes that stand for the identity with which the store was made; all its keys begin with them.

    Raises:
        FormatVersion, IdentityMismatch, StoreLocked, CorruptStore, DiskError: the store cannot be opened; the message
            says why.

    Example:
        >>> import tempfile
        >>> from kvstore import KVLayout
        >>> folder = tempfile.TemporaryDirectory()
        >>> identity = ModelIdentity("my-model", "main", "weights-1", "", KVLayout.uniform(2, 4, 16))
        >>> pool, metrics = BufferPool(keep_bytes=0), Metrics()
        >>> fs, config = FileSystem(), StoreConfig()
        >>> tier = DiskTier(fs, folder.name, identity, config, False, metrics, pool, evict=list, alive=lambda x: True)
        >>> tier.locate([1]), tier.nbytes
        ([None], 0)
        >>> tier.close()
        >>> folder.cleanup()
    """

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        identity: ModelIdentity,
        config: StoreConfig,
        read_only: bool,
        metrics: Metrics,
        pool: BufferPool,
        evict: Callable[[], Sequence[int]],
        alive: Callable[[int], bool],
        leaves: Callable[[Sequence[Entry]], None] = lambda entries: None,
        holes: HoleKeeper | None = None,
        quotas: Callable[[Sequence[tuple[int, bytes, int]]], tuple[Sequence[int], Collection[int]]] | None = None,
    ) -> None:
        opening = Opening(fs, path, config, read_only, metrics)
        largest = config.segment_bytes if identity.layout.states else _ROOMY * largest_record(config, identity.layout)
        super().__init__(fs, config, metrics, pool, opening, evict, leaves, holes or NoHoles(), largest)
        self.read_only = read_only
        self._alive = alive
        self._quotas = quotas
        self._writer = WriterLock(fs, path)
        self._bytes_per_token = identity.layout.bytes_per_token
        with told(path):
            scan = self._open(self._opening, identity)
        self._at_open: Scan | None = scan
        self._last_record = scan.last_record
        self._records, self._tokens, self._usage = len(scan.entries), scan.token_count, Usage(scan)
        self._holes, self._hole_bytes = len(scan.holes), scan.hole_bytes
        self._live_at_open = self.segments.live_bytes
        if not read_only:
            self.resume_erase()

    def _open(self, opening: Opening, identity: ModelIdentity) -> Scan:
        """Open everything, or nothing."""
        with contextlib.ExitStack() as undo:
            self._beside = Workers(0 if self.read_only else 1, "kvstore-write")
            undo.callback(self._beside.close)
            superblock = opening.superblock(identity, self._writer)
            undo.callback(self._writer.release)
            self.digest = superblock.digest
            self.segments = Segments(
                self._fs,
                opening.segment_directory,
                self._config.segment_bytes,
                self._budget.most_segments(),
                superblock.store_id,
                most_open(self._config.open_segments),
            )
            undo.callback(self.segments.close)
            self.catalog = opening.catalog(self._writer)
            undo.callback(lambda: self.catalog.close())
            try:
                scan = self._scan(opening)
            except CatalogDamaged:
                # Mending it damaged it further: its list of free pages names pages that are in use.
                self.catalog.close()
                self.catalog = opening.rebuilt("what was mended damaged other pages")
                scan = self._scan(opening)
            opening.upgrade(superblock, self.catalog)
            self.catalog = opening.compacted(self.catalog)
            undo.pop_all()
            return scan

    def _scan(self, opening: Opening) -> Scan:
        self._seen_version = self.catalog.environment.version()
        scan = opening.scan(self.catalog, self.segments)
        self.namespaces = self.catalog.namespaces()
        return scan

    def close(self) -> None:
        """Close files and release the writer lock. Idempotent."""
        self._beside.close()
        self.finish_removals(at_once=True)
        with self._write_lock, self._lock:
            self.catalog.close()
            self.segments.close()
            self._writer.release()

    @property
    def name(self) -> str:
        return "disk"

    @property
    def budget(self) -> int:
        return self._config.disk.bytes

    @property
    def nbytes(self) -> int:
        """Pages of live records."""
        return self.segments.live_bytes

    @property
    def tokens(self) -> int:
        """Tokens of all records."""
        return self._tokens

    # ---- what is stored, for the index ---------------------------------------------------------------------------

    def take_scan(self) -> Scan:
        """The catalog as it was when the store was opened. It is large, so it is given away once."""
        scan, self._at_open = self._at_open, None
        assert scan is not None, "the scan was taken before"
        return scan

    def has_news(self) -> bool:
        """Whether `scan_new` would find something, or fail: until all of it was taken in."""
        try:
            return self.catalog.environment.version() != self._seen_version
        except CatalogError:
            return True

    @contextlib.contextmanager
    def scan_new(self) -> Iterator[Scan | None]:
        """What a writer process committed since the store was opened, or since the last time; None for nothing.

        It counts as taken in when the context ends without an error; the next call gives it again otherwise. For a
        reader, from one thread at a time. Raises `CatalogError`.
        """
        version = self.catalog.environment.version()
        if version == self._seen_version:
            yield None
            return
        scan = self.catalog.scan(after=self._last_record)
        self.namespaces = self.catalog.namespaces()
        yield scan
        self._last_record = max(self._last_record, scan.last_record)
        self._seen_version = version

    def traffic(self, records: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """See `Catalog.traffic`. Raises `CatalogError`."""
        return self.catalog.traffic(records)

    # ---- reading -------------------------------------------------------------------------------------------------

    def locate(self, records: Sequence[int]) -> list[Entry | None]:
        """Return where records lie; None for those not on disk. An entry's segment is held until `release`, or until
        nobody has the entry any more."""
        found: list[Entry | None] = [None] * len(records)
        with self._lock:
            for _ in range(_TURNS if self.read_only else 1):
                try:
                    entries = self.catalog.get(records)
                except CatalogError as error:
                    self.metrics.add(Metric.CATALOG_ERRORS, because=error)
                    return [None] * len(records)
                holds: dict[int, Hold | None] = {}
                there = [entry if entry is not None and not entry.is_hole else None for entry in entries]
                found = [entry if entry is not None and self._held(entry, holds) else None for entry in there]
                if all(a is b for a, b in zip(found, there, strict=True)):
                    break  # else a writer process moved records since it was asked, and their file is gone
        return found

    def release(self, entries: Iterable[Entry]) -> None:
        """End the hold of `locate`."""
        numbers = set()
        for entry in entries:
            object.__setattr__(entry, "hold", None)
            numbers.add(entry.extent.segment)
        with self._lock:
            self.segments.released(numbers)

    def read(self, entries: Sequence[Entry], buffers: Sequence[Buffer]) -> None:
        """Read records that follow each other in one segment with one call; see `StorageTier.read`.

        The caller holds the segment and checks what was read. A buffer is `extent.nbytes` long.

        Raises:
            OSError: the disk cannot be read.
        """
        first = entries[0].extent
        self.segments.read(first.segment, [buffer.view for buffer in buffers], first.offset)

    def reads_ahead(self) -> SegmentReads | None:
        """See `StorageTier.reads_ahead`; None without O_DIRECT, and where the system has no asynchronous reads."""
        return self._begin_reads(LARGE_REQUESTS)

    def reads_parts(self) -> SegmentReads | None:
        """See `StorageTier.reads_parts`; None also for a reader, whose records a writer process moves."""
        return None if self.read_only else self._begin_reads(PART_REQUESTS)

    def _begin_reads(self, requests: int) -> SegmentReads | None:
        if not self.segments.files.direct:
            return None
        try:
            reads = reads_ahead(self._fs, requests)
        except OSError as error:
            self.metrics.add(Metric.FALLBACK_READS_IN_TURN, because=error)
            return None
        return None if reads is None else SegmentReads(self.segments.files, reads)

    def follows(self, before: Entry, source: Entry) -> bool:
        a, b = before.extent, source.extent
        return a.segment == b.segment and a.offset + a.nbytes == b.offset

    def is_current(self, source: Entry) -> bool:
        now = self.entry(source.record)
        return now is not None and now.extent == source.extent

    def entry(self, record: int) -> Entry | None:
        """Return what the catalog says of a record now; None if nothing. No segment is held."""
        return self._known([record])[0]

    def known(self, records: Sequence[int]) -> list[Entry | None]:
        """Return what the catalog says of records now; None for those it does not know. No segment is held."""
        return self._known(records)

    def holds(self, record: int) -> bool:
        """Return whether the catalog knows the record; False if it cannot be asked now."""
        return self.entry(record) is not None

    def lacks(self, record: int) -> bool | None:
        """Return whether the catalog does not know the record; None if it cannot be asked now."""
        try:
            entry = self.catalog.get([record])[0]
            return entry is None or entry.is_hole
        except CatalogError:
            self.metrics.add(Metric.CATALOG_ERRORS)
            return None

    def stats(self) -> dict[str, float]:
        """Return numbers: bytes (of live records, whole pages), raw_bytes (before coding), file_bytes (of segments),
        used_bytes (of everything in the folder of the store), utilisation (bytes of live records by the budget),
        capacity (the most bytes of live records that there may be), and others."""
        used = self._measured(self._catalog_bytes(), self._budget.beside_bytes)
        with self._lock:
            segments = self.segments
            return {
                "bytes": self.nbytes,
                "budget": self.budget,
                "records": self._records,
                "tokens": self._tokens,
                "holes": self._holes,
                "hole_bytes": self._hole_bytes,
                "raw_bytes": self._tokens * self._bytes_per_token,
                "file_bytes": segments.file_bytes,
                "used_bytes": used + segments.file_bytes,
                "utilisation": self.nbytes / self.budget,
                "capacity": self.capacity,
                "catalog_bytes": self._catalog_bytes(),
                "segments": len(segments.by_number),
                "free_segments": len(segments.free),
                "direct_io": int(segments.files.direct),
            }

    def usage(self) -> dict[int, Use]:
        """Return records, tokens and bytes by the number of the namespace."""
        with self._lock:
            return self._usage.snapshot()

    def has_room(self, nbytes: int) -> bool:
        """Return whether the budget has room for so many more bytes beside the segments."""
        return self.stats()["used_bytes"] + nbytes <= self.budget

    def paused(self) -> Guard:
        """Return a context in which nobody writes and removes; reads go on."""
        return self._write_lock

    def survey(self) -> Survey:
        """Compare the catalog with the segments and with what is counted. Raises `CatalogError`."""
        with self._write_lock:
            scan = self.catalog.scan()
            sessions, problems = self.catalog.session_problems()
            with self._lock:
                held = {number: segment.reads for number, segment in self.segments.by_number.items() if segment.reads}
                self.segments.available()  # what was read when it became empty may be free by now
                if not self.read_only:  # what a writer process did since is not in a reader's books
                    problems += segment_problems(self.segments, scan)
                    counted, there = (self._records, self._tokens), (len(scan.entries), scan.token_count)
                    if counted != there:
                        problems.append(f"the disk tier counts (records, tokens) {counted}, the catalog {there}")
                    if self._usage.snapshot() != Usage(scan).snapshot():
                        problems.append("the disk tier counts by namespace what the catalog does not have")
                    counted, there = (self._holes, self._hole_bytes), (len(scan.holes), scan.hole_bytes)
                    if counted != there:
                        problems.append(f"the disk tier counts (holes, bytes of them) {counted}, the catalog {there}")
                    if self.segments.live_bytes > max(self._config.disk.bytes, self._live_at_open):
                        problems.append(f"the disk tier holds {self.segments.live_bytes} bytes, more than its budget")
            problems += [f"catalog entry {key.hex()} is damaged" for key in scan.damaged]
            return Survey(scan, self.catalog.namespaces(), frozenset(self._orphans), sessions, held, tuple(problems))

    def _held(self, entry: Entry, holds: dict[int, Hold | None]) -> bool:
        """Gives the entry the hold of its segment; False where there is no such segment."""
        number = entry.extent.segment
        if number not in holds:
            hold = self.segments.hold(number)
            if hold is None and self.read_only and self.segments.add_for_reading(number):
                hold = self.segments.hold(number)
            holds[number] = hold
        object.__setattr__(entry, "hold", holds[number])
        return holds[number] is not None
