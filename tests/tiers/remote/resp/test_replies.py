"""Reading replies, however they are cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import RemoteError, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.resp.replies import ErrorReply, Push, Replies

FOREVER = Deadline(600)


class Pieces:
    """A stream that hands out these bytes in pieces of these sizes, then ends."""

    def __init__(self, text: bytes, sizes: list[int]) -> None:
        self._text = text
        self._sizes = sizes

    def receive(self, most: int, deadline: Deadline) -> bytes:
        piece = self._text[: min(most, self._sizes.pop(0) if self._sizes else 1)]
        if not piece:
            raise RemoteUnavailable("the end")
        self._text = self._text[len(piece) :]
        return piece

    def fill(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        for buffer in buffers:
            if len(self._text) < len(buffer):
                raise RemoteUnavailable("the end")
            buffer[:] = self._text[: len(buffer)]
            self._text = self._text[len(buffer) :]

    def send(self, parts: object, deadline: Deadline) -> None:
        raise AssertionError

    def is_stale(self) -> bool:
        return False

    def close(self) -> None:
        pass


def encoded(reply: object) -> bytes:
    match reply:
        case None:
            return b"_\r\n"
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(reply), reply)
        case int():
            return b":%d\r\n" % reply
        case ErrorReply(text):
            return b"-%s\r\n" % text.encode()
        case Push(items):
            return b">%d\r\n" % len(items) + b"".join(map(encoded, items))
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))
    raise AssertionError(reply)


plain = (
    st.none()
    | st.binary(max_size=300)
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.text("ERR MOVED", max_size=30).map(ErrorReply)
)
replies = st.recursive(plain, lambda inner: st.lists(inner, max_size=5), max_leaves=20)
sizes = st.lists(st.integers(1, 50), max_size=50)


@given(st.lists(replies, max_size=5), sizes)
def test_replies_come_out_as_they_went_in(said: list[object], sizes: list[int]) -> None:
    reader = Replies(Pieces(b"".join(map(encoded, said)), sizes))
    assert reader.many(len(said), FOREVER) == said
    assert reader.is_idle


@given(st.binary(max_size=300), st.integers(0, 20), sizes, plain)
def test_values_go_into_the_buffer(value: bytes, more: int, sizes: list[int], after: object) -> None:
    reader = Replies(Pieces(encoded(value) + encoded(after), sizes))
    buffer = bytearray(b"." * (len(value) + more))
    assert reader.value_into(memoryview(buffer), FOREVER) == len(value)
    assert buffer == value + b"." * more
    assert reader.many(1, FOREVER) == [after]


@given(st.text("$*:+-_#%>\r\n0123456789ax", max_size=40), st.booleans(), sizes)
def test_whatever_comes_is_a_reply_or_a_typed_error(text: str, is_value: bool, sizes: list[int]) -> None:
    reader = Replies(Pieces(text.encode(), sizes))
    try:
        if is_value:
            reader.value_into(memoryview(bytearray(64)), FOREVER)
        else:
            reader.many(2, FOREVER)
    except RemoteError:
        pass


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"#t\r\n", 1),
        (b"#f\r\n", 0),
        (b",1.5\r\n", b"1.5"),
        (b"!5\r\nERR x\r\n", ErrorReply("ERR x")),
        (b"=7\r\ntxt:abc\r\n", b"txt:abc"),
        (b"%1\r\n+a\r\n:1\r\n", [b"a", 1]),
        (b"~1\r\n:1\r\n", [1]),
        (b">2\r\n+invalidate\r\n_\r\n", Push([b"invalidate", None])),
    ],
)
def test_every_kind_of_reply(said: bytes, reply: object) -> None:
    assert Replies(Pieces(said, [])).many(1, FOREVER) == [reply]
