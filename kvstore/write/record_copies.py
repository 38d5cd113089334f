"""Copies what a put brings straight into the records that are written, where the codec does nothing but copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.codecs import Codec, KVView, codec_by_name, codec_names
from kvstore.config import StoreConfig
from kvstore.core.layout import KVLayout
from kvstore.residency.block import Block
from kvstore.tiers.buffers import BufferPool


@dataclass(frozen=True)
class RecordCopies:
    """Otherwise the caller's tensors would be copied twice: for the queue, and into the record. Thread-safe.

    Attributes:
        codec: of all tiers that the store has, one that only copies.
        lasting: whether memory keeps the records.
    """

    codec: Codec
    pool: BufferPool
    lasting: bool

    @classmethod
    def of(cls, config: StoreConfig, layout: KVLayout, pool: BufferPool) -> RecordCopies | None:
        """Return what the settings allow; None where records are not copies, or each tier has its own."""
        names = {tier.codec for tier in (config.host, config.disk) if tier.bytes}
        if config.device.bytes or layout.is_grouped or len(names) != 1 or not names.issubset(codec_names()):
            return None
        codec = codec_by_name(names.pop())
        return cls(codec, pool, bool(config.host.bytes)) if codec.copies and codec.exact else None

    def made(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the same blocks with their keys and values in records of their own, which they are written as.

        Args:
            blocks: of tensors on the CPU, which the caller may write into afterwards; at least one.
        """
        copied = []
        for block, record in zip(blocks, Block.copy_all(blocks, self.codec, self.pool, self.lasting), strict=True):
            address = record.buffer.address + record.header.payload_offset
            view = KVView.packed(block.view.layout, len(block.tokens), address, record.buffer)
            copied.append(replace(block, view=view, sealed_as=record))
        return copied
