"""Blocks whose layers are decoded one after the other: each needs what those before say of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, Protocol

from kvstore.errors import CodecError

# More blocks at once would be decoded no sooner (see csrc/common/in_order.h), and each needs memory meanwhile.
TOGETHER = 4


class InOrder(Protocol):
    """The layers of one block, some of which are decoded. Thread-safe.

    It keeps whatever it reads and the memory that it writes into.
    """

    def until(self, end: int) -> None:
        """Decode the layers below number `end` that are still to come.

        Raises:
            CodecError: one of them is damaged, as every later call for it says, too.
        """

    def natives(self) -> Sequence[Native]:
        """Return what C++ decodes of it, for `decode_together`."""


class NativeInOrder(Protocol):
    """What bindings give, see csrc/common/in_order.h. One thread at a time may decode layers of a block."""

    @staticmethod
    def until(blocks: Sequence[Any], end: int) -> list[str | None]:
        """Decode the layers below `end` of blocks of this class; return what is damaged there of each, or None."""


class Native(InOrder):
    """A block that C++ decodes."""

    def __init__(self, block: NativeInOrder, *kept: object) -> None:
        """kept: what owns the memory that the block reads and writes."""
        self._block, self._kept, self._lock = block, kept, Lock()

    def until(self, end: int) -> None:
        with self._lock:
            wrong = self._block.until([self._block], end)[0]
        if wrong is not None:
            raise CodecError(wrong)

    def natives(self) -> Sequence[Native]:
        return (self,)

    @property
    def kind(self) -> type[NativeInOrder]:
        """Blocks of one kind can be decoded together."""
        return type(self._block)

    @staticmethod
    def together(blocks: Sequence[Native], end: int) -> None:
        """Decode the layers below `end` of a few blocks of one kind; `until` of each tells what is damaged.

        Whoever has some of the same blocks must have them in the same order.
        """

        def locked(first: int) -> None:  # which an interrupt leaves unlocked, as it would not those of a list
            if first == len(blocks):
                blocks[0].kind.until([block._block for block in blocks], end)
                return
            with blocks[first]._lock:
                locked(first + 1)

        locked(0)


class Several(InOrder):
    """A block in parts, each with the same layers of other rows."""

    def __init__(self, parts: Sequence[InOrder]) -> None:
        self._parts = parts

    def until(self, end: int) -> None:
        for part in self._parts:
            part.until(end)

    def natives(self) -> Sequence[Native]:
        return [native for part in self._parts for native in part.natives()]


def decode_together(blocks: Iterable[InOrder], end: int) -> None:
    """Decode the layers below number `end` of blocks, as far as that is faster together than one after the other.

    `until(end)` of each decodes the rest, and tells what is damaged. Whoever decodes some of the same blocks at the
    same time must have them in the same order.
    """
    alike: dict[type[NativeInOrder], list[Native]] = {}
    for block in blocks:
        for native in block.natives():
            alike.setdefault(native.kind, []).append(native)
    for natives in alike.values():
        for first in range(0, len(natives), TOGETHER):
            Native.together(natives[first : first + TOGETHER], end)
