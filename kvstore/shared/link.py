"""The way from a process that does not own the store to the one that does."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from typing import Any

from kvstore.errors import StoreForked, WriterSilent
from kvstore.shared.calls import result_of, to_wire
from kvstore.shared.memory import allow_reader, probe
from kvstore.shared.owner import FolderSocket
from kvstore.shared.wire import Disconnected, Late, hang_up, peer_of, receive, send
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.lock import WriterLock

_LOOK_S = 0.5  # how often a call that waits looks whether somebody still owns the store
_SEND_S = 10.0
_HINT_S = 0.05
_ASK_S = 5.0  # how often a call that may take any time asks whether its owner still answers


class Link:
    """Connections to the owner of a store, one for each call that is under way. Thread-safe.

    Args:
        folder: of the store.
        timeout_s: how long a call waits for its answer, if it does not say otherwise.

    Attributes:
        is_readable: whether the owner can read the memory of this process.

    Raises:
        Disconnected: nobody owns the store, or shares it.
    """

    def __init__(self, folder: str, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []  # guarded by _lock
        self._all: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._closed = False  # guarded by _lock
        self._writer = WriterLock(FileSystem(), folder)
        self._owner = 0
        self._give_back(self._connect())
        _links.add(self)
        allow_reader(self._owner)
        self.is_readable = bool(self.call("probe", {"address": probe()}))

    def call(self, name: str, arguments: dict[str, Any], fd: int | None = None, timeout_s: float | None = None) -> Any:
        """Let the owner make a call, and return its result.

        Args:
            name: in `calls.CALLS`.
            arguments: of the call.
            fd: of memory that is sent with it; stays open here.
            timeout_s: how long to wait for the answer; 0 for as long as the owner answers other calls in time. Default:
                that of the link.

        Raises:
            What the call raised.
            Disconnected: the owner is gone, or another one. The call may have been made or not.
            WriterSilent: no answer came in time.
        """
        sock = self._take()
        try:
            sock.settimeout(_SEND_S)
            send(sock, {"call": name, "arguments": to_wire(arguments)}, fd)
            answer = self._answer(sock, name, self._timeout_s if timeout_s is None else timeout_s)
        except BaseException:  # an interrupt, too: the answer to this call must not be taken for the next one's
            hang_up(sock)  # nor may the owner go on to read memory that is the caller's again
            raise
        self._give_back(sock)
        return result_of(answer)

    def hint(self, name: str, arguments: dict[str, Any]) -> bool:
        """Let the owner make a call whose result nobody waits for; False if it cannot take it now."""
        with contextlib.suppress(Disconnected):
            sock = self._take()
            try:
                sock.settimeout(_HINT_S)
                send(sock, {"call": name, "arguments": to_wire(arguments), "silent": True})
            except BaseException:
                sock.close()
                raise
            self._give_back(sock)
            return True
        return False

    def close(self) -> None:
        """Give up all connections. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def _answer(self, sock: socket.socket, name: str, timeout_s: float) -> dict[str, Any]:
        sock.settimeout(_LOOK_S)
        end = time.monotonic() + (timeout_s or _ASK_S)
        while True:
            try:
                answer, fd = receive(sock)
            except Late:
                if self._writer.is_free():  # a child of the owner may hold the connection after it
                    raise Disconnected("nobody owns the store any more") from None
                if time.monotonic() > end:
                    if timeout_s:
                        raise WriterSilent(
                            f"{self._folder}: {self._writer.holder()}, which writes the store, did not answer a {name} "
                            f"within {timeout_s:g} s; look whether it is stopped, and end it if so"
                        ) from None
                    self.call("probe", {"address": probe()})
                    end = time.monotonic() + _ASK_S
                continue
            if fd is not None:
                os.close(fd)
            return answer

    def _take(self) -> socket.socket:
        if os.getpid() != self._pid:
            raise StoreForked("the store was opened in the parent process; open it again in this one")
        with self._lock:
            if self._closed:
                raise Disconnected("the link is closed")
            if self._idle:
                return self._idle.pop()
        return self._connect()

    def _give_back(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(sock)
                return
        sock.close()

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_SEND_S)
            with FolderSocket(self._folder) as address:
                sock.connect(address)
            self._owner = peer_of(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise Disconnected(str(error)) from error
            raise
        self._all.add(sock)
        return sock

    def _after_fork(self) -> None:
        for sock in list(self._all):
            sock.close()


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link._after_fork()


os.register_at_fork(after_in_child=_after_fork)
