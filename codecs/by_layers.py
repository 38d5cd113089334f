"""Layers of blocks that come one after the other, of codecs whose layers need no order and of those that do."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from kvstore.codecs.base import Codec, CodedBlock, LayersOfBlocks, decode_layers
from kvstore.codecs.in_order import InOrder, Native, decode_together
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError


class Apart(InOrder):
    """A block of a codec whose layers need no order, for those that have some blocks of the one kind and some of the
    other."""

    def __init__(self, codec: Codec, block: CodedBlock, out: KVView) -> None:
        self._codec, self._block, self._out = codec, block, out
        self._done, self._lock = 0, Lock()

    def natives(self) -> Sequence[Native]:
        return ()

    def until(self, end: int) -> None:
        with self._lock:
            if end > self._done:
                decode_layers(self._codec, self._block, self._out, range(self._done, end))
                self._done = end


def by_turns(blocks: Sequence[InOrder]) -> LayersOfBlocks:
    """Return what decodes some layers of some of these blocks, and all layers before them."""

    def decode(layers: range, numbers: range) -> list[int]:
        decode_together(blocks[numbers.start : numbers.stop], layers.stop)
        bad = []
        for number in numbers:
            try:
                blocks[number].until(layers.stop)
            except CodecError:
                bad.append(number)
        return bad

    return decode
