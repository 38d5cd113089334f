"""What the write-behind threads do with a group: encode it for host and disk, write it, and say what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kvstore.block import Block
from kvstore.codecs import codec_by_name
from kvstore.hit import FlushResult
from kvstore.residency import Residency
from kvstore.session import SessionTable
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.device import DeviceBlock
from kvstore.tiers.disk.tier import Draft
from kvstore.writeback import Encoded, Job

# A buffer that is this much larger than its record is copied to a smaller one before it is kept.
_SLACK = 1.25


@dataclass(frozen=True)
class Persister:
    """Used by one encoding thread and one writing thread."""

    residency: Residency
    pool: BufferPool
    executor: Executor
    sessions: SessionTable

    def encode(self, blocks: Sequence[Block]) -> list[Encoded]:
        """Encodes blocks on the workers; what the device and host tiers keep is in place on return."""
        return [encoded for encoded in self.executor.map(self._encode, blocks) if encoded is not None]

    def persist(self, group: Sequence[Job], encoded: Sequence[Encoded]) -> FlushResult:
        """Writes a group; afterwards its blocks are no longer pending."""
        residency = self.residency
        drafts = [Draft(e.record.header, e.block.parent, e.record.buffer) for e in encoded]
        sessions = [session for job in group for session in job.sessions]
        written: set[int] = set()
        if residency.disk is not None:
            on_disk = residency.disk.write(
                drafts,
                superseded=[record for job in group for record in job.superseded],
                changed=[change for job in group for change in job.changed],
                sessions=[(session.key, session.value) for session in sessions],
            )
            if on_disk is None:
                residency.metrics.add("dropped_sessions", len(sessions))
            else:
                written = on_disk
                for session in sessions:
                    self.sessions.written(session)
        dropped = 0
        for job in group:
            for block in job.blocks:
                wanted = residency.pending.pop(block.record, None) is not None
                if wanted and block.record not in written:
                    dropped += residency.disk is not None
                    residency.drop_if_nowhere(block.record)
        return FlushResult(len(written), dropped)

    def _encode(self, block: Block) -> Encoded | None:
        residency, config = self.residency, self.residency.config
        if block.record not in residency.pending:
            return None  # deleted or superseded since it was put
        if config.device.bytes:
            residency.device.add(block.record, DeviceBlock.copy_of(block.view))
        record = None
        if config.host.bytes:
            record = block.encode(codec_by_name(config.host.codec), self.pool)
            needed = len(record.buffer.view)
            if record.buffer.capacity > _SLACK * needed:
                smaller = self.pool.take(needed)
                smaller.view[:] = record.buffer.view
                record = type(record)(record.header, smaller)
            residency.host.add(block.record, record)
        if residency.disk is None:
            return None
        if record is None or config.disk.codec != config.host.codec:
            record = block.encode(codec_by_name(config.disk.codec), self.pool)
        return Encoded(block, record)
