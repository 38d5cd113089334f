"""States as codecs that are chosen for size store them: byte shuffle and zstd, by the blosc2 library.

States (kvstore/core/states.py) begin with a number of at most 2^16. A blosc2 chunk begins with a larger one, its fourth
byte being the size of an item. So the first four bytes tell which of both is stored.
"""

from __future__ import annotations

import struct

import numpy as np

from kvstore.codecs.blosc import blosc2
from kvstore.core.states import item_bytes
from kvstore.errors import CodecError

_FIRST = struct.Struct("<I")
_HEADER_BYTES = 32
# What a chunk claims to hold is an attacker's to choose. States that come to a smaller share are stored as they are.
_MOST_BYTES, _MOST_RATIO = 64 << 20, 64


def coded(states: bytes) -> bytes:
    """Return states as a chunk, or as they are if that is no larger.

    Example:
        >>> from kvstore.core.states import State, pack
        >>> import torch
        >>> states = pack([State(0, 0, True, recurrent=torch.zeros(1, 8, 64))])
        >>> len(coded(states)) < len(states), bytes(decoded(memoryview(coded(states)))) == states
        (True, True)
    """
    library = blosc2()
    chunk: bytes = library.compress2(
        np.frombuffer(states, np.uint8),
        codec=library.Codec.ZSTD,
        clevel=1,
        filters=[library.Filter.SHUFFLE],
        typesize=item_bytes(memoryview(states)),
        nthreads=1,
    )
    return chunk if len(chunk) < len(states) <= most_bytes(len(chunk)) else states


def decoded(stored: memoryview) -> memoryview:
    """Return the states that `coded` was given.

    Raises:
        CodecError: the chunk is damaged, or claims to hold more than it may.
    """
    if len(stored) < _HEADER_BYTES or _FIRST.unpack_from(stored)[0] <= 1 << 16:
        return stored
    library = blosc2()
    try:
        claimed, size, _ = library.get_cbuffer_sizes(bytes(stored[:_HEADER_BYTES]))
        if size != len(stored) or not 0 < claimed <= most_bytes(size):
            raise CodecError(f"states: a chunk of {len(stored)} bytes claims {size}, and to hold {claimed}")
        raw = np.empty(claimed, np.uint8)
        library.decompress2(stored, dst=raw, nthreads=1)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CodecError(f"states: the chunk is damaged: {error}") from error
    return raw.data


def most_bytes(size: int) -> int:
    """Return the most bytes that a chunk of `size` bytes may hold."""
    return max(_MOST_BYTES, _MOST_RATIO * size)
