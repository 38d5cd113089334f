"""Damage to what a codec wrote for a block, and who notices it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore.errors import CodecError


def damaged(layers: Sequence[bytes], turn: int, rng: np.random.Generator, words: int) -> list[bytes]:
    """One layer with a bit, a word of its header, its end, or its rest changed. words: how long the header is."""
    bad = [bytearray(layer) for layer in layers]
    which = bad[int(rng.integers(len(bad)))]
    match turn % 5:
        case 0:  # a bit anywhere
            which[int(rng.integers(len(which)))] ^= 1 << int(rng.integers(8))
        case 1:  # a field of the header, or a scale
            value = int(rng.integers(1 << 32)) >> int(rng.integers(32))
            struct.pack_into("<I", which, 4 * int(rng.integers(words)), value)
        case 2:
            del which[int(rng.integers(len(which))) :]
        case 3:
            which += rng.bytes(int(rng.integers(1, 80)))
        case _:  # rubbish to the end
            at = int(rng.integers(4 * words, len(which)))
            which[at:] = rng.bytes(len(which) - at)
    return [bytes(layer) for layer in bad]


def levels_agree(levels: Sequence[str], decode: Callable[[str], Any], right: Callable[[Any], bool]) -> bool:
    """Whether all levels refuse it, with one text; they must do the same, and what they decode must be right."""
    texts = set()
    for level in levels:
        try:
            found = decode(level)
        except CodecError as error:
            texts.add(str(error))
        else:  # padding of raw bits is not looked at
            assert right(found)
            texts.add("")
    assert len(texts) == 1
    return texts != {""}


def changed_word(layer: bytes, at: int, add: int) -> bytearray:
    """A layer with `add` added to the word at byte `at`."""
    found = bytearray(layer)
    struct.pack_into("<I", found, at, struct.unpack_from("<I", found, at)[0] + add)
    return found


def every_byte_changed(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """(place, payload with one bit of that byte flipped)."""
    for at in range(len(payload)):
        changed = bytearray(payload)
        changed[at] ^= 1 << at % 8
        yield at, bytes(changed)


def noticed(
    changed: Iterable[tuple[int, bytes]], decode: Callable[[bytes], Any], harmless: Callable[[int, Any], bool]
) -> int:
    """How many changed payloads are refused. The others must be `harmless(place, what was decoded)`."""
    refused = 0
    for at, payload in changed:
        try:
            found = decode(payload)
        except CodecError:
            refused += 1
        else:
            assert harmless(at, found), f"byte {at}"
    return refused
