"""Metadata of sessions, and the bytes of what is noted beside one."""

from __future__ import annotations

import re
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.session_note import MAX_METADATA_BYTES, SessionNote, pack_metadata, unpack_metadata
from kvstore.errors import MetadataError

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(metadata=st.dictionaries(st.text(max_size=10), values, max_size=4))
def test_metadata_comes_back(metadata: dict[str, Any]) -> None:
    assert unpack_metadata(pack_metadata(metadata)) == metadata


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    "bad",
    [
        5,
        "text",
        [1],
        {1: 2},
        {"a": {b"b": 1}},
        {"a": object()},
        {"a": float("nan")},
        {"a": [float("inf")]},
        {"a": 1 << 64},
        {"a": "\ud800"},
        {"a": b"x" * MAX_METADATA_BYTES},
        nested(18),
    ],
    ids=lambda value: re.sub(" at 0x.*", "", repr(value))[:30],  # the same in every process
)
def test_what_is_not_kept_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(MetadataError, match="metadata"):
        pack_metadata(bad)


def test_the_largest_metadata_is_taken() -> None:
    assert len(pack_metadata({"a": b"x" * (MAX_METADATA_BYTES - 6)})) == MAX_METADATA_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x93\x01\x02",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": 1}) + b"\0",
        msgpack.packb({"a": float("nan")}),
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"a": msgpack.Timestamp(1)}),
        b"\x81\xa1a" + b"\x91" * 900 + b"\x90",
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb({"a": b"x" * MAX_METADATA_BYTES}),
    ],
    ids=repr,
)
def test_hostile_metadata_is_none(data: bytes) -> None:
    assert unpack_metadata(data) is None
    assert SessionNote.unpack(struct.pack("<QdQ", 1, 1.0, 1) + data) is None


@given(st.binary(max_size=60))
def test_any_bytes_are_a_note_or_none(data: bytes) -> None:
    note = SessionNote.unpack(data)
    assert note is None or SessionNote.unpack(note.pack()) == note


def test_the_bytes_of_a_note_are_those_of_the_page() -> None:
    data = struct.pack("<QdQ", 7, 2.5, 3) + msgpack.packb({"a": 1})
    note = SessionNote.unpack(data)
    assert note == SessionNote(7, 2.5, hits=3, metadata=msgpack.packb({"a": 1}))
    assert note.pack() == data
    for bad in (struct.pack("<QdQ", 1 << 62, 1.0, 1), struct.pack("<QdQ", 1, 1.0, 1 << 62), data[:23]):
        assert SessionNote.unpack(bad) is None
    assert SessionNote.unpack(struct.pack("<QdQ", 1, float("nan"), 1)) is None
