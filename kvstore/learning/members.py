"""Members of a store beside their donors, as learning needs them: what rows of the same tokens differ in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.calibration.donor.differences import Numbers, differing
from kvstore.calibration.dump import Floats, floats
from kvstore.codecs import is_delta
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor.spans import Span, SpanTable
from kvstore.core.record import DamagedRecord
from kvstore.errors import CodecError, UnknownCodec
from kvstore.read.stored_block import BlockReader, StoredWords

_AT_ONCE = 256  # entries that are looked up together


@dataclass(frozen=True)
class Member:
    """A block that is coded against others, decoded, and they. spans: which of its rows they hold, too."""

    block: StoredWords
    spans: tuple[Span, ...]
    donors: tuple[StoredWords, ...]

    @property
    def rows(self) -> int:
        """How many of its rows have a donor's beside them."""
        return sum(span.count for span in self.spans)

    def donor_rows(self) -> list[DonorRows]:
        """What a codec is given to code it again."""
        return [DonorRows.of(span, self.donors[span.donor].view) for span in self.spans]

    def differences(self) -> Numbers:
        """What its rows in spans differ in from their donors'."""
        own, donors = _numbers(self.block), [_numbers(donor) for donor in self.donors]
        start = self.block.header.start
        found = [
            differing(
                self.block.layout,
                _rows(own, span.start, span.count),
                _rows(donors[span.donor], span.donor_start, span.count),
                start + span.start,
                start + span.start - span.shift,
            )
            for span in self.spans
        ]
        return [
            (np.concatenate([k for k, _ in same]), np.concatenate([v for _, v in same]))
            for same in zip(*found, strict=True)
        ]


@dataclass(frozen=True)
class MemberReader:
    """Finds and reads members. Thread-safe: has no state of its own."""

    reader: BlockReader

    def newest_first(self, below: int, pause: Callable[[], None]) -> Iterator[int]:
        """Yield the numbers of members that are whole blocks, from record `below` - 1 down. `pause` is called between
        steps of some microseconds."""
        for stop in range(below, 0, -_AT_ONCE):
            pause()
            entries = self.reader.disk.known(range(max(1, stop - _AT_ONCE), stop))
            for entry in reversed(entries):
                if entry is not None and entry.donors and len(entry.tokens) == self.reader.block_tokens:
                    yield entry.record

    def read(self, record: int) -> Member | None:
        """Return a member from disk; None if it or a donor is gone, cannot be read, or holds what is no number. What
        is damaged is left to who asks for it."""
        disk, reader = self.reader.disk, self.reader
        entry = disk.locate([record])[0]
        if entry is None:
            return None
        try:
            found = reader.whole(entry)
            header = found.header
            codec = reader.profiles.delta_decoder(header.codec, header.profile) if is_delta(header.codec) else None
            donors = [reader.read(donor.record) for donor in header.donors]
            if codec is None or any(donor is None for donor in donors):
                return None
            whole = tuple(donor for donor in donors if donor is not None)
            if [donor.header.key for donor in whole] != [donor.key for donor in header.donors]:
                return None
            table = SpanTable.parse(reader.layout, header.count, found.payload)
            buffer = reader.pool.take(header.count * reader.layout.bytes_per_token)
            block = StoredWords(entry, header, buffer, reader.layout)
            codec.decode(block.info, found.payload, header.layer_sizes, [donor.view for donor in whole], block.view)
        except (UnknownCodec, OSError, DamagedRecord, CodecError):
            return None
        finally:
            disk.release([entry])
        is_finite = block.is_finite and all(donor.is_finite for donor in whole)
        return Member(block, table.spans, whole) if is_finite else None


def _numbers(block: StoredWords) -> list[tuple[Floats, Floats]]:
    return [(floats(k), floats(v)) for k, v in block.groups()[0].layers()]


def _rows(layers: list[tuple[Floats, Floats]], begin: int, count: int) -> list[tuple[Floats, Floats]]:
    return [(k[begin : begin + count], v[begin : begin + count]) for k, v in layers]
