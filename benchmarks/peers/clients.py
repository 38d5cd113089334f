"""Clients of Valkey and S3 with the same four calls, so that one loop can time them all.

Each class raises ImportError if what it stands for is not installed.
"""

from __future__ import annotations

import socket
from typing import Any, Protocol

from benchmarks.common import MIB
from kvstore.tiers.remote.engine import RemoteEngine

LONG_S = 30.0


class Client(Protocol):
    """Values of 1 MiB under keys. `get` and `exist` raise AssertionError if something is missing."""

    def get(self, key: str) -> None: ...

    def put(self, key: str, value: bytes) -> None: ...

    def remove(self, key: str) -> None: ...

    def exist(self, keys: list[str]) -> None: ...

    def close(self) -> None: ...


class Ours:
    """An engine of the remote tier."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._buffer = memoryview(bytearray(MIB))

    def get(self, key: str) -> None:
        assert self._engine.get_into(key, self._buffer, LONG_S) == MIB

    def put(self, key: str, value: bytes) -> None:
        assert self._engine.put(key, [value], LONG_S)

    def remove(self, key: str) -> None:
        self._engine.delete([key], LONG_S)

    def exist(self, keys: list[str]) -> None:
        assert all(self._engine.exist(keys, LONG_S))

    def close(self) -> None:
        self._engine.close()


class PlainSocket:
    """The same bytes over a blocking socket, without looking at them: what no client can be faster than."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(MIB + 64))

    def get(self, key: str) -> None:
        self._socket.sendall(_command("GET", key))
        self._receive(MIB + len("$1048576\r\n\r\n"))

    def put(self, key: str, value: bytes) -> None:
        head = _command("SET", key, "").removesuffix(b"$0\r\n\r\n") + b"$%d\r\n" % len(value)
        parts = [head, memoryview(value), b"\r\n"]
        sent = self._socket.sendmsg(parts)
        for part in parts:
            if sent < len(part):
                self._socket.sendall(memoryview(part)[sent:])
            sent = max(0, sent - len(part))
        self._receive(len("+OK\r\n"))

    def remove(self, key: str) -> None:
        self._socket.sendall(_command("UNLINK", key))
        self._receive(len(":1\r\n"))

    def exist(self, keys: list[str]) -> None:
        self._socket.sendall(b"".join(_command("EXISTS", key) for key in keys))
        self._receive(len(":1\r\n") * len(keys))

    def close(self) -> None:
        self._socket.close()

    def _receive(self, size: int) -> None:
        have = 0
        while have < size:
            have += self._socket.recv_into(self._buffer[have:size])


class RedisPy:
    """redis-py, or valkey-py, which began as a copy of it."""

    def __init__(self, module: Any, port: int) -> None:
        kind = getattr(module, "Valkey", None) or module.Redis
        self._client = kind(host="127.0.0.1", port=port, protocol=3)

    def get(self, key: str) -> None:
        assert len(self._client.get(key)) == MIB

    def put(self, key: str, value: bytes) -> None:
        assert self._client.set(key, value, nx=True)

    def remove(self, key: str) -> None:
        self._client.unlink(key)

    def exist(self, keys: list[str]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(key)
            assert all(pipeline.execute())

    def close(self) -> None:
        self._client.close()


def redis_py(port: int) -> Client:
    import redis

    return RedisPy(redis, port)


def valkey_py(port: int) -> Client:
    import valkey

    return RedisPy(valkey, port)


class Glide:
    """valkey-glide-sync; values are read into a buffer."""

    def __init__(self, port: int) -> None:
        import glide_sync

        self._glide = glide_sync
        addresses = [glide_sync.NodeAddress("127.0.0.1", port)]
        self._client = glide_sync.GlideClient.create(glide_sync.GlideClientConfiguration(addresses))
        self._buffer = memoryview(bytearray(MIB))

    def get(self, key: str) -> None:
        assert self._client.get(key, buffer=self._buffer) is not None

    def put(self, key: str, value: bytes) -> None:
        only = self._glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        assert self._client.set(key, value, conditional_set=only) is not None

    def remove(self, key: str) -> None:
        self._client.unlink([key])

    def exist(self, keys: list[str]) -> None:
        batch = self._glide.Batch(is_atomic=False)
        for key in keys:
            batch.exists([key])
        assert all(self._client.exec(batch, raise_on_error=True) or [0])

    def close(self) -> None:
        self._client.close()


class Obstore:
    """obstore alone, in its blocking form; a value is copied to a buffer, as our engine has to."""

    def __init__(self, endpoint: str, **keys: Any) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore = obstore
        more = {"region": "us-east-1", "client_options": {"allow_http": True}, **keys}
        self._store = S3Store("records", endpoint=endpoint, **more)
        self._buffer = memoryview(bytearray(MIB))

    def get(self, key: str) -> None:
        self._buffer[:] = memoryview(self._obstore.get(self._store, key).bytes())

    def put(self, key: str, value: bytes) -> None:
        self._obstore.put(self._store, key, value, mode="create", use_multipart=False)

    def remove(self, key: str) -> None:
        self._obstore.delete(self._store, [key])

    def exist(self, keys: list[str]) -> None:
        for key in keys:
            self._obstore.head(self._store, key)

    def close(self) -> None:
        pass


def _command(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)
