"""Writes cold records anew, in the codec of new ones: the same blocks under the same numbers, in smaller bytes.

What the memory tiers hold is hot: it stays as it is on disk, to be read as fast as it was written. A new record is
decoded and compared with the old one before it takes its place, in one commit, as if it were moved. So a kill leaves
the one or the other, and whoever reads the old one meanwhile keeps its segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.codecs import Codec
from kvstore.config import MIB
from kvstore.errors import CodecError
from kvstore.metrics import Metric
from kvstore.read.stored_block import BlockReader, StoredWords
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.writes import SealedRecord
from kvstore.tiers.host import HostRecord

_GROUP_BYTES = 4 * MIB  # are written with one commit: tens of milliseconds, for which a put waits at most
_AT_ONCE = 256


@dataclass
class ColdRecoder:
    """Goes over all records from the oldest on, in steps. For one thread.

    Attributes:
        reader: gives the blocks.
        pause: called before every step.
        at: the next record to look at.
        hot: how many records of the last pass were left as they are, because memory holds them.
    """

    reader: BlockReader
    pause: Callable[[], None]
    at: int = 1
    hot: int = 0

    def run(self, codec: Codec, below: int, progress: Callable[[int, int], None]) -> bool:
        """Recode the cold records from `at` to `below`.

        Returns:
            False if the disk had no room, so that it is to be tried again from `at` on.

        Raises:
            What `pause` raises.
        """
        group: list[tuple[Entry, HostRecord]] = []
        self.hot = 0 if self.at == 1 else self.hot
        while self.at < below or group:
            numbers = range(self.at, min(self.at + _AT_ONCE, below))
            self.pause()
            for entry in self.reader.disk.known(numbers):
                if entry is not None and self._is_wanted(entry, codec):
                    self.pause()
                    made = self._made(entry, codec)
                    group += [(entry, made)] if made is not None else []
                if sum(new.nbytes for _, new in group) >= _GROUP_BYTES and not self._write(group):
                    return False
            if group and not self._write(group):
                return False
            self.at = max(self.at, numbers.stop)
            progress(self.at, below)
        return True

    def _is_wanted(self, entry: Entry, codec: Codec) -> bool:
        if entry.codec == codec.id or not self.reader.stands_alone(entry):
            return False
        residency = self.reader.residency
        is_hot = entry.record in residency.host or entry.record in residency.device
        self.hot += is_hot
        return not is_hot

    def _made(self, entry: Entry, codec: Codec) -> HostRecord | None:
        """The record as `codec` codes it; None if that is not smaller, or does not give the block back."""
        block = self.reader.read(entry.record)
        if block is None or block.entry.extent != entry.extent:
            return None
        self.pause()
        made = block.block().encode(codec, self.reader.pool)
        if len(made.buffer.view) >= entry.nbytes:
            return None
        self.pause()
        if not self._gives(made, block, codec):
            self.reader.residency.metrics.add(Metric.RECODING_REFUSED)
            return None
        return made

    def _gives(self, made: HostRecord, block: StoredWords, codec: Codec) -> bool:
        again = StoredWords(block.entry, made.header, self.reader.pool.take(len(block.buffer.view)), block.layout)
        try:
            codec.decode(again.info, made.payload, made.header.layer_sizes, again.view)
        except CodecError:
            return False
        return again.buffer.view == block.buffer.view

    def _write(self, group: list[tuple[Entry, HostRecord]]) -> bool:
        """Writes the group, and empties it; False if nothing could be written."""
        self.pause()
        sealed = [(was, SealedRecord(new.header, was.parent, new.buffer)) for was, new in group]
        written = self.reader.disk.rewrite(sealed)
        done = [(was, new) for was, new in group if was.record in written]
        self.reader.residency.rewritten((was.record, len(new.buffer.view)) for was, new in done)
        metrics = self.reader.residency.metrics
        metrics.add(Metric.RECODED_RECORDS, len(done))
        metrics.add(Metric.RECODED_BYTES, sum(was.nbytes for was, _ in done))
        metrics.add(Metric.RECODED_SAVED_BYTES, sum(was.nbytes - len(new.buffer.view) for was, new in done))
        group.clear()
        return bool(written)
