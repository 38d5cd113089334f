"""Blocks whose layers are decoded one after the other: each needs what those before say of it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from kvstore.codecs.base import Codec, CodedBlock, InOrder, LayersOfBlocks, decode_layers
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError


class NativeInOrder(Protocol):
    """What bindings give: `until` of csrc/common/in_order.h. One thread at a time may call it."""

    def until(self, end: int) -> str | None:
        """Return what is damaged, or None."""


class Native(InOrder):
    """A block that C++ decodes."""

    def __init__(self, block: NativeInOrder, *kept: object) -> None:
        """kept: what owns the memory that the block reads and writes."""
        self._block, self._kept, self._lock = block, kept, Lock()

    def until(self, end: int) -> None:
        with self._lock:
            wrong = self._block.until(end)
        if wrong is not None:
            raise CodecError(wrong)


class Apart(InOrder):
    """A block of a codec whose layers need no order, for those that have some blocks of the one kind and some of the
    other."""

    def __init__(self, codec: Codec, block: CodedBlock, out: KVView) -> None:
        self._codec, self._block, self._out = codec, block, out
        self._done, self._lock = 0, Lock()

    def until(self, end: int) -> None:
        with self._lock:
            if end > self._done:
                decode_layers(self._codec, self._block, self._out, range(self._done, end))
                self._done = end


class Several(InOrder):
    """A block in parts, each with the same layers of other rows."""

    def __init__(self, parts: Sequence[InOrder]) -> None:
        self._parts = parts

    def until(self, end: int) -> None:
        for part in self._parts:
            part.until(end)


def by_turns(blocks: Sequence[InOrder]) -> LayersOfBlocks:
    """Return what decodes some layers of some of these blocks, and all layers before them."""

    def decode(layers: range, numbers: range) -> list[int]:
        bad = []
        for number in numbers:
            try:
                blocks[number].until(layers.stop)
            except CodecError:
                bad.append(number)
        return bad

    return decode
