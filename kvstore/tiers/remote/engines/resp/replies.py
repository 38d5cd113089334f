"""What a server says: the protocol RESP, version 3 and the parts of version 2 that differ.

Every byte is checked before anything is allocated for it: a length is a number of few digits, and what it announces is
bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvstore.errors import RemoteGarbled
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.resp.stream import Stream
from kvstore.tiers.remote.values import too_large

_ASKED = 16 << 10
_LINE = 4096  # longer lines are garbage
_TEXT = 1 << 20  # so are longer texts that are no values
_ITEMS = 1 << 17
_DEPTH = 8
_HEAD = 32  # enough for the line before a value; what comes behind it is copied, so no more is asked for
_INT64_DIGITS = 19
_END = b"\r\n"
_NUMBERS = (b":0", b":1")
_ZERO = ord("0")


@dataclass(frozen=True)
class ErrorReply:
    """A server refuses one command. The connection is fine."""

    text: str


@dataclass(frozen=True)
class Push:
    """What a server says without being asked."""

    items: list[Reply]


Reply: TypeAlias = "bytes | int | ErrorReply | Push | list[Reply] | None"


class Replies:
    """Reads replies from a stream. Not thread-safe.

    Raises:
        RemoteGarbled: from every method; the stream is then of no use any more.
        RemoteTimeout, RemoteUnavailable: as the stream does.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._held = b""  # what was received and not used yet, from `_at` on
        self._at = 0
        self._end = memoryview(bytearray(len(_END)))

    @property
    def is_idle(self) -> bool:
        """Whether all that was received has been used."""
        return self._at == len(self._held)

    def value_into(self, buffer: memoryview, deadline: Deadline) -> int | ErrorReply | None:
        """Read the reply to GET: a value, straight into `buffer`. Return its size, or None if there is none.

        Raises:
            RemoteTooLarge: it does not fit. The stream is then of no use any more.
        """
        line = self._line(deadline, _HEAD)
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return ErrorReply(_text(rest))
        if line in (b"_", b"$-1"):
            return None
        if kind != b"$":
            raise RemoteGarbled(f"expected a value, found {line[:40]!r}")
        size = _number(rest, least=0)
        if size > len(buffer):
            raise too_large(size, len(buffer))
        self._take(buffer[:size], deadline)
        return size

    def many(self, count: int, deadline: Deadline) -> list[Reply]:
        """Read replies that are small."""
        replies: list[Reply] = []
        while len(replies) < count:
            if self._held.startswith(_NUMBERS, self._at) and self._held.startswith(_END, self._at + 2):
                replies.append(self._held[self._at + 1] - _ZERO)  # :0 or :1, as most are
                self._at += 4
            else:
                replies.append(self._next(deadline, 0, [_ITEMS, _TEXT]))
        return replies

    def _next(self, deadline: Deadline, depth: int, room: list[int]) -> Reply:
        """`room`: how many items and how many bytes there may still be."""
        line = self._line(deadline, _ASKED)
        kind, rest = line[:1], line[1:]
        room[0] -= 1
        if kind in (b"+", b","):
            return rest
        if kind == b"-":
            return ErrorReply(_text(rest))
        if kind == b":":
            return _number(rest, least=-(1 << 63))
        if line in (b"#t", b"#f"):
            return int(line == b"#t")
        if line in (b"_", b"$-1", b"*-1"):
            return None
        if kind in (b"$", b"=", b"!"):
            text = self._small(_number(rest, least=0), deadline, room)
            return ErrorReply(_text(text)) if kind == b"!" else text
        if kind in (b"*", b"~", b">", b"%"):
            count = _number(rest, least=0) * (2 if kind == b"%" else 1)
            if count > room[0] or depth == _DEPTH:
                raise RemoteGarbled(f"a list of {count} items, {depth} deep")
            items = [self._next(deadline, depth + 1, room) for _ in range(count)]
            return Push(items) if kind == b">" else items
        raise RemoteGarbled(f"expected a reply, found {line[:40]!r}")

    def _small(self, size: int, deadline: Deadline, room: list[int]) -> bytes:
        room[1] -= size
        if room[1] < 0:
            raise RemoteGarbled(f"a text of {size} bytes where none is so long")
        text = bytearray(size)
        self._take(memoryview(text), deadline)
        return bytes(text)

    def _line(self, deadline: Deadline, ask: int) -> bytes:
        """The bytes up to the next line's end, received in steps of at most `ask`."""
        while (end := self._held.find(_END, self._at)) < 0:
            held = self._held[self._at :]
            if len(held) > _LINE:
                raise RemoteGarbled(f"a line of more than {_LINE} bytes")
            self._held, self._at = held + self._stream.receive(ask, deadline), 0
        line = self._held[self._at : end]
        self._at = end + len(_END)
        return line

    def _take(self, target: memoryview, deadline: Deadline) -> None:
        """Fill `target` with a text: from what is held, then from the stream; its end has to follow."""
        held = self._held[self._at : self._at + len(target)]
        target[: len(held)] = held
        self._at += len(held)
        end = self._held[self._at : self._at + len(_END)]
        self._at += len(end)
        self._end[: len(end)] = end
        self._stream.fill([target[len(held) :], self._end[len(end) :]], deadline)
        if self._end != _END:
            raise RemoteGarbled(f"a text ends with {bytes(self._end)!r}")


def _number(digits: bytes, least: int) -> int:
    sign, body = (-1, digits[1:]) if digits[:1] == b"-" else (1, digits)
    if not body.isdigit() or len(body) > _INT64_DIGITS:
        raise RemoteGarbled(f"expected a number, found {digits[:40]!r}")
    number = sign * int(body)
    if not least <= number < 1 << 63:
        raise RemoteGarbled(f"the number {number} cannot be")
    return number


def _text(raw: bytes) -> str:
    return raw[:200].decode("ascii", "replace")
