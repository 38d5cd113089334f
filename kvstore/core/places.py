"""Places to go on from, as other stores find them: the end of a cache whose layers have windows or states.

Such a cache can be used where its windows reach back far enough and its states were kept, not behind every block. A
place says which records make up the cache there (FORMAT.md, "Remote values"). Pure: values in, bytes out, and back.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

_MAGIC = b"KVSTPLC1"
_HEAD = struct.Struct("<8s32s32sQIII")  # magic, key, namespace, bytes of states, end, tokens of a block, blocks
_SUM_BYTES = 16
MARK = b"KVSTMRK1"
PLACE_BYTES = 1 << 20  # of the largest place
MOST_BLOCKS = (PLACE_BYTES - _HEAD.size - _SUM_BYTES) // 5


@dataclass(frozen=True)
class Place:
    """A place, and the records that lead to it. Immutable.

    Attributes:
        key: of the block that ends there, which may be shorter than others.
        namespace: its digest.
        end: how many tokens come before it.
        block_tokens: tokens of a block.
        cuts: of the record of each block (`RecordHeader.cut`).
        with_states: whether the record of each block has states.
        state_bytes: what the states take that the last one has; 0 for none.

    Example:
        >>> place = Place(bytes(32), bytes(32), 100, 64, (0, 100), (False, False))
        >>> Place.unpack(place.pack()) == place
        True
    """

    key: bytes
    namespace: bytes
    end: int
    block_tokens: int
    cuts: tuple[int, ...]
    with_states: tuple[bool, ...]
    state_bytes: int = 0

    def pack(self) -> bytes:
        """Return the place as bytes, with a checksum."""
        head = _HEAD.pack(
            _MAGIC, self.key, self.namespace, self.state_bytes, self.end, self.block_tokens, len(self.cuts)
        )
        data = head + np.asarray(self.cuts, "<u4").tobytes() + np.asarray(self.with_states, np.uint8).tobytes()
        return data + xxhash.xxh3_128_digest(data)

    @classmethod
    def unpack(cls, value: bytes | memoryview) -> Place:
        """Read what `pack` wrote.

        Raises:
            ValueError: the bytes are no place.
        """
        if len(value) > PLACE_BYTES:
            raise ValueError(f"a place takes at most {PLACE_BYTES} bytes, found {len(value)}")
        data, found = bytes(value[:-_SUM_BYTES]), bytes(value[-_SUM_BYTES:])
        if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_128_digest(data) != found:
            raise ValueError("the value is no place, or it is damaged")
        _, key, namespace, state_bytes, end, block_tokens, count = _HEAD.unpack_from(data)
        if len(data) != _HEAD.size + 5 * count or not block_tokens:
            raise ValueError("the lengths of a place contradict each other")
        cuts = np.frombuffer(data, "<u4", count, _HEAD.size)
        states = np.frombuffer(data, np.uint8, count, _HEAD.size + 4 * count)
        if count != -(-end // block_tokens) or not count or states.max() > 1:
            raise ValueError("the fields of a place contradict each other")
        flags = tuple(map(bool, states.tolist()))
        return cls(key, namespace, end, block_tokens, tuple(cuts.tolist()), flags, state_bytes)


def places_begin(data: bytes | memoryview) -> bool:
    """Return whether bytes begin as a place does."""
    return bytes(data[: len(_MAGIC)]) == _MAGIC
