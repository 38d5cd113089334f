"""What is kept of a session, as bytes."""

from __future__ import annotations

import msgpack
import pytest

from kvstore.core.session_record import SessionRecord

GOOD = {
    "v": 1,
    "name": "chat",
    "namespace": b"n" * 32,
    "tokens": b"\1\0\0\0\2\0\0\0",
    "created": 1.0,
    "used": 2.0,
    "sequence": 7,
}


def test_a_record_comes_back_from_its_bytes() -> None:
    record = SessionRecord.unpack(msgpack.packb(GOOD))
    assert (record.name, record.tokens.tolist(), record.sequence) == ("chat", [1, 2], 7)
    assert msgpack.unpackb(record.pack()) == GOOD


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"name": ""},
        {"name": "x" * 401},
        {"name": b"chat"},
        {"namespace": b"n" * 31},
        {"namespace": "n" * 32},
        {"tokens": b"123"},
        {"tokens": [1, 2]},
        {"created": 1},
        {"used": None},
        {"sequence": -1},
        {"sequence": (1 << 64) - 1},
        {"sequence": 1.0},
        {"more": 1},
        {"name": msgpack.ExtType(1, b"x")},
        {"tokens": msgpack.Timestamp(1)},
    ],
    ids=str,
)
def test_a_record_with_a_field_that_cannot_be_is_none(changes: dict) -> None:
    assert SessionRecord.unpack(msgpack.packb({**GOOD, **changes})) is None


@pytest.mark.parametrize("field", GOOD)
def test_a_record_without_a_field_is_none(field: str) -> None:
    assert SessionRecord.unpack(msgpack.packb({k: v for k, v in GOOD.items() if k != field})) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 5000,
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc1",
        b"\xff" * 50,
        msgpack.packb(GOOD) + b"x",
    ],
    ids=["nothing", "nested", "huge map", "huge bytes", "reserved", "numbers", "more after it"],
)
def test_bytes_that_are_no_record_are_none(data: bytes) -> None:
    assert SessionRecord.unpack(data) is None
