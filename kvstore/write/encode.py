"""What becomes of a group of blocks before it is written: device copies, host records, and records for the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvstore.codecs import Codec, KVView, codec_by_name
from kvstore.codecs.device import falls_back, own_stream
from kvstore.config import MIB
from kvstore.core.precedence import Precedence
from kvstore.core.workers import Workers
from kvstore.dedup.encode import DonorCoding
from kvstore.dedup.match import DonorMatcher
from kvstore.metrics import Metric
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.codecs import NewCodecs
from kvstore.tiers.device import DeviceBlock
from kvstore.tiers.disk.writes import SealedRecord
from kvstore.tiers.host import HostRecord
from kvstore.trie.content import DonorSpan
from kvstore.write.recent import RecentBlocks

# A buffer that is this much larger than its record is copied to a smaller one before it is kept.
_SLACK = 1.25
_PART_BYTES, _LEAST_PARTS = 1 * MIB, 8
# So much is copied by one call: longer than others need Python's lock, and shorter than a put should wait.
_COPIED_BYTES = 8 * MIB


@dataclass(frozen=True)
class Encoder:
    """Encodes groups of blocks, one group after the other. For one thread, which encodes on those of `executor`.

    Attributes:
        codecs: what the host and the disk tier keep blocks in.
        matcher: finds stored blocks to code new ones against; None if nothing is coded against others.
        against: codes blocks so; None if each is to stand alone.
        recent: the blocks that are exact because they are recent.
        precedence: of puts, to which the coding of a block gives way before it begins.
    """

    residency: Residency
    pool: BufferPool
    executor: Workers
    codecs: NewCodecs
    matcher: DonorMatcher | None
    against: DonorCoding | None
    recent: RecentBlocks
    precedence: Precedence

    def encode(self, blocks: Sequence[Block]) -> list[SealedRecord]:
        """Return the records for the disk; what the device and the host tier keep is in place on return.

        Blocks that were deleted or replaced since they were put have no record.
        """
        plans = self.matcher.plan(blocks) if self.matcher is not None else [()] * len(blocks)
        if self._is_brief(blocks):
            parts = _parts(blocks, _COPIED_BYTES)
            made = [record for a, b in parts for record in self._copy_all(blocks[a:b], plans[a:b])]
        else:
            parts = _parts(blocks, min(_PART_BYTES, sum(block.nbytes for block in blocks) // _LEAST_PARTS))
            coded = self.executor.map(self._encode_all, *([rows[a:b] for a, b in parts] for rows in (blocks, plans)))
            made = [records for part in coded for records in part]
        for first, last in _chains(blocks):
            self._keep(blocks[first:last], [host for host, _ in made[first:last]])
        self.residency.drop_late(block.record for block in blocks)
        return [
            SealedRecord(disk.header, block.parent, disk.buffer)
            for block, (_, disk) in zip(blocks, made, strict=True)
            if disk is not None
        ]

    def _is_brief(self, blocks: Sequence[Block]) -> bool:
        """Whether small blocks are only copied: threads that share them wait for Python's lock longer than one copies
        all of them."""
        config, codecs = self.residency.config, self.codecs
        used = [codecs.disk] * bool(config.disk.bytes) + [codecs.host] * bool(config.host.bytes)
        small = sum(block.nbytes for block in blocks) < _PART_BYTES * len(blocks)
        return small and not config.device.bytes and all(codec.copies and codec.exact for codec in used)

    def _keep(self, chain: Sequence[Block], records: Sequence[HostRecord | None]) -> None:
        """Hands the records of one sequence to the host tier, from its root on. Its own beginning is in use while its
        end is added: where memory ends, the end of the sequence is missing and not the beginning."""
        residency, host = self.residency, self.residency.host
        path = residency.path(chain[-1].record) or [block.record for block in chain]
        tight = host.nbytes + sum(record.nbytes for record in records if record is not None) > host.budget
        for block, record in zip(chain, records, strict=True):
            if tight and block.record in path:
                residency.touch(path[: path.index(block.record)])
            if record is not None and residency.queued(block.record) is not None and not host.add(block.record, record):
                residency.metrics.add(Metric.HOST_FULL)
        residency.touch(path)

    def _encode_all(
        self, blocks: Sequence[Block], plans: Sequence[Sequence[DonorSpan]]
    ) -> list[tuple[HostRecord | None, HostRecord | None]]:
        return [self._encode(block, spans) for block, spans in zip(blocks, plans, strict=True)]

    def _copy_all(
        self, blocks: Sequence[Block], plans: Sequence[Sequence[DonorSpan]]
    ) -> list[tuple[HostRecord | None, HostRecord | None]]:
        """As `_encode_all`, for codecs that only copy: together, for whoever lets go of Python's lock for each block
        has to wait for it as often."""
        self.precedence.give_way()
        residency, lasting = self.residency, bool(self.residency.config.host.bytes)
        codec = self.codecs.disk if residency.config.disk.bytes else self.codecs.host
        plain = [
            block
            for block, spans in zip(blocks, plans, strict=True)
            if not spans and block.sealed_as is None and block.view.on_cpu and residency.queued(block.record)
        ]
        copies = Block.copy_all(plain, codec, self.pool, lasting) if plain else []
        records = dict(zip((block.record for block in plain), copies, strict=True))
        made = []
        for block, spans in zip(blocks, plans, strict=True):
            record = records.get(block.record)
            if record is None:
                made.append(self._encode(block, spans))
                continue
            host = self._compact(record) if lasting else None
            made.append((host, (host or record) if residency.disk is not None else None))
        return made

    def _encode(self, block: Block, spans: Sequence[DonorSpan]) -> tuple[HostRecord | None, HostRecord | None]:
        """The records for the host and the disk tier, None where the tier wants none; made beside what the model
        computes meanwhile, if that is on a GPU."""
        self.precedence.give_way()
        with own_stream(block.view):
            return self._records_of(block, spans)

    def _records_of(self, block: Block, spans: Sequence[DonorSpan]) -> tuple[HostRecord | None, HostRecord | None]:
        residency, config = self.residency, self.residency.config
        if residency.queued(block.record) is None:
            return None, None  # deleted or superseded since it was put
        if config.device.bytes:
            self._keep_on_device(block)
        if block.sealed_as is not None:
            kept = self._compact(block.sealed_as) if config.host.bytes else None
            return kept, block.sealed_as if residency.disk is not None else None
        host, disk = (self.recent.codec(codec, block.record) for codec in (self.codecs.host, self.codecs.disk))
        record = None
        if config.host.bytes:
            record = self._compact(self._encode_with(host, block, lasting=True))
        if residency.disk is None:
            return record, None
        if spans and self.against is not None:
            member = self.against.encode(block, spans)
            if member is not None:
                return record, member
        if record is not None and disk is host:
            return record, record
        return record, self._encode_with(disk, block)

    def _compact(self, record: HostRecord) -> HostRecord:
        """The same record in no more memory than it needs."""
        needed = len(record.buffer.view)
        if record.buffer.capacity <= _SLACK * needed:
            return record
        smaller = self.pool.take(needed, lasting=True)
        smaller.view[:] = record.buffer.view
        return HostRecord(record.header, smaller)

    def _keep_on_device(self, block: Block) -> None:
        residency, name = self.residency, self.residency.config.device.codec
        make = DeviceBlock.raw if name == "raw" else DeviceBlock.coded
        self._count_fallback(codec_by_name(name), block.view)
        try:
            made = make(block.info(), block.view)
        except torch.OutOfMemoryError:
            residency.metrics.add(Metric.DEVICE_FULL)  # by others: the tier's own budget is not the device's memory
            return
        residency.device.add(block.record, made)

    def _count_fallback(self, codec: Codec, view: KVView) -> None:
        """Counts a block on a device that the CPU coded, though the codec has kernels."""
        if falls_back(codec, view):
            self.residency.metrics.add(Metric.FALLBACK_DEVICE_CODEC)

    def _encode_with(self, codec: Codec, block: Block, lasting: bool = False) -> HostRecord:
        try:
            record = block.encode(codec, self.pool, lasting)
            self._count_fallback(codec, block.view)  # now: a device may have failed at this very block
        except torch.OutOfMemoryError:
            self.residency.metrics.add(Metric.FALLBACK_DEVICE_CODEC)
            record = block.fetched().encode(codec, self.pool, lasting)
        fallbacks = codec.fallbacks(record.payload, record.header.layer_sizes)
        if fallbacks:
            self.residency.metrics.add(Metric.FALLBACK_RAW_CHUNKS, fallbacks)
        return record


def _parts(blocks: Sequence[Block], enough: int) -> list[tuple[int, int]]:
    """Index ranges of blocks, of so many bytes, that one thread codes at a time: a change of threads takes as long as a
    small block."""
    parts, first, nbytes = [], 0, 0
    for i, block in enumerate(blocks, 1):
        nbytes += block.nbytes
        if nbytes >= enough or i == len(blocks):
            parts.append((first, i))
            first, nbytes = i, 0
    return parts


def _chains(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Index ranges of blocks that continue each other."""
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i].parent != blocks[i - 1].record:
            yield first, i
            first = i
