"""Engines of the remote tier, each opened anew on values of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from valkeys import shared_valkey

from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.opening import open_engine

LONG_S = 60.0  # what no call takes, however loaded the machine is
_numbers = itertools.count()


@contextmanager
def opened(url: str, **settings: object) -> Iterator[RemoteEngine]:
    engine = open_engine(url, **settings)
    try:
        yield engine
    finally:
        engine.close()


def memory(folder: Path) -> AbstractContextManager[RemoteEngine]:
    return opened(f"memory:test-{next(_numbers)}")


def folder(folder: Path) -> AbstractContextManager[RemoteEngine]:
    return opened(f"folder://{folder}")


@contextmanager
def resp(folder: Path) -> Iterator[RemoteEngine]:
    server = shared_valkey()
    server.ask("FLUSHALL")
    with opened(server.url) as engine:
        yield engine


ENGINES: dict[str, Callable[[Path], AbstractContextManager[RemoteEngine]]] = {
    "memory": memory,
    "folder": folder,
    "resp": resp,
}


def put(engine: RemoteEngine, key: str, *parts: bytes, ttl_s: float | None = None) -> bool:
    return engine.put_if_absent(key, parts, LONG_S, ttl_s)


def get(engine: RemoteEngine, key: str, room: int = 1 << 20) -> bytes | None:
    buffer = bytearray(room)
    size = engine.get_into(key, memoryview(buffer), LONG_S)
    return None if size is None else bytes(buffer[:size])
