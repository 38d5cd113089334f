"""A disk tier alone, with something small in the place of the index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from kvcases import identity

from kvstore import StoreConfig, TierConfig
from kvstore.config import KIB
from kvstore.core.keys import chain_key
from kvstore.core.record import RecordHeader, padded, seal
from kvstore.metrics import Metrics
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk.budget import BESIDE_BYTES
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.writes import SealedRecord

SEGMENT = 64 * KIB
NAMESPACE = b"n" * 32


class Harness:
    """A disk tier, and in the place of the index: what is stored, oldest first."""

    def __init__(self, path: Path, segments: int = 8, read_only: bool = False, fs: FileSystem | None = None) -> None:
        self.metrics = Metrics()
        self.pool = BufferPool(1 << 20)
        self.order: list[int] = []
        self.pinned: set[int] = set()
        self.dead: set[int] = set()
        config = StoreConfig(
            disk=TierConfig(segments * SEGMENT + BESIDE_BYTES, "raw"), segment_bytes=SEGMENT, block_tokens=4
        )
        self.tier = DiskTier(
            fs or FileSystem(), str(path), identity(), config, read_only, self.metrics, self.pool, self._evict,
            alive=lambda record: record not in self.dead,
        )  # fmt: skip

    def draft(self, number: int, nbytes: int = 3000, **changes: Any) -> SealedRecord:
        ids = np.arange(number, number + 4, dtype=np.uint32)
        fields: dict[str, Any] = {
            "key": chain_key(b"r" * 32, ids), "parent": b"r" * 32, "namespace": NAMESPACE, "codec": 0,
            "record_id": number, "start": 0, "tokens": ids, "layer_sizes": (nbytes,), "raw_bytes": nbytes,
        }  # fmt: skip
        header = RecordHeader(**{**fields, **changes})
        buffer = self.pool.take(padded(header.record_bytes))
        buffer.view[header.payload_offset : header.record_bytes] = payload(number, nbytes)
        seal(header, buffer.view)
        return SealedRecord(header, 0, buffer)

    def write(self, *numbers: int, nbytes: int = 3000, **settings: Any) -> set[int] | None:
        self.order += numbers
        return self.tier.write([self.draft(number, nbytes) for number in numbers], **settings)

    def payload(self, number: int) -> bytes | None:
        (entry,) = self.tier.locate([number])
        if entry is None:
            return None
        buffer = self.pool.take(entry.extent.nbytes)
        try:
            self.tier.read([entry], [buffer])
        finally:
            self.tier.release([entry])
        header = self.draft(number, entry.extent.nbytes).header
        return bytes(buffer.view[header.payload_offset :])

    def _evict(self) -> list[int]:
        for number in self.order:
            if number not in self.pinned:
                self.order.remove(number)
                return [number]
        return []


def payload(number: int, nbytes: int) -> bytes:
    return (number.to_bytes(4, "little") * (-(-nbytes // 4)))[:nbytes]
