"""Encoded records in host memory, in the same bytes as on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.record import RecordHeader, payload_of
from kvstore.tiers.base import SealedSource, TensorSource
from kvstore.tiers.buffers import Buffer
from kvstore.tiers.memory import MemoryTier


@dataclass(frozen=True)
class HostRecord:
    """A record in a pooled buffer: a `Source`. The header was checked when the record was made or read."""

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
    def donors(self) -> Sequence[int] | None:
        return None

    @property
    def tensors(self) -> TensorSource | None:
        return None

    @property
    def sealed(self) -> SealedSource | None:
        return self


HostTier = MemoryTier[HostRecord]
