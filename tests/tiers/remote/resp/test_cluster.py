"""A real cluster of three: whose keys are whose, nodes that fail, keys that move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from remotecases import LONG_S, get, opened, put
from valkeys import Valkey, cluster, cluster_url, free_port

from kvstore.errors import RemoteError, RemoteTimeout, RemoteUnavailable
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.engines.resp.slots import slot_of

SOON_S = 0.1
ENOUGH_S = 1.0  # for nodes that answer, on a machine that does much else
KEYS = [f"kvs1/c/{number}" for number in range(60)]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Valkey]]:
    with cluster() as servers:
        yield servers


@pytest.fixture
def engine(servers: list[Valkey]) -> Iterator[RemoteEngine]:
    for server in servers:
        server.ask("FLUSHALL")
    with opened(cluster_url(servers[:1])) as engine:
        for key in KEYS:
            put(engine, key, key.encode())
        yield engine


def _of(engine: RemoteEngine, server: Valkey) -> set[str]:
    return {key for key in KEYS if engine.endpoint(key) == f"resp:127.0.0.1:{server.port}"}


def test_slots_are_those_of_the_servers(servers: list[Valkey]) -> None:
    for key in KEYS:
        assert servers[0].ask("CLUSTER", "KEYSLOT", key) == b":%d\r\n" % slot_of(key)


def test_each_node_has_its_keys_and_is_found_through_any_other(servers: list[Valkey], engine: RemoteEngine) -> None:
    for server in servers:
        mine = _of(engine, server)
        assert mine
        assert server.ask("DBSIZE") == b":%d\r\n" % len(mine)
        with opened(cluster_url([server])) as other:
            assert [get(other, key) for key in KEYS] == [key.encode() for key in KEYS]
    assert set(engine.list("kvs1/c/", LONG_S)) == set(KEYS)
    assert engine.stats()["redirects"] == 0


def test_a_stopped_node_loses_its_own_keys_only(servers: list[Valkey], engine: RemoteEngine) -> None:
    lost = _of(engine, servers[1])
    servers[1].stop()
    try:
        assert engine.exist(KEYS, ENOUGH_S) == [key not in lost for key in KEYS]
        assert engine.stats()["exist_unknown"] == len(lost)
        with pytest.raises(RemoteTimeout):
            engine.get_into(min(lost), memoryview(bytearray(9)), SOON_S)
        for key in set(KEYS) - lost:
            assert get(engine, key) == key.encode()
        with pytest.raises(RemoteTimeout):
            engine.touch(KEYS, 60, SOON_S)
        names = engine.list("kvs1/c/", ENOUGH_S)
        assert {next(names) for _ in range(len(KEYS) - len(lost))} == set(KEYS) - lost
        with pytest.raises(RemoteTimeout):
            next(names)
        with pytest.raises(RemoteTimeout):
            engine.delete(KEYS, ENOUGH_S)
        assert engine.exist(sorted(set(KEYS) - lost), LONG_S) == [False] * (len(KEYS) - len(lost))
    finally:
        servers[1].go_on()


def test_nodes_that_are_all_stopped_are_an_error(servers: list[Valkey], engine: RemoteEngine) -> None:
    for server in servers:
        server.stop()
    try:
        with pytest.raises(RemoteTimeout):
            engine.exist(KEYS, SOON_S)
    finally:
        for server in servers:
            server.go_on()
    assert engine.exist(KEYS, LONG_S) == [True] * len(KEYS)


def test_seeds_that_are_gone_do_not_matter_while_one_answers(servers: list[Valkey], engine: RemoteEngine) -> None:
    nowhere = f"valkey+cluster://127.0.0.1:{free_port()}"
    with opened(f"{nowhere},127.0.0.1:{servers[2].port}") as other:
        assert get(other, KEYS[0]) == KEYS[0].encode()
    with opened(nowhere) as alone:
        for call in (
            lambda: get(alone, "kvs1/a"),
            lambda: alone.exist(KEYS, LONG_S),
            lambda: put(alone, "kvs1/a", b""),
        ):
            with pytest.raises(RemoteUnavailable):
                call()


def test_keys_that_move_are_followed(servers: list[Valkey], engine: RemoteEngine) -> None:
    """One slot goes from its node to the next, as an operator moves it; calls go on at every stage."""
    key = KEYS[0]
    slot = slot_of(key)
    source = next(server for server in servers if key in _of(engine, server))
    target = servers[(servers.index(source) + 1) % 3]
    ids = {server.port: server.ask("CLUSTER", "MYID").split(b"\r\n")[1].decode() for server in servers}
    new = next(name for name in (f"kvs1/n/{n}" for n in range(1 << 20)) if slot_of(name) == slot)
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
    try:
        assert get(engine, key) == key.encode()  # still there
        assert put(engine, new, b"new")  # ASK: a key that the source does not have is the target's
        assert get(engine, new) == b"new"
        assert engine.exist([key, new, KEYS[1]], LONG_S) == [True] * 3
        assert engine.stats()["redirects"] >= 3
        source.ask("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        assert get(engine, key) == key.encode()
    finally:
        for server in (target, source, *servers):
            server.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])
    assert engine.endpoint(key) == f"resp:127.0.0.1:{source.port}"
    assert engine.exist([key, new, KEYS[1]], LONG_S) == [True] * 3  # MOVED
    assert get(engine, key) == key.encode()
    assert engine.endpoint(key) == f"resp:127.0.0.1:{target.port}"
    assert engine.delete([key, new], LONG_S) == 2


def test_a_server_alone_says_that_it_is_of_a_cluster(servers: list[Valkey]) -> None:
    with opened(servers[0].url) as engine, pytest.raises(RemoteError, match=r"cluster://"):
        engine.exist(KEYS, LONG_S)
