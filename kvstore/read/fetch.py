"""Brings the blocks of a prefix together: reads those that are in storage, checks them, decodes all into the result.

Every block goes straight into its slice of the result. Records that follow each other on disk are read with one
call, and reading some of them overlaps with decoding others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from kvstore.codecs import KVView
from kvstore.codecs.in_order import TOGETHER
from kvstore.codecs.registry import gains_together, only_copies
from kvstore.config import MIB
from kvstore.core.record import DamagedRecord
from kvstore.core.workers import Workers
from kvstore.gate.gate import Gate
from kvstore.gate.load import TENSORS
from kvstore.metrics import Metric
from kvstore.read.ahead import AheadReader, Batch, Batches
from kvstore.read.block_read import BlockRead
from kvstore.read.copies import ENOUGH_BYTES, Copies
from kvstore.read.decode import BlockDecoder, check_record
from kvstore.read.decode_times import DecodeTimes
from kvstore.read.layerwise import LayerDecode
from kvstore.read.place import place_of
from kvstore.read.records import Found, RecordDecode
from kvstore.read.stripes import Finishing, StripedBlock, Striping, decode_first, first_bytes, parts_of
from kvstore.residency.residency import Residency
from kvstore.tiers.base import SealedSource, Source, StorageTier, TensorSource
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.disk.fs import is_passing
from kvstore.tiers.host import HostRecord
from kvstore.timing import Timing

# Larger reads are no faster; smaller ones leave more to overlap, and need less memory for what is being decoded.
_READ_BYTES = 2 * MIB
# But for blocks that are decoded sooner together.
_TOGETHER_BYTES = 12 * MIB
# A copy within memory of a block that is no larger keeps the GIL (`KVView.copy_to`): other threads cannot help then,
# and one that takes part only makes the get wait for it. Checking a record first changes little in that.
_BRIEF_COPY_BYTES = 1 * MIB
_IN_MEMORY = ("queue", "host")
# So many records for the host tier wait for each other: a change of threads for each would be what a get waits for.
_KEPT_AT_ONCE = 16
_NO_TURN = contextlib.nullcontext()


@dataclass(frozen=True)
class Begun:
    """Blocks that are being read.

    Attributes:
        ranges: of their indexes, what is worked on together.
        ahead: what reads those of a tier, by its name; those of other tiers are read when they are wanted.
        striping: how their later layers are read; None if the records are read whole.
    """

    ranges: Sequence[range]
    ahead: Mapping[str, AheadReader]
    striping: Striping | None = None


@dataclass(frozen=True)
class Fetcher:
    """Reads and decodes the blocks of a prefix. Thread-safe.

    Records that are read a second time (see `SecondRead`) are kept in the host tier as they are, coded as in storage: a
    record names its codec, and decoding it again costs less than coding it anew.

    Attributes:
        pool: memory for records.
        results: memory for what they are decoded into.
        executor: its threads read and decode beside the caller's, before anything else that they are to do; more of
            them than `threads` let reads overlap.
        threads: how many may decode at once.
        gate: is told what reading and decoding took.
        finishing: who still reads layers of what was fetched; to be finished before the tiers are closed.
    """

    residency: Residency
    pool: BufferPool
    results: BufferPool
    executor: Workers
    threads: int
    decoder: BlockDecoder
    gate: Gate
    finishing: Finishing = field(default_factory=Finishing)

    def begin(self, reads: Sequence[BlockRead], keep_all: bool = False, by_layers: int = 0) -> Begun:
        """Begin to read blocks, for `fetch`, while the memory is made that they are decoded into.

        Args:
            reads: as for `fetch`.
            keep_all: whether the host tier is to have every record.
            by_layers: how many layers are wanted one after another. Then only the beginnings may be read, if that pays;
                0 if all are wanted at once.
        """
        batches, ahead = self.batches(reads, keep_all), dict[str, AheadReader]()
        if by_layers:
            stored = [read for read in reads if read.source.tier in self.residency.storage]
            kept = {read.record: batches.is_kept(read) for read in stored}  # asked once: it counts
            batches = replace(batches, is_kept=lambda read: kept[read.record])
        how = None if not by_layers or any(kept.values()) else self._striping(reads, by_layers)
        ranges = self._ranges(reads, 0 if how is None else how.layers)
        for name, tier in self.residency.storage.items():
            here = [indexes for indexes in ranges if reads[indexes.start].source.tier == name]
            if how is not None and how.tier is tier:
                ahead[name] = AheadReader(replace(batches, layers=how.layers), here, how.reads)
                continue
            begins = tier.reads_ahead() if here else None
            if begins is not None:
                ahead[name] = AheadReader(batches, here, begins)
        return Begun(ranges, ahead, how)

    def _striping(self, reads: Sequence[BlockRead], layers: int) -> Striping | None:
        """How records are read of which the first layers are wanted first; None if they are read whole."""
        for name, tier in self.residency.storage.items():
            parts = parts_of([read for read in reads if read.source.tier == name], layers)
            begins = tier.reads_parts() if parts > 1 else None
            if begins is not None:
                return Striping(layers, parts, tier, begins, self.pool, self.residency.metrics, self.finishing)
        return None

    def fetch(
        self,
        reads: Sequence[BlockRead],
        out: KVView | None,
        origin: int = 0,
        later: LayerDecode | None = None,
        begun: Begun | None = None,
    ) -> tuple[int, dict[str, int]]:
        """Decode the blocks into `out`, and release their sources.

        Args:
            reads: blocks that continue each other, at least one.
            out: where their tokens go; None: only read and check the blocks, and keep them in the host tier.
            origin: position of the first token of `out`.
            later: takes the records whose layers decode one by one; only the first layers of these are decoded here.
            begun: what `begin` returned for these blocks, if it was called.

        Returns:
            How many leading blocks are good, and tokens by tier of those. Damaged and lost records never raise; they
            are counted and quarantined.
        """
        begun = self.begin(reads, keep_all=out is None) if begun is None else begun
        spans = self.residency.metrics.spans
        alone = all(self._is_brief(read, begun.ahead) for read in reads)
        times = DecodeTimes(self.residency.metrics, self.gate, None if spans is None else spans.here())
        copies = None
        if alone and later is None and out is not None and out.on_cpu and not out.layout.is_grouped:
            copies = Copies(out, origin, times)
            for reader in begun.ahead.values():
                reader.settle(ENOUGH_BYTES)
        decode = None if out is None else RecordDecode(self.decoder, out, origin, times, later, copies)
        task = ReadTask(self, reads, decode, begun.ahead, alone)
        # Where reading takes no threads, those are enough that decode.
        most = max(2, self.threads) if begun.ahead else None
        share, ranges = self.executor.share, begun.ranges
        try:
            outcomes = [task(indexes) for indexes in ranges] if alone else share(task, ranges, most)
            promoted = self.residency.own.begin(task.promote) if task.kept else None
            if copies is not None:
                copies.make()  # without Python's lock, so that the other thread has it
        finally:
            task.release()
        task.tell(self.gate)
        if promoted is not None:
            promoted.result()
        bad = {index for outcome in outcomes for index in outcome}
        good = min(bad, default=len(reads))
        # What was promoted came in any order: put the beginning of the prefix before its end again.
        self.residency.touch([read.record for read in reads[:good] if read.record])
        tiers: dict[str, int] = {}
        for read in reads[:good]:
            tiers[read.source.tier] = tiers.get(read.source.tier, 0) + len(read.tokens)
        return good, tiers

    def batches(self, reads: Sequence[BlockRead], keep_all: bool) -> Batches:
        """Return what takes memory for reads; keep_all: the host tier is to have every record."""
        residency = self.residency

        def is_kept(read: BlockRead) -> bool:
            if not residency.host.budget:
                return False
            return keep_all or residency.host_admission.again(read.record, read.source.nbytes)

        return Batches(reads, self.pool, is_kept)

    def _is_brief(self, read: BlockRead, ahead: Mapping[str, AheadReader]) -> bool:
        """Whether the block is only copied within memory, in a moment, once what is under way has been read."""
        source = read.source
        if len(read.tokens) * self.gate.load.bytes_per_token > _BRIEF_COPY_BYTES:
            return False
        if source.tier in ahead:
            return source.codec_id is not None and only_copies(source.codec_id)
        if source.tier not in _IN_MEMORY:
            return False
        sealed = source.sealed
        return sealed is None or len(sealed.payload) == sealed.header.raw_bytes  # else it is decoded

    def _ranges(self, reads: Sequence[BlockRead], layers: int) -> list[range]:
        """What to work on together: neighbours in storage, and even shares of what is in memory. layers: of records of
        which only the first is read; 0 if they are read whole."""
        share = max(1, -(-len(reads) // (2 * self.threads)))
        storage = self.residency.storage
        ranges: list[range] = []
        first = size = 0
        for i, read in enumerate(reads):
            few = i - first < TOGETHER and gains_together(read.source.codec_id)
            enough = size >= (_TOGETHER_BYTES if few else _READ_BYTES) or i - first >= share
            if i > first and (enough or not _neighbours(storage, reads[i - 1].source, read.source)):
                ranges.append(range(first, i))
                first, size = i, 0
            size += first_bytes(read.source, layers) if read.source.tier in storage else 0
        ranges.append(range(first, len(reads)))
        return ranges


@dataclass(frozen=True)
class ReadTask:
    """Reads and decodes a range of the blocks of one fetch. Thread-safe for ranges that do not overlap.

    Calling it with a range of indexes returns the indexes of the blocks that failed. decode: None if they are only
    read; alone: whether one thread works on all ranges, which then releases all sources at once: each time it may wait
    for a lock.
    """

    fetcher: Fetcher
    reads: Sequence[BlockRead]
    decode: RecordDecode | None
    ahead: Mapping[str, AheadReader] = field(default_factory=dict)  # see `Begun`; not of what is looked up again
    alone: bool = False
    first: bool = True  # False where a record is read again, which is no second read for the host tier
    turns: int = 3  # how often a record is looked up again that a writer process moves while it is read
    kept: deque[tuple[int, HostRecord]] = field(default_factory=deque)  # records for the host tier; see `promote`
    _done: list[tuple[str, int, float, float]] = field(default_factory=list)  # reads: tier, bytes, begin and end
    _read_from: dict[str, list[Source]] = field(default_factory=dict)  # what is to be released, by tier
    # Two large reads keep a disk busy; more at once would end together, with nothing to decode meanwhile. What a remote
    # engine takes is mostly waiting, so there all may be under way. Locks, for an interrupt can take the wake-up of a
    # semaphore along.
    _turns: tuple[threading.Lock, ...] = field(default_factory=lambda: (threading.Lock(), threading.Lock()))
    _large: Iterator[int] = field(default_factory=count)  # numbers of the large reads

    def tell(self, gate: Gate) -> None:
        """Tell the gate what all reads from a tier took together."""
        for tier in {tier for tier, *_ in self._done}:
            here = [(nbytes, begin, end) for name, nbytes, begin, end in self._done if name == tier]
            seconds = max(end for _, _, end in here) - min(begin for _, begin, _ in here)
            gate.observe_read(tier, sum(nbytes for nbytes, _, _ in here), seconds)

    def release(self) -> None:
        """Release the sources of what was read; after the last range."""
        while self._read_from:
            name, sources = self._read_from.popitem()
            self.fetcher.residency.storage[name].release(sources)

    def promote(self) -> None:
        """Lend the records that were read, and are to be kept, to the host tier: several with one change of threads."""
        residency = self.fetcher.residency
        while self.kept:
            try:
                record, item = self.kept.popleft()
            except IndexError:  # another thread took the last one
                return
            if residency.host.add(record, item):
                residency.metrics.add(Metric.PROMOTED_RECORDS)
                if record not in residency.index:
                    residency.host.remove([record])  # deleted while it was read

    def __call__(self, indexes: range) -> list[int]:
        tier = self.fetcher.residency.storage.get(self.reads[indexes.start].source.tier) if indexes else None
        if tier is not None:
            return self._from_storage(tier, indexes)
        return [] if self.decode is None else self._from_memory(self.decode, indexes)

    def _from_memory(self, decode: RecordDecode, indexes: range) -> list[int]:
        bad, sealed = [], list[int]()
        for i in indexes:
            tensors = self.reads[i].source.tensors
            if tensors is None:
                sealed.append(i)
            elif not self._copied(decode, self.reads[i], tensors):
                bad.append(i)
        return bad + self._decoded(decode, sealed, [self.reads[i].source.sealed for i in sealed])

    def _copied(self, decode: RecordDecode, read: BlockRead, tensors: TensorSource) -> bool:
        begin, target = time.perf_counter(), decode.target(read)
        good = self.fetcher.decoder.copy(read, tensors, target)
        self.fetcher.gate.observe_decode(TENSORS, len(read.tokens), time.perf_counter() - begin)
        return good

    def _decoded(
        self, decode: RecordDecode, indexes: Sequence[int], records: Sequence[SealedSource | None]
    ) -> list[int]:
        """Decodes records; which of them are bad."""
        found: list[Found] = []
        for i, record in zip(indexes, records, strict=True):
            assert record is not None
            found.append((self.reads[i], record))
        return [i for i, good in zip(indexes, decode.decode(found), strict=True) if not good]

    def _from_storage(self, tier: StorageTier[Any], indexes: range) -> list[int]:
        ahead = self.ahead.get(tier.name)
        own = self.fetcher.batches(self.reads, keep_all=self.decode is None)
        own = own if self.first else replace(own, is_kept=lambda read: self.decode is None)
        batch = own.of(indexes) if ahead is None else ahead.take(indexes)
        held = set[int]()  # records of which only the beginning was read
        try:
            can_be_read = self._tried(tier, indexes, batch)
            rows = zip(indexes, batch.buffers, can_be_read, strict=True)
            held.update([i for i, buffer, good in rows if good and self._is_beginning(i, buffer)])
        finally:
            self._release(tier, [self.reads[i].source for i in indexes if i not in held])
        whole, bad, beginnings = dict[int, HostRecord](), list[int](), dict[int, memoryview]()
        for i, buffer, good in zip(indexes, batch.buffers, can_be_read, strict=True):
            record = self._checked(self.reads[i], buffer) if good and i not in held else None
            if record is not None:
                whole[i] = record
            elif i in held:
                beginnings[i] = buffer.view
            else:
                bad.append(i)
        if self.decode is not None:
            bad += self._decoded(self.decode, list(whole), list(whole.values()))
            bad += self._begun(tier, beginnings, self.decode, self.decode.later) if beginnings else []
        for i, keep in zip(indexes, batch.kept, strict=True):
            if keep and i in whole and i not in bad:
                self._keep(self.reads[i], whole[i])
        return [i for i in bad if not self._read_where_it_moved(tier, self.reads[i])]

    def _is_beginning(self, i: int, buffer: Buffer) -> bool:
        return len(buffer.view) < self.reads[i].source.nbytes

    def _release(self, tier: StorageTier[Any], sources: Sequence[Source]) -> None:
        if self.alone:
            self._read_from.setdefault(tier.name, []).extend(sources)
        else:
            tier.release(sources)

    def _begun(
        self, tier: StorageTier[Any], found: Mapping[int, memoryview], decode: RecordDecode, later: LayerDecode | None
    ) -> list[int]:
        """Decodes the first layers of records of which only the beginnings were read; which of them are bad. The
        sources of the others are held until nobody has them any more."""
        assert later is not None
        cpu, opened = time.thread_time(), list[tuple[StripedBlock, memoryview]]()
        bad, again = set[int](), list[int]()
        for i, data in found.items():
            try:
                block = StripedBlock.of(
                    self.reads[i], i, data, self.fetcher.decoder.profiles, decode.out, decode.origin
                )
                if block is None or not block.begins_with(later.first, data):
                    again.append(i)
                else:
                    opened.append((block, data))
            except DamagedRecord as damage:
                self._reject(self.reads[i], damage.metric)
                bad.add(i)
        for block, why in decode_first(opened, later.first, decode.out):
            self._reject(block.read, why)
            bad.add(block.number)
        seconds = (time.thread_time() - cpu) / max(1, len(opened))
        for block, _ in opened:
            if block.number not in bad:
                later.hold_striped(block, seconds)
        tier.release([self.reads[i].source for i in bad])
        once_more = replace(self, ahead={}, alone=False, first=False)
        for i in again:
            self.fetcher.residency.metrics.add(Metric.FALLBACK_READ_TWICE)
            bad.update(once_more(range(i, i + 1)))
        return sorted(bad)

    def _tried(self, tier: StorageTier[Any], indexes: range, batch: Batch) -> list[bool]:
        """Reads a batch; whether each block of it can be read."""
        try:
            self._read(tier, batch)
        except OSError as error:
            self.fetcher.residency.metrics.add(Metric.DISK_READ_ERRORS, because=error)
        else:
            return [True] * len(batch.sources)
        # One bad sector fails the whole read: find out whose it is.
        rows = zip(indexes, batch.sources, batch.buffers, strict=True)
        return [self._reads_alone(tier, i, source, buffer) for i, source, buffer in rows]

    def _reads_alone(self, tier: StorageTier[Any], i: int, source: Source, buffer: Buffer) -> bool:
        """Whether a block can be read. Its error is not kept: it refers to all that this fetch has."""
        try:
            tier.read([source], [buffer])
        except OSError as error:
            if not is_passing(error):
                self._reject(self.reads[i], Metric.DAMAGED_UNREADABLE)
            return False
        return True

    def _read(self, tier: StorageTier[Any], batch: Batch) -> None:
        nbytes, begin = batch.nbytes, batch.begin
        waiting = time.perf_counter()
        if not batch.wait():
            large = nbytes >= _READ_BYTES and tier.name == "disk"
            with self._turns[next(self._large) % len(self._turns)] if large else _NO_TURN:
                begin = waiting = time.perf_counter()
                batch.read(tier)
        end = time.perf_counter()
        self.fetcher.residency.metrics.timings.observe(Timing.READ, end - waiting, place_of(batch.sources))
        self._done.append((tier.name, nbytes, begin, end))

    def _read_where_it_moved(self, tier: StorageTier[Any], read: BlockRead) -> bool:
        """Reads a block again that a writer process moved while it was read here; whether that was so, and it is
        good."""
        residency = self.fetcher.residency
        if not self.turns or read.record not in residency.index or tier.is_current(read.source):
            return False
        source = residency.find([read.record])[0]
        if source is None:
            return False
        reads, turns = [replace(read, source=source)], self.turns - 1
        again = replace(self, reads=reads, ahead={}, alone=False, first=False, turns=turns)
        return not again(range(1))

    def _checked(self, read: BlockRead, buffer: Buffer) -> HostRecord | None:
        """The record that was read, if it is whole and the right one."""
        try:
            return HostRecord(check_record(read, buffer.view), buffer)
        except DamagedRecord as damage:
            self._reject(read, damage.metric)
            return None

    def _keep(self, read: BlockRead, record: HostRecord) -> None:
        """Note a record for the host tier, which is to have its buffer."""
        self.kept.append((read.record, record))
        if len(self.kept) >= _KEPT_AT_ONCE:
            self.fetcher.residency.own.run(self.promote)

    def _reject(self, read: BlockRead, why: Metric) -> None:
        self.fetcher.residency.reject(read.record, read.source, why)


def _neighbours(storage: dict[str, StorageTier[Any]], before: Source, source: Source) -> bool:
    tier = storage.get(source.tier)
    if tier is None:
        return before.tier not in storage
    return before.tier == source.tier and tier.follows(before, source)
