"""Decodes the records of one fetch, each into its slice of the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.codecs import KVView
from kvstore.codecs.base import BlockInfo, CodedBlock
from kvstore.codecs.in_order import TOGETHER, decode_together
from kvstore.codecs.registry import gains_together
from kvstore.read.block_read import BlockRead
from kvstore.read.copies import Copies
from kvstore.read.decode import BlockDecoder
from kvstore.read.decode_times import DecodeTimes
from kvstore.read.layerwise import HeldBlock, LayerDecode
from kvstore.tiers.base import SealedSource

Found = tuple[BlockRead, SealedSource]
"""A record in memory, checked, and what was looked for."""


@dataclass(frozen=True)
class Shared:
    """What one of several blocks took that were decoded together, elapsed and of processor time."""

    layers: range
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class RecordDecode:
    """Decodes records into `out`, or as far as `later` wants them. Thread-safe for records that are not the same.

    Attributes:
        origin: position of the first token of `out`.
        later: takes the records whose layers decode one by one; only the first layers of these are decoded here.
        copies: takes what is only copied, for the end.
    """

    decoder: BlockDecoder
    out: KVView
    origin: int
    times: DecodeTimes
    later: LayerDecode | None = None
    copies: Copies | None = None

    def decode(self, found: Sequence[Found]) -> list[bool]:
        """Decode records; return of each whether it is good."""
        good: list[bool] = []
        for first in range(0, len(found), TOGETHER):
            good += self._decode_some(found[first : first + TOGETHER])
        return good

    def target(self, read: BlockRead) -> KVView:
        """Return where a block goes."""
        return self.out.narrow(read.start - self.origin, len(read.tokens))

    def _decode_some(self, found: Sequence[Found]) -> list[bool]:
        if self.copies is not None:
            return [self.copies.note(*pair) or self._decode_whole(*pair) for pair in found]
        if self.later is None and (len(found) == 1 or not self.out.on_cpu):
            return [self._decode_whole(*pair) for pair in found]
        elapsed, cpu = time.perf_counter(), time.thread_time()
        begun = [self._begin(*pair) for pair in found]
        layers = range(len(self.out.layout.layers)) if self.later is None else self.later.first
        ordered = [block.by.in_order for block in begun if block is not None and block.by.in_order is not None]
        decode_together(ordered, layers.stop)
        each = max(1, len(ordered))
        shared = Shared(layers, (time.perf_counter() - elapsed) / each, (time.thread_time() - cpu) / each)
        return [
            self._decode_whole(*pair) if block is None else self._decode_layers(block, shared)
            for pair, block in zip(found, begun, strict=True)
        ]

    def _decode_whole(self, read: BlockRead, record: SealedSource) -> bool:
        begin, header = time.perf_counter(), record.header
        good = self.decoder.decode(read, header, record.payload, self.target(read))
        self.times.add(read, header.codec, time.perf_counter() - begin)
        return good

    def _begin(self, read: BlockRead, record: SealedSource) -> HeldBlock | None:
        """None for a record that is decoded whole."""
        header = record.header
        if self.later is None and not gains_together(header.codec):
            return None
        info = BlockInfo(self.out.layout, header.tokens, header.start, header.cut)
        coded = CodedBlock(info, record.payload, header.layer_sizes, read.start - self.origin, len(read.tokens))
        by = self.decoder.by_layers(read, header, coded, self.out)
        if by is None or (self.later is None and by.in_order is None):
            return None
        return HeldBlock(read, record, by, coded, seconds=0.0)

    def _decode_layers(self, block: HeldBlock, shared: Shared) -> bool:
        """Decodes what was not decoded together; keeps the record for the layers that come later."""
        elapsed, cpu = time.perf_counter(), time.thread_time()
        good = self.decoder.decode_first(block.read, block.by, block.coded, self.out, shared.layers)
        begun = shared if block.by.in_order is not None else Shared(shared.layers)
        if self.later is None:
            self.times.add(block.read, block.record.header.codec, begun.seconds + time.perf_counter() - elapsed)
        elif good:
            seconds = begun.cpu_seconds + time.thread_time() - cpu
            self.later.hold(replace(block, seconds=seconds))
        return good
