"""What the write-behind threads do with a group: encode it for host and disk, write it, and say what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch

from kvstore.block import Block
from kvstore.codecs import Codec, KVView, codec_by_name
from kvstore.codecs.predictive import PredictiveCodec
from kvstore.codecs.splitzip import SplitZipCodec, codes_on_device, copy_on_cpu
from kvstore.families.coding import DonorCoding
from kvstore.families.matchmaker import Matchmaker
from kvstore.hit import FlushResult
from kvstore.residency import Residency
from kvstore.session import SessionTable
from kvstore.tier_codecs import TierCodecs
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.device import DeviceBlock
from kvstore.tiers.disk.tier import Draft
from kvstore.tiers.host import HostRecord
from kvstore.trie.content import DonorSpan
from kvstore.writeback import Encoded, Job

# A buffer that is this much larger than its record is copied to a smaller one before it is kept.
_SLACK = 1.25


@dataclass(frozen=True)
class _Made:
    """A block's records, None where its tier wants none."""

    host: HostRecord | None
    disk: HostRecord | None


@dataclass(frozen=True)
class Persister:
    """Used by one encoding thread and one writing thread. matchmaker: finds blocks to code others against, None where
    nobody is to look for any; against: codes them so, None where each is to stand alone."""

    residency: Residency
    pool: BufferPool
    executor: Executor
    sessions: SessionTable
    codecs: TierCodecs
    matchmaker: Matchmaker | None
    against: DonorCoding | None

    def encode(self, blocks: Sequence[Block]) -> list[Encoded]:
        """Encodes blocks on the workers; what the device and host tiers keep is in place on return."""
        plans = self.matchmaker.plan(blocks) if self.matchmaker is not None else [()] * len(blocks)
        made = list(self.executor.map(self._encode, blocks, plans))
        for first, last in _runs(blocks):
            self._keep(blocks[first:last], [made_one.host for made_one in made[first:last]])
        self.residency.drop_late(block.record for block in blocks)
        return [Encoded(b, m.disk) for b, m in zip(blocks, made, strict=True) if m.disk is not None]

    def persist(self, group: Sequence[Job], encoded: Sequence[Encoded]) -> FlushResult:
        """Writes a group; afterwards its blocks are no longer pending."""
        residency = self.residency
        drafts = [Draft(e.record.header, e.block.parent, e.record.buffer) for e in encoded]
        sessions = [session for job in group for session in job.sessions]
        replacements = [residency.replaced_by(job.blocks) for job in group]
        written: set[int] = set()
        if residency.disk is not None:
            on_disk = residency.disk.write(
                drafts,
                superseded=replacements,
                changed=[change for job in group for change in job.changed],
                sessions=[(session.key, session.value) for session in sessions],
            )
            if on_disk is None:
                residency.metrics.add("dropped_sessions", len(sessions))
            else:
                written = on_disk
                for session in sessions:
                    self.sessions.written(session)
        dropped = sum(residency.written(job.blocks, written) for job in group)
        return FlushResult(len(written), dropped)

    def _keep(self, run: Sequence[Block], records: Sequence[HostRecord | None]) -> None:
        """Hands the records of one sequence to the host tier, from its root on. Its own beginning is in use while its
        end is added: where memory ends, the end of the sequence is missing and not the beginning."""
        residency, host = self.residency, self.residency.host
        path = residency.path(run[-1].record) or [block.record for block in run]
        tight = host.nbytes + sum(record.nbytes for record in records if record is not None) > host.budget
        for block, record in zip(run, records, strict=True):
            if tight and block.record in path:
                residency.touch(path[: path.index(block.record)])
            if record is not None and residency.is_pending(block.record) and not host.add(block.record, record):
                residency.metrics.add("host_full")
        residency.touch(path)

    def _encode(self, block: Block, spans: Sequence[DonorSpan]) -> _Made:
        residency, config = self.residency, self.residency.config
        if not residency.is_pending(block.record):
            return _Made(None, None)  # deleted or superseded since it was put
        if config.device.bytes:
            self._keep_on_device(block)
        record = None
        if config.host.bytes:
            record = self._encode_with(self.codecs.host, block, lasting=True)
            needed = len(record.buffer.view)
            if record.buffer.capacity > _SLACK * needed:
                smaller = self.pool.take(needed, lasting=True)
                smaller.view[:] = record.buffer.view
                record = type(record)(record.header, smaller)
        if residency.disk is None:
            return _Made(record, None)
        if spans and self.against is not None:
            member = self.against.encode(block, spans)
            if member is not None:
                return _Made(record, member)
        if record is not None and self.codecs.disk is self.codecs.host:
            return _Made(record, record)
        return _Made(record, self._encode_with(self.codecs.disk, block))

    def _keep_on_device(self, block: Block) -> None:
        residency, name = self.residency, self.residency.config.device.codec
        make = DeviceBlock.raw if name == "raw" else DeviceBlock.coded
        self._count_fallback(codec_by_name(name), block.view)
        try:
            made = make(block.info(), block.view)
        except torch.OutOfMemoryError:
            residency.metrics.add("device_full")  # by others: the tier's own budget is not the device's memory
            return
        residency.device.add(block.record, made)

    def _count_fallback(self, codec: Codec, view: KVView) -> None:
        """Counts a block on a device that the CPU coded, though the codec has kernels."""
        if view.on_cpu:
            return
        if isinstance(codec, PredictiveCodec):
            fell_back = not codec.codes_on_device(view)
        else:
            fell_back = codec.id == SplitZipCodec.id and not codes_on_device(view)
        if fell_back:
            self.residency.metrics.add("fallback_device_codec")

    def _encode_with(self, codec: Codec, block: Block, lasting: bool = False) -> HostRecord:
        try:
            record = block.encode(codec, self.pool, lasting)
            self._count_fallback(codec, block.view)  # now: a device may have failed at this very block
        except torch.OutOfMemoryError:
            self.residency.metrics.add("fallback_device_codec")
            record = replace(block, view=copy_on_cpu(block.view)).encode(codec, self.pool, lasting)
        fallbacks = codec.fallbacks(record.payload, record.header.layer_sizes)
        if fallbacks:
            self.residency.metrics.add("fallback_raw_chunks", fallbacks)
        return record


def _runs(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Index ranges of blocks that continue each other."""
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i].parent != blocks[i - 1].record:
            yield first, i
            first = i
