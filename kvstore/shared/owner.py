"""The process that has a store open for writing, and makes the calls of the others."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from typing import Any

from kvstore.core.prepared import PreparedCache
from kvstore.shared.calls import from_wire, pack_error, pack_result, perform
from kvstore.shared.memory import can_read
from kvstore.shared.shipment import fetch, unship
from kvstore.shared.wire import Disconnected, Late, check_waits, peer_of, receive, send
from kvstore.store import KVStore

_log = logging.getLogger(__name__)
_SOCKET = "owner.sock"
_BACKLOG = 128
_GRACE_S = 30.0


class FolderSocket:
    """The address of the owner's socket in the folder of a store, however long the folder's name is.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, FolderSocket(folder) as address:
        ...     address.endswith("/owner.sock")
        True
    """

    def __init__(self, folder: str) -> None:
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> str:
        return f"/proc/self/fd/{self._fd}/{_SOCKET}"  # an address of a socket may have 107 bytes

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


class Owner:
    """Makes the calls of other processes of this user, each connection's on a thread of its own, until `close`.

    Args:
        store: open for writing; whoever closes it closes this before.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}  # guarded by _lock
        self._closing = False  # guarded by _lock
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with FolderSocket(store.path) as address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)  # of an owner that died: whoever has the writer's lock is the only one
            self._listener.bind(address)
            os.chmod(address, 0o600)
        self._listener.listen(_BACKLOG)
        _owners.append(self)
        self._thread = threading.Thread(target=self._accept, name="kvstore-owner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no calls any more, and return when those under way have been answered. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            connections = dict(self._connections)
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError), FolderSocket(self._store.path) as address:
            os.unlink(address)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)  # an answer still goes out
        for thread in [self._thread, *connections.values()]:
            if thread is not threading.current_thread():
                thread.join(_GRACE_S)
        if self in _owners:
            _owners.remove(self)

    @property
    def connections(self) -> int:
        """How many connections other processes hold."""
        return len(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,), name="kvstore-owner-call", daemon=True)
            with self._lock:
                if self._closing:
                    sock.close()
                    continue
                self._connections[sock] = thread
            try:
                thread.start()
            except RuntimeError:  # the system gives no further thread: the other process tries again
                self._forget(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            pid = peer_of(sock)
            while True:
                message, fd = receive(sock)
                try:
                    answer = self._answer(message, fd, pid, sock)
                finally:
                    if fd is not None:
                        os.close(fd)
                if not message.get("silent"):
                    send(sock, answer)
                del message, answer
        except (Disconnected, Late):
            pass
        finally:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._connections.pop(sock, None)
        sock.close()

    def _answer(self, message: dict[str, Any], fd: int | None, pid: int, sock: socket.socket) -> dict[str, Any]:
        try:
            arguments = from_wire(message.get("arguments"))
            call = message.get("call")
            if not isinstance(call, str) or not isinstance(arguments, dict):
                raise ValueError("call: expected a name and arguments")
            if call == "probe":
                return {"result": can_read(pid, int(arguments["address"]))}
            if "shipment" in arguments:
                arguments["kv"] = self._received(arguments, fd, pid)
                check_waits(sock)
            return pack_result(perform(self._store, call, arguments))
        except Disconnected:
            raise
        except Exception as error:
            answer = pack_error(error)
            if answer.get("error") == "KVStoreError":
                _log.exception("%s: a call of another process failed", self._store.path)
            return answer

    def _received(self, arguments: dict[str, Any], fd: int | None, pid: int) -> PreparedCache:
        told, start = arguments.pop("shipment"), arguments.get("start", 0)
        layout, count = self._store.identity.layout, len(arguments.get("tokens", ()))
        if not isinstance(told, dict) or not isinstance(start, int) or not 0 <= start < count:
            raise ValueError("shipment: expected what it holds, and where it begins")
        if fd is not None:
            layers, states = unship(fd, told)
        else:
            layers, states = fetch(pid, told, layout, count - start, self._store._put_path().pool.take)
        return PreparedCache.received(layout, tuple(layers), states, count - start)

    def _after_fork(self) -> None:
        """In a child: the parent's connections end with the parent, not with its children."""
        self._listener.close()
        for sock in list(self._connections):
            sock.close()


_owners: list[Owner] = []


def _after_fork() -> None:
    for owner in _owners:
        owner._after_fork()
    _owners.clear()


os.register_at_fork(after_in_child=_after_fork)
