"""What the decoding of blocks is told to: the histograms, whoever follows calls, and the gate."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.codecs.registry import codec_label
from kvstore.gate.gate import Gate
from kvstore.metrics import Metrics
from kvstore.read.block_read import BlockRead
from kvstore.read.place import place_in
from kvstore.timing import Timing


@dataclass(frozen=True)
class DecodeTimes:
    """Takes down how long the blocks of one fetch took to decode. Thread-safe.

    Attributes:
        within: see `Spans.here`.
    """

    metrics: Metrics
    gate: Gate
    within: object

    def add(self, read: BlockRead, codec: int, seconds: float) -> None:
        """Take down a block that was decoded by the codec of this number."""
        where = place_in(read.source.tier, read.source.codec_id)
        self.metrics.timings.observe(Timing.DECODE, seconds, where)
        if self.metrics.spans is not None:
            self.metrics.spans.done("decode", seconds, len(read.tokens), where, self.within)
        self.gate.observe_decode(codec_label(codec), len(read.tokens), seconds)
