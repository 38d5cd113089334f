"""Codes a block against others where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.codecs import Codec
from kvstore.codecs.delta import DeltaCodec, DonorRows
from kvstore.codecs.donor.spans import Span
from kvstore.core.record import Donor
from kvstore.core.rope import can_rotate
from kvstore.dedup.donor_cache import DonorLost, DonorReader, DonorUnreadable
from kvstore.dedup.match import Matchmaker
from kvstore.errors import CodecError
from kvstore.metrics import Metric, Metrics
from kvstore.residency.block import Block
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.host import HostRecord
from kvstore.trie.content import DonorSpan

# A member may take this share of what the tier's codec says that such blocks take, which is about a tenth more than
# they do: reading a member takes reading its donors too, so it must be smaller by more than a little.
_WORTH = 0.8


@dataclass(frozen=True)
class DonorCoding:
    """Thread-safe, but for its matchmaker. plain: what the disk tier codes blocks with that stand alone."""

    matchmaker: Matchmaker
    reader: DonorReader
    codec: DeltaCodec
    plain: Codec
    pool: BufferPool
    metrics: Metrics

    def encode(self, block: Block, spans: Sequence[DonorSpan]) -> HostRecord | None:
        """The record of a member; None where it is to stand alone after all, which is noted where it must be."""
        record = self._encode(block, spans)
        if record is None:
            self.matchmaker.stand_alone(block)
            self.metrics.add(Metric.DONORS_REJECTED)
            return None
        self.metrics.add(Metric.MEMBER_RECORDS)
        self.metrics.add(Metric.MEMBER_BYTES, record.header.record_bytes)
        self.metrics.add(Metric.MEMBER_RAW_BYTES, record.header.raw_bytes)
        return record

    def _encode(self, block: Block, spans: Sequence[DonorSpan]) -> HostRecord | None:
        info = block.info()
        numbers = list(dict.fromkeys(span.record for span in spans))
        try:
            donors = self.reader.of(numbers)
        except (DonorLost, DonorUnreadable, CodecError):
            return None  # it was found a moment ago: it left since
        rows = []
        for found in spans:
            number = numbers.index(found.record)
            shift = block.start + found.start - donors[number].start - found.donor_start
            if shift and not can_rotate(info.layout):
                return None
            span = Span(found.start, found.length, number, found.donor_start, shift)
            rows.append(DonorRows.of(span, donors[number].view))
        view = block.fetched().view
        room = int(_WORTH * self.plain.usual(info))
        return block.encode_by(
            self.codec,
            lambda out: self.codec.encode(info, view, rows, out[:room]),  # which may be longer, to the end of a page
            room,
            self.pool,
            lambda payload, _: self.codec.largest_error(info, payload),
            donors=[Donor(number, donor.key) for number, donor in zip(numbers, donors, strict=True)],
        )
