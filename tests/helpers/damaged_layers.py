"""Damage to what a codec wrote for a block, and who notices it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

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


def damage_found(
    layers: Sequence[bytes],
    turns: int,
    rng: np.random.Generator,
    words: int,
    levels: Sequence[str],
    decode: Callable[[list[bytes], str], Any],
    right: Callable[[Any], bool],
) -> int:
    """How many of so many turns of `damaged` all levels refuse; what they decode of the others must be right."""
    found = 0
    for turn in range(turns):
        bad = damaged(layers, turn, rng, words)
        if bad != layers:
            found += levels_agree(levels, partial(decode, bad), right)
    return found


def truncations(layers: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The layers with one of them shorter, by any number of bytes."""
    for number, layer in enumerate(layers):
        for length in range(len(layer)):
            yield [*layers[:number], layer[:length], *layers[number + 1 :]]


def damage_is_named(layers: Sequence[bytes], decode: Callable[[list[bytes]], Any]) -> None:
    """The decoder of an exact mode of the predictive codec says which field of a layer's header is wrong.

    layers: three, of which the second is changed; its values that are stored raw follow a header of 28 bytes.
    """

    def found_in(at: int, add: int, extra: bytes = b"", where: int = 0) -> str:
        layer = changed_word(layers[1], at, add)
        layer[where:where] = extra
        with pytest.raises(CodecError) as caught:
            decode([layers[0], bytes(layer), layers[2]])
        return str(caught.value)

    raw_k, raw_v = struct.unpack_from("<2I", layers[1], 4)
    assert "another mode" in found_in(0, 1)
    assert "left over" in found_in(4, 1, b"\0", 28 + raw_k)
    assert "left over" in found_in(12, 1, b"\0\0", 28 + raw_k + raw_v)
    assert "shorter than its header" in found_in(16, 1 << 20)
    assert "not those that were encoded" in found_in(20, 1)
    assert "not those that were encoded" in found_in(24, 1)


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
