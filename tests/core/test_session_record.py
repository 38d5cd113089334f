"""What is kept of a session, as bytes; and the bytes of format 1."""

from __future__ import annotations

import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessioncases import NAMESPACE, format_1_value, session

from kvstore.core.session_record import SessionHead, SessionRecord, SessionText, session_key, text_key
from kvstore.tiers.disk.format1 import session_of_format_1

KEY = session_key(NAMESPACE, "chat")
GOOD = {
    "v": 1,
    "name": "chat",
    "namespace": NAMESPACE,
    "tokens": b"\1\0\0\0\2\0\0\0",
    "created": 1.0,
    "used": 2.0,
    "sequence": 7,
}
FIELDS = ["sequence", "created", "used", "expiry", "tokens", "flags"]


@given(
    name=st.text(min_size=1, max_size=90),
    count=st.integers(1, 800),
    times=st.tuples(*[st.floats(0, 1e12)] * 3),
    sequence=st.integers(0, (1 << 62) - 1),
    pinned=st.booleans(),
)
def test_a_session_comes_back_from_its_bytes(
    name: str, count: int, times: tuple[float, float, float], sequence: int, pinned: bool
) -> None:
    record = SessionRecord(name, NAMESPACE, np.arange(count, dtype=np.uint32), *times[:2], sequence, times[2], pinned)
    head = SessionHead.unpack(record.key, record.head().pack())
    assert head is not None
    texts = {key: SessionText(before, 1, tokens) for key, before, tokens in record.texts()}
    assert (head.name, head.namespace, head.length) == (name, NAMESPACE, count)
    assert (head.created, head.used, head.expiry) == times
    assert (head.sequence, head.pinned) == (sequence, pinned)
    assert len(head.rest) // 4 + 256 * len(texts) == count
    assert head.end == (list(texts)[-1] if texts else NAMESPACE[:16])
    for key, text in texts.items():
        assert SessionText.unpack(key, text.pack()) == text


def packed(**changes: object) -> bytes:
    fields = {"sequence": 7, "created": 1.0, "used": 2.0, "expiry": 0.0, "tokens": 2, "flags": 0, **changes}
    head = struct.pack("<QdddII", *[fields[name] for name in FIELDS])
    return head + NAMESPACE + NAMESPACE[:16] + struct.pack("<2I", 1, 2) + b"chat"


def test_the_bytes_are_those_of_the_page() -> None:
    head = SessionHead.unpack(KEY, packed())
    assert head is not None
    assert (head.name, head.length, head.rest, head.sequence) == ("chat", 2, struct.pack("<2I", 1, 2), 7)
    assert head.pack() == packed()


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": 1 << 62},
        {"sequence": (1 << 64) - 1},
        {"created": float("nan")},
        {"created": float("inf"), "used": float("-inf")},
        {"used": float("inf")},
        {"expiry": float("nan")},
        {"tokens": 0},
        {"tokens": 1},
        {"tokens": 3},
        {"tokens": 258 << 20},
        {"flags": 2},
    ],
    ids=str,
)
def test_a_session_with_a_field_that_cannot_be_is_none(changes: dict[str, object]) -> None:
    head = SessionHead.unpack(KEY, packed(**changes))
    assert head is None or head.length == 258 << 20  # its texts are not there, so nobody gets its tokens


def test_a_session_under_another_key_is_none() -> None:
    for key in (session_key(NAMESPACE, "chas"), session_key(b"m" * 32, "chat"), KEY + b"x", b""):
        assert SessionHead.unpack(key, packed()) is None


@pytest.mark.parametrize("data", [b"", b"\xff" * 96, packed()[:-1], packed() + b"x", packed()[:90]])
def test_bytes_that_are_no_session_are_none(data: bytes) -> None:
    assert SessionHead.unpack(KEY, data) is None


@given(st.binary(max_size=200))
def test_noise_is_no_session_and_no_text(noise: bytes) -> None:
    assert SessionHead.unpack(KEY, noise) is None
    assert SessionText.unpack(KEY[:16], noise.ljust(1044, b"\1")) is None
    assert session_of_format_1(KEY, noise) is None


def test_a_text_under_another_key_is_none() -> None:
    text = SessionText(b"k" * 16, 3, bytes(1024))
    key = text_key(text.before, text.tokens)
    assert SessionText.unpack(key, text.pack()) == text
    assert SessionText.unpack(b"k" * 16, text.pack()) is None
    assert SessionText.unpack(key, text.pack()[:-1]) is None


# ---- format 1 ----------------------------------------------------------------------------------------------------


def test_a_session_of_format_1_is_read() -> None:
    record = session_of_format_1(KEY, msgpack.packb(GOOD))
    assert record is not None
    assert (record.name, record.tokens.tolist(), record.sequence) == ("chat", [1, 2], 7)
    assert session_of_format_1(KEY, format_1_value(record)) is not None
    assert session_of_format_1(session("other").key, msgpack.packb(GOOD)) is None


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
        {"tokens": b""},
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
def test_a_session_of_format_1_with_a_field_that_cannot_be_is_none(changes: dict) -> None:
    assert session_of_format_1(KEY, msgpack.packb({**GOOD, **changes})) is None


@pytest.mark.parametrize("field", GOOD)
def test_a_session_of_format_1_without_a_field_is_none(field: str) -> None:
    assert session_of_format_1(KEY, msgpack.packb({k: v for k, v in GOOD.items() if k != field})) is None


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
def test_bytes_that_are_no_session_of_format_1_are_none(data: bytes) -> None:
    assert session_of_format_1(KEY, data) is None
