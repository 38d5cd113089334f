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

_SCRATCH = 16 << 10
_LINE = 4096  # longer lines are garbage
_TEXT = 1 << 20  # so are longer texts that are no values
_ITEMS = 1 << 17
_DEPTH = 8
_HEAD = 32  # enough for the line before a value; what comes behind it is copied, so no more is asked for
_INT64_DIGITS = 19
_END = b"\r\n"


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
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._begin = self._end = 0  # what was received and not used yet

    @property
    def is_idle(self) -> bool:
        """Whether all that was received has been used."""
        return self._begin == self._end

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
        if size > buffer.nbytes:
            raise too_large(size, buffer.nbytes)
        self._take(buffer[:size], deadline)
        self._end_of_text(deadline)
        return size

    def next(self, deadline: Deadline) -> Reply:
        """Read one reply that is small."""
        return self._next(deadline, 0, [_ITEMS, _TEXT])

    def _next(self, deadline: Deadline, depth: int, room: list[int]) -> Reply:
        """`room`: how many items and how many bytes there may still be."""
        line = self._line(deadline, _SCRATCH)
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
        self._end_of_text(deadline)
        return bytes(text)

    def _line(self, deadline: Deadline, ask: int) -> bytes:
        """The bytes up to the next line's end, received in steps of at most `ask`."""
        searched = self._begin
        while True:
            at = bytes(self._scratch[searched : self._end]).find(_END)
            if at >= 0:
                line = bytes(self._scratch[self._begin : searched + at])
                self._begin = searched + at + len(_END)
                return line
            searched = max(self._begin, self._end - 1)
            if self._end - self._begin > _LINE:
                raise RemoteGarbled(f"a line of more than {_LINE} bytes")
            moved = self._begin
            self._receive(deadline, ask)
            searched -= moved - self._begin

    def _receive(self, deadline: Deadline, ask: int) -> None:
        if self._begin:
            held = bytes(self._scratch[self._begin : self._end])
            self._begin, self._end = 0, len(held)
            self._scratch[: self._end] = held
        room = self._scratch[self._end : min(self._end + ask, _SCRATCH)]
        self._end += self._stream.receive(room, deadline, fill=False)

    def _take(self, target: memoryview, deadline: Deadline) -> None:
        """Fill `target` with what was received, then from the stream."""
        had = min(self._end - self._begin, target.nbytes)
        target[:had] = self._scratch[self._begin : self._begin + had]
        self._begin += had
        if had < target.nbytes:
            self._stream.receive(target[had:], deadline, fill=True)

    def _end_of_text(self, deadline: Deadline) -> None:
        end = bytearray(len(_END))
        self._take(memoryview(end), deadline)
        if end != _END:
            raise RemoteGarbled(f"a text ends with {bytes(end)!r}")


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
