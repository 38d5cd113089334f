"""Messages between processes of one user, over a UNIX socket: msgpack behind its length, and at most one descriptor.

What arrives is checked before memory is taken for it, and holds plain values only.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from typing import Any

import msgpack

_HEAD = struct.Struct("<4sI")
_MAGIC = b"kvs1"
MOST_BYTES = 256 << 20  # of a message: tokens and their probabilities; tensors come in memory of their own
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Disconnected(Exception):
    """The other end is gone, or does not speak as it should. The connection is of no use any more."""


class Late(Exception):
    """Nothing came for as long as the socket waits. The connection is whole if nothing of the message had come."""


def send(sock: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    """Send a message, and with it a descriptor, which stays open here.

    Raises:
        Disconnected: the other end is gone, or takes nothing within the timeout of the socket.
        ValueError: the message is too large, or holds something that is not sent.
    """
    try:
        body = msgpack.packb(message, use_bin_type=True)
    except TypeError as error:
        raise ValueError(f"a call of another process takes plain values: {error}") from error
    if len(body) > MOST_BYTES:
        raise ValueError(f"tokens: what describes a call may take {MOST_BYTES} bytes, found {len(body)}")
    head = _HEAD.pack(_MAGIC, len(body))
    try:
        if fd is None:
            sock.sendall(head + body)
            return
        sent = sock.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        sock.sendall(head[sent:] + body)
    except OSError as error:
        raise Disconnected(str(error)) from error


def receive(sock: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Return the next message, and the descriptor that came with it, which the caller has to close.

    Raises:
        Late: nothing came within the timeout of the socket.
        Disconnected: the other end is gone, or sent something else.
    """
    fds = array.array("i")
    try:
        head, ancillary, flags, _ = sock.recvmsg(
            _HEAD.size, socket.CMSG_SPACE(4 * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if flags & socket.MSG_CTRUNC or len(fds) > 1:
            raise Disconnected("more descriptors than one came with a message")
        if head:
            head += _exactly(sock, _HEAD.size - len(head))
        message = _message(sock, head)
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):
            raise Late from error
        if isinstance(error, OSError):
            raise Disconnected(str(error)) from error
        raise
    return message, fds[0] if fds else None


def _message(sock: socket.socket, head: bytes) -> dict[str, Any]:
    if not head:
        raise Disconnected("the other end closed the connection")
    magic, size = _HEAD.unpack(head)
    if magic != _MAGIC or size > MOST_BYTES:
        raise Disconnected("the other end does not speak as kvstore does")
    try:
        message = msgpack.unpackb(_exactly(sock, size), raw=False, strict_map_key=True)
    except TimeoutError as error:
        raise Disconnected("the other end stopped in the middle of a message") from error
    except (ValueError, msgpack.UnpackException) as error:
        raise Disconnected(f"a message is malformed: {error}") from error
    if not isinstance(message, dict):
        raise Disconnected("a message is malformed")
    return message


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise Disconnected("the other end closed the connection")
        data += part
    return bytes(data)


def check_waits(sock: socket.socket) -> None:
    """Check that the other end still waits for its answer: what was read of its memory until now is what it sent.

    Raises:
        Disconnected: it has given up, and its memory may hold something else by now.
    """
    try:
        waits = sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    except OSError as error:
        raise Disconnected(str(error)) from error
    if not waits:
        raise Disconnected("the other end has given up")


def hang_up(sock: socket.socket) -> None:
    """Close a connection, so that the other end notices, whoever else may have a copy of the descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def peer_of(sock: socket.socket) -> int:
    """Return the number of the process that made the other end.

    Raises:
        Disconnected: it belongs to another user.
    """
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    if user != os.geteuid():
        raise Disconnected("the process at the other end belongs to another user")
    return int(pid)
