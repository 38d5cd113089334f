"""The head of a parcel is as FORMAT.md has it, and nothing else is one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import xxhash

from kvstore.core.record import DamagedRecord
from kvstore.tiers.remote.parcel import HEAD_BYTES, MOST_RECORDS, ParcelHead, group_of

KEYS = [bytes([number + 1]) * 32 for number in range(MOST_RECORDS)]
MOST = 5000


def _by_the_page(keys: list[bytes], sizes: list[int], magic: bytes = b"KVSTPCL1", version: int = 1) -> bytes:
    """What FORMAT.md says, byte by byte."""
    data = magic + version.to_bytes(4, "little") + len(keys).to_bytes(4, "little")
    for key, size in zip(keys, sizes, strict=True):
        data += key + size.to_bytes(8, "little")
    return _summed(data.ljust(1008, b"\0"))


def _summed(data: bytes) -> bytes:
    return data + xxhash.xxh3_128_digest(data)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_a_head_is_as_the_page_says(count: int) -> None:
    keys, sizes = KEYS[:count], [random.randrange(1, MOST + 1) for _ in range(count)]
    head = ParcelHead(tuple(keys), tuple(sizes))
    assert head.pack() == _by_the_page(keys, sizes)
    assert len(head.pack()) == HEAD_BYTES == 1024
    assert ParcelHead.unpack(memoryview(head.pack()), keys[0], MOST) == head
    assert head.offsets == tuple(sum(sizes[:at]) for at in range(count))


def test_a_golden_head() -> None:
    """The bytes of format 1, once and for ever."""
    packed = ParcelHead((b"a" * 32, b"b" * 32), (1000, 77)).pack()
    rows = "61" * 32 + "e803000000000000" + "62" * 32 + "4d00000000000000"
    assert packed[:104].hex() == "4b56535450434c31" + "01000000" + "02000000" + rows + "0" * 16
    assert packed[1008:].hex() == "f9e4797eabd779a54829d62dddffe85c"


def test_every_bit_counts() -> None:
    packed = ParcelHead(tuple(KEYS[:3]), (400, 500, 600)).pack()
    for bit in range(8 * len(packed)):
        changed = bytearray(packed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedRecord):
            ParcelHead.unpack(changed, KEYS[0], MOST)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "one byte short": lambda: _by_the_page(KEYS[:2], [5, 6])[:-1],
    "one byte more": lambda: _by_the_page(KEYS[:2], [5, 6]) + b"\0",
    "another magic": lambda: _by_the_page(KEYS[:2], [5, 6], magic=b"KVSTREC1"),
    "a later version": lambda: _by_the_page(KEYS[:2], [5, 6], version=2),
    "no record": lambda: _by_the_page([], []),
    "17 records": lambda: _summed(b"KVSTPCL1\1\0\0\0\x11\0\0\0" + (KEYS[0] + b"\5" + bytes(7)) * 16 + bytes(352)),
    "as many records as fit in a number": lambda: _summed((b"KVSTPCL1\1\0\0\0" + b"\xff" * 4).ljust(1008, b"\0")),
    "an empty record": lambda: _by_the_page(KEYS[:2], [5, 0]),
    "a record that is too large": lambda: _by_the_page(KEYS[:2], [5, MOST + 1]),
    "sizes that overflow": lambda: _by_the_page(KEYS[:2], [(1 << 64) - 1, 5]),
    "another first block": lambda: _by_the_page([KEYS[1], KEYS[0]], [5, 6]),
    "a block twice": lambda: _by_the_page([KEYS[0], KEYS[1], KEYS[1]], [5, 6, 7]),
    "something behind the last": lambda: _summed(_by_the_page(KEYS[:2], [5, 6])[:1007] + b"x"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_head_is_refused(what: str) -> None:
    with pytest.raises(DamagedRecord):
        ParcelHead.unpack(HOSTILE[what](), KEYS[0], MOST)


@pytest.mark.parametrize(
    ("parcel_bytes", "block_bytes", "group"),
    [(0, 100, 1), (99, 100, 1), (100, 100, 1), (200, 100, 2), (799, 100, 4), (1600, 100, 16), (1 << 40, 100, 16)],
)
def test_a_group_is_a_power_of_two_that_fits(parcel_bytes: int, block_bytes: int, group: int) -> None:
    assert group_of(parcel_bytes, block_bytes) == group
