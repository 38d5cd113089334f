"""Codes blocks with loss that are recent no longer: the same blocks under the same numbers, in fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.workers import Workers
from kvstore.metrics import Metric
from kvstore.read.stored_block import BlockReader
from kvstore.tiers.codecs import NewCodecs
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.writes import SealedRecord
from kvstore.tiers.host import HostRecord
from kvstore.write.recent import RECENT_CODEC, RecentBlocks

_AT_ONCE = 16  # blocks that are in memory together


@dataclass(frozen=True)
class Ager:
    """Puts records with loss in place of exact ones. For one thread, which encodes on those of `executor`.

    A record takes the place of the old one in one commit, as if it were moved: a kill leaves the one or the other, and
    whoever reads the old one keeps its segment. What memory holds stays as it is until it is evicted.
    """

    reader: BlockReader
    codecs: NewCodecs
    recent: RecentBlocks
    executor: Workers

    def age(self, records: Sequence[int]) -> None:
        """Code these blocks with loss. Never raises for a failing disk.

        Where the disk has no room for a copy, a block stays exact until its sequence grows again; that is counted.
        """
        codec = self.codecs.disk
        if codec.exact:
            return
        for begin in range(0, len(records), _AT_ONCE):
            known = self.reader.disk.known(records[begin : begin + _AT_ONCE])
            exact = [entry for entry in known if entry is not None and entry.codec == RECENT_CODEC.id]
            made = zip(exact, self.executor.map(self._made, exact), strict=True)
            self._write([(entry, record) for entry, record in made if record is not None])

    def _made(self, entry: Entry) -> HostRecord | None:
        """The record with loss; None if that is not smaller, or the block cannot be read."""
        block = self.reader.read(entry.record)
        if block is None or block.entry.extent != entry.extent:
            return None
        made = block.block().encode(self.codecs.disk, self.reader.pool)
        return made if len(made.buffer.view) < entry.nbytes else None

    def _write(self, made: Sequence[tuple[Entry, HostRecord]]) -> None:
        if not made:
            return
        residency = self.reader.residency
        sealed = [(was, SealedRecord(new.header, was.parent, new.buffer)) for was, new in made]
        written = self.reader.disk.rewrite(sealed)
        residency.rewritten((was.record, len(new.buffer.view)) for was, new in made if was.record in written)
        left = [was.record for was, _ in made if was.record not in written and was.record in residency.index]
        self.recent.keep(left)
        residency.metrics.add(Metric.AGED_RECORDS, len(written))
        residency.metrics.add(Metric.FALLBACK_AGING, len(left))
