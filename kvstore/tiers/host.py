"""Encoded records in host memory, in the same bytes as on disk."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.record import RecordHeader, payload_of
from kvstore.tiers.base import SealedSource, Source
from kvstore.tiers.buffers import Buffer
from kvstore.tiers.memory import MemoryTier


@dataclass(frozen=True)
class HostRecord(Source):
    """A record in a pooled buffer. Immutable.

    Attributes:
        header: checked when the record was made or read.
        buffer: the whole record.

    Example:
        >>> import numpy as np
        >>> from kvstore.core.record import NO_KEY, seal
        >>> from kvstore.tiers.buffers import BufferPool
        >>> tokens = np.array([1, 2], np.uint32)
        >>> header = RecordHeader(NO_KEY, NO_KEY, NO_KEY, 0, 1, start=0, tokens=tokens, layer_sizes=(8,), raw_bytes=8)
        >>> record = HostRecord(header, BufferPool(keep_bytes=0).take(header.record_bytes))
        >>> seal(header, record.buffer.view)
        >>> record.nbytes, len(record.payload)
        (4096, 8)
    """

    header: RecordHeader
    buffer: Buffer

    @property
    def nbytes(self) -> int:
        """What the record costs the tier: the memory taken, not only the bytes used."""
        return self.buffer.capacity

    @property
    def data(self) -> memoryview:
        """All bytes of the record, without the padding; a view, good as long as the record is referred to."""
        return self.buffer.view[: self.header.record_bytes]

    @property
    def payload(self) -> memoryview:
        """The coded layers; a view, not a copy."""
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
