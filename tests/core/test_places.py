"""Places to go on from, as bytes: what was written once is read for ever, and nothing else is read."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.places import Place

WINDOWED = Place(bytes(range(32)), bytes([7] * 32), 100, 64, (0, 100), (False, False))
WITH_STATES = Place(bytes(range(32)), bytes([7] * 32), 64, 64, (0,), (True,), 4096)
# Written by the first version that had places; a change of these bytes is a change of the format.
GOLDEN = {
    "4b565354504c4331" + bytes(range(32)).hex() + "07" * 32 + "0000000000000000" + "64000000" + "40000000" + "02000000"
    "00000000" + "64000000" + "0000": WINDOWED,
    "4b565354504c4331" + bytes(range(32)).hex() + "07" * 32 + "0010000000000000" + "40000000" + "40000000" + "01000000"
    "00000000" + "01": WITH_STATES,
}


@pytest.mark.parametrize("written", GOLDEN)
def test_the_bytes_are_those_of_the_format(written: str) -> None:
    data = bytes.fromhex(written)
    assert GOLDEN[written].pack() == data + xxhash.xxh3_128_digest(data)
    assert Place.unpack(GOLDEN[written].pack()) == GOLDEN[written]


@given(st.lists(st.tuples(st.integers(0, (1 << 32) - 1), st.booleans()), min_size=1, max_size=40), st.integers(0, 63))
def test_any_place_comes_back(rows: list[tuple[int, bool]], short: int) -> None:
    cuts, states = zip(*rows, strict=True)
    place = Place(b"k" * 32, b"n" * 32, 64 * len(rows) - short, 64, cuts, states, 1 << 40)
    assert Place.unpack(place.pack()) == place


@pytest.mark.parametrize("place", [WINDOWED, WITH_STATES])
def test_what_was_changed_or_cut_short_is_refused(place: Place) -> None:
    data = place.pack()
    for at in range(len(data)):
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << at % 8
        for value in (bytes(spoilt), data[:at], data[at + 1 :]):
            with pytest.raises(ValueError, match="place"):
                Place.unpack(value)
    with pytest.raises(ValueError, match="place"):
        Place.unpack(data + b"\0")


@pytest.mark.parametrize(
    ("at", "number"),
    [(80, 0), (80, 200), (84, 0), (84, 32), (88, 0), (88, 3), (88, 1 << 31), (100, 0x0200)],
)
def test_fields_that_contradict_each_other_are_refused(at: int, number: int) -> None:
    data = bytearray(WINDOWED.pack()[:-16])
    data[at : at + 4] = np.array([number], "<u4").tobytes()[: len(data) - at]
    with pytest.raises(ValueError, match="place"):
        Place.unpack(bytes(data) + xxhash.xxh3_128_digest(bytes(data)))
