"""Engines of the remote tier, each opened anew on values of its own."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest
from mooncakes import can_run, shared_mooncake
from motos import make_bucket, shared_moto
from s3servers import s3_server
from tlsproxy import tls_in_front_of, trusting
from valkeys import cluster_url, shared_cluster, shared_valkey

from kvstore.errors import RemoteError
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.engines.faulty import FaultPlan
from kvstore.tiers.remote.opening import open_engine

LONG_S = 60.0  # what no call takes, however loaded the machine is
S3_KEYS = {"access_key_id": "name", "secret_access_key": "secret"}
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


def faulty(folder: Path) -> AbstractContextManager[RemoteEngine]:
    """Without any fault it is as good as the engine inside."""
    return opened(f"memory:test-{next(_numbers)}", faults=FaultPlan())


@contextmanager
def resp(folder: Path) -> Iterator[RemoteEngine]:
    server = shared_valkey()
    server.ask("FLUSHALL")
    with opened(server.url) as engine:
        yield engine


@contextmanager
def resp_tls(folder: Path) -> Iterator[RemoteEngine]:
    server = shared_valkey()
    server.ask("FLUSHALL")
    with tls_in_front_of(server.port, folder) as port:
        with opened(f"valkeys://localhost:{port}", tls_context=trusting(folder)) as engine:
            yield engine


@contextmanager
def resp_cluster(folder: Path) -> Iterator[RemoteEngine]:
    servers = shared_cluster()
    for server in servers:
        server.ask("FLUSHALL")
    with opened(cluster_url(servers)) as engine:
        yield engine


@contextmanager
def s3(folder: Path, is_weak: bool = False) -> Iterator[RemoteEngine]:
    with s3_server(is_weak) as server, opened(server.url, **S3_KEYS) as engine:
        yield engine


ENGINES: dict[str, Callable[[Path], AbstractContextManager[RemoteEngine]]] = {
    "memory": memory,
    "folder": folder,
    "faulty": faulty,
    "resp": resp,
    "resp_tls": resp_tls,
    "resp_cluster": resp_cluster,
    "s3": s3,
    "s3_weak": partial(s3, is_weak=True),
}


@contextmanager
def moto_bucket(folder: Path) -> Iterator[RemoteEngine]:
    endpoint = shared_moto()
    bucket = f"records-{next(_numbers)}"
    make_bucket(endpoint, bucket)
    with opened(f"s3://{bucket}/some/prefix?endpoint={endpoint}", **S3_KEYS) as engine:
        yield engine


if importlib.util.find_spec("moto") is not None:  # as `make test-remote` has it
    ENGINES["moto"] = moto_bucket


@contextmanager
def mooncake(folder: Path) -> Iterator[RemoteEngine]:
    url = shared_mooncake().url
    with opened(url) as before:
        before.delete(list(before.list("", LONG_S)), LONG_S)
    with opened(url) as engine:
        yield engine


if can_run():  # as `make test-remote` has it
    ENGINES["mooncake"] = mooncake


def failures(
    engine: RemoteEngine, timeout_s: float, nbytes: int, *more: Callable[[], object]
) -> list[type[BaseException]]:
    """How each kind of call fails, and these others. nbytes: of the value that is put."""
    found = []
    for call in (
        lambda: engine.get_into("kvs1/a", memoryview(bytearray(9)), timeout_s),
        lambda: engine.put("kvs1/b", [bytes(nbytes)], timeout_s),
        lambda: engine.exist(["kvs1/a", "kvs1/b"], timeout_s),
        *more,
        lambda: engine.delete(["kvs1/c"], timeout_s),
        lambda: list(engine.list("kvs1/", timeout_s)),
    ):
        with pytest.raises(RemoteError) as caught:
            call()
        found.append(caught.type)
    return found


def put(engine: RemoteEngine, key: str, *parts: bytes, ttl_s: float | None = None) -> bool:
    return engine.put(key, parts, LONG_S, ttl_s)


def get(engine: RemoteEngine, key: str, room: int = 1 << 20) -> bytes | None:
    buffer = bytearray(room)
    size = engine.get_into(key, memoryview(buffer), LONG_S)
    return None if size is None else bytes(buffer[:size])
