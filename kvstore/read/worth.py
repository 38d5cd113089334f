"""Load or recompute: leaves out of a get what would take longer to load than to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.core.explanation import BlockExplanation
from kvstore.core.workers import Workers
from kvstore.gate.gate import Gate
from kvstore.gate.load import TENSORS, Part
from kvstore.gate.probe import timed_reads
from kvstore.metrics import Metric
from kvstore.read.block_read import BlockRead
from kvstore.read.place import codec_of
from kvstore.residency.residency import Residency
from kvstore.tiers.base import Source
from kvstore.tiers.buffers import BufferPool

_SLOW = "predictive"
_LOOKED_AT = 8  # records, of which one is likely to be there


@dataclass(frozen=True)
class Worth:
    """Asks the gate, and keeps what it knows of the tiers current. Thread-safe: has no state of its own.

    Attributes:
        whole: whether blocks are of use only all together, as of layouts with windows or states.
        executor: looks at tiers that are not read any more.
    """

    gate: Gate
    residency: Residency
    pool: BufferPool
    executor: Workers
    whole: bool

    def kept(self, reads: Sequence[BlockRead], device: Any, total: int) -> Sequence[BlockRead]:
        """Return the leading blocks that are worth loading on `device`, of a sequence of `total` tokens; the sources of
        the others are released."""
        if not reads or not self.gate.knows(device):
            return reads
        parts = self.parts(reads)
        for tier in {part.tier for part in parts if part.tier is not None}:
            if self.gate.lacks(tier):
                self.gate.check(tier, self._timed(tier, next(r.source for r in reads if r.source.tier == tier)))
        count = self.gate.decide(parts, device, total=total, whole=self.whole).parts
        refused = reads[count:]
        self.gate.note(reads[-1].end, bool(refused))
        if refused:
            self.residency.metrics.add(Metric.GET_WITHHELD_TOKENS, sum(len(read.tokens) for read in refused))
            self._leave([read.source for read in refused])
        return reads[:count]

    def parts(self, reads: Sequence[BlockRead]) -> list[Part]:
        """Return what the gate must know of blocks."""
        return [
            self._part(read.source.tier, codec_of(read.source.codec_id), read.source.nbytes, read.tokens)
            for read in reads
        ]

    def look(self, newest: int, codec: str) -> None:
        """Time a short read from each storage, and say if the disk's codec is what a get waits for.

        Only if that is of use: what computing takes is known, or the codec is one that decodes slowly.

        Args:
            newest: the number of the next new record.
            codec: the name of the disk's.
        """
        name = codec.partition(":")[0].partition("@")[0]
        if not self.gate.is_informed and name != _SLOW:
            return
        for tier, storage in self.residency.storage.items():
            found = storage.locate(range(newest - 1, max(0, newest - 1 - _LOOKED_AT), -1))
            sources = [source for source in found if source is not None]
            if sources:
                self.gate.check(tier, self._timed(tier, sources[0]))
            self.residency.release(sources)
            faster = self.gate.faster_codec(name, tier) if name == _SLOW else None
            if faster is not None:
                what = f"{name} takes {faster[1]:.1f} times as long as {faster[0]} would, once the {tier} is read"
                self.residency.metrics.add(Metric.SLOW_CODEC, because=what)

    def end(self, rows: Sequence[BlockExplanation], stored: int, total: int) -> int:
        """Return how many of the first `stored` of `total` tokens a get would load now; changes nothing."""
        have = [row for row in rows if row.end <= stored and row.tiers]
        parts = [self._part(row.tiers[0], row.codec or TENSORS, row.bytes, range(row.start, row.end)) for row in have]
        if not parts or have[-1].end != stored or not self.gate.enabled:
            return stored
        count = self.gate.decide(parts, None, total=total, whole=self.whole).parts
        return have[count - 1].end if count else 0

    def _part(self, tier: str, codec: str, nbytes: int, tokens: Sequence[int] | Any) -> Part:
        return Part(tier if tier in self.residency.storage else None, codec, nbytes, len(tokens))

    def _leave(self, sources: Sequence[Source]) -> None:
        """Releases sources; one in storage may be read first, in the background, to see what that takes now."""
        tier = sources[0].tier
        if tier in self.residency.storage and self.gate.is_due(tier):
            self.residency.release(sources[1:])
            self.executor.submit(self._look, tier, sources[0])
        else:
            self.residency.release(sources)

    def _look(self, tier: str, source: Source) -> None:
        try:
            self.gate.check(tier, self._timed(tier, source))
        finally:
            self.residency.release([source])

    def _timed(self, tier: str, source: Source) -> list[tuple[int, float]]:
        return timed_reads(self.residency.storage[tier], source, self.pool)
