"""Codes a block against its donors, if that makes the record clearly smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore.codecs.delta import DeltaCodec, DonorRows
from kvstore.codecs.device import codes_on_device, falls_back
from kvstore.codecs.donor.spans import Span
from kvstore.codecs.view import KVView
from kvstore.core.record import Donor
from kvstore.core.rope import can_code_moved
from kvstore.dedup.donor_cache import DonorLost, DonorReader, DonorUnreadable
from kvstore.dedup.match import DonorMatcher
from kvstore.errors import CodecError
from kvstore.metrics import Metric, Metrics
from kvstore.residency.block import Block
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.codecs import NewCodecs
from kvstore.tiers.host import HostRecord
from kvstore.trie.content import DonorSpan

# A member may take this share of what the tier's codec says that such blocks take, which is about a tenth more than
# they do: reading a member takes reading its donors too, so it must be smaller by more than a little.
_WORTH = 0.8


@dataclass(frozen=True)
class DonorCoding:
    """Codes blocks against others. Thread-safe.

    Attributes:
        matcher: takes blocks that stand alone after all out of their families.
        reader: gives the donors.
        codecs: one codes against donors, one is what the disk tier codes blocks with that stand alone.
    """

    matcher: DonorMatcher
    reader: DonorReader
    codecs: NewCodecs
    pool: BufferPool
    metrics: Metrics

    def encode(self, block: Block, spans: Sequence[DonorSpan]) -> HostRecord | None:
        """Return the record of a member.

        Args:
            block: the block; it has joined the families of its donors.
            spans: which of its tokens donors hold.

        Returns:
            The record, or None if the block is to stand alone: a donor left, or the record is not small enough. It has
            left those families then, and others may be coded against it.
        """
        record = self._encode(block, spans)
        if record is None:
            self.matcher.stand_alone(block)
            self.metrics.add(Metric.DONORS_REJECTED)
            return None
        self.metrics.add(Metric.MEMBER_RECORDS)
        self.metrics.add(Metric.MEMBER_BYTES, record.header.record_bytes)
        self.metrics.add(Metric.MEMBER_RAW_BYTES, record.header.raw_bytes)
        return record

    def _encode(self, block: Block, spans: Sequence[DonorSpan]) -> HostRecord | None:
        info, codec = block.info(), self.codecs.donor
        if codec is None:
            return None
        numbers = list(dict.fromkeys(span.record for span in spans))
        try:
            donors = self.reader.of(numbers)
        except (DonorLost, DonorUnreadable, CodecError):
            return None  # it was found a moment ago: it left since
        rows = []
        for found in spans:
            number = numbers.index(found.record)
            shift = block.start + found.start - donors[number].start - found.donor_start
            if shift and not can_code_moved(info.layout):
                return None
            span = Span(found.start, found.length, number, found.donor_start, shift)
            rows.append(DonorRows.of(span, donors[number].view))
        known = [Donor(number, donor.key) for number, donor in zip(numbers, donors, strict=True)]
        limit = int(_WORTH * self.codecs.disk.usual(info))

        def record_of(view: KVView) -> HostRecord | None:
            return block.encode_by(
                codec,
                lambda out: codec.encode(info, view, rows, out[:limit]),  # `out` may be longer, to the end of a page
                limit,
                self.pool,
                lambda payload, _: codec.largest_error(info, payload),
                donors=known,
            )

        if not codes_on_device(codec, block.view):
            self._count_fallback(codec, block.view)
            return record_of(block.fetched().view)
        try:
            record = record_of(block.view)
            self._count_fallback(codec, block.view)  # now: a device may have failed at this very block
        except torch.OutOfMemoryError:
            self.metrics.add(Metric.FALLBACK_DEVICE_CODEC)
            record = record_of(block.fetched().view)
        return record

    def _count_fallback(self, codec: DeltaCodec, view: KVView) -> None:
        """Counts a block on a device that the CPU coded, though the codec has kernels."""
        if falls_back(codec, view):
            self.metrics.add(Metric.FALLBACK_DEVICE_CODEC)
