"""Encoded records in host memory, in the same bytes as on disk."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.record import RecordHeader, payload_of
from kvstore.tiers.base import SealedSource, Source
from kvstore.tiers.buffers import Buffer
from kvstore.tiers.memory import MemoryTier


@dataclass(frozen=True)
class HostRecord(Source):
    """A record in a pooled buffer. The header was checked when the record was made or read."""

    header: RecordHeader
    buffer: Buffer

    @property
    def nbytes(self) -> int:
        """What the record costs the tier: the memory taken, not only the bytes used."""
        return self.buffer.capacity

    @property
    def payload(self) -> memoryview:
        return payload_of(self.header, self.buffer.view)

    @property
    def tier(self) -> str:
        return "host"

    @property
    def codec_id(self) -> int | None:
        return self.header.codec

    @property
    def sealed(self) -> SealedSource | None:
        return self


HostTier = MemoryTier[HostRecord]
