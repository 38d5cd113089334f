"""A real server that stops, dies, comes back, is full, or wants a password."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from remotecases import LONG_S, failures, get, opened, put
from threadruns import run_together
from valkeys import Valkey, free_port, valkey

from kvstore.errors import ConfigError, RemoteFull, RemoteRefused, RemoteTimeout, RemoteUnavailable
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.opening import open_engine

SOON_S = 0.1


@pytest.fixture
def server() -> Iterator[Valkey]:
    with valkey() as server:
        yield server


def _calls(engine: RemoteEngine, timeout_s: float) -> list[type[BaseException]]:
    """How each kind of call fails."""
    return failures(engine, timeout_s, 8 << 20, lambda: engine.touch(["kvs1/a"], 60, timeout_s))


def test_a_server_that_is_stopped_and_goes_on(server: Valkey) -> None:
    with opened(server.url) as engine:
        put(engine, "kvs1/a", b"a")
        server.stop()
        assert _calls(engine, SOON_S) == [RemoteTimeout] * 6
        server.go_on()
        assert get(engine, "kvs1/a") == b"a"


def test_a_server_that_dies_and_comes_back(server: Valkey) -> None:
    with opened(server.url) as engine:
        run_together(*(lambda: put(engine, "kvs1/a", b"a") for _ in range(4)))
        server.end()
        assert _calls(engine, LONG_S) == [RemoteUnavailable] * 6
        server.start()
        assert put(engine, "kvs1/a", b"again")
        assert get(engine, "kvs1/a") == b"again"


def test_connections_that_the_server_closed_meanwhile_cost_no_call(server: Valkey) -> None:
    with opened(server.url) as engine:
        put(engine, "kvs1/a", b"a")
        for _ in range(3):
            server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert get(engine, "kvs1/a") == b"a"
        assert engine.stats()["connections_opened"] == 4


def test_an_engine_opens_whether_or_not_its_server_is_there() -> None:
    with opened(f"valkey://127.0.0.1:{free_port()}") as engine:
        assert _calls(engine, LONG_S) == [RemoteUnavailable] * 6
        assert engine.stats()["failures"] == 6


def test_a_full_server_refuses_and_serves_on(server: Valkey) -> None:
    server.ask("CONFIG", "SET", "maxmemory", 8 << 20)
    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    with opened(server.url) as engine:
        values = {number: bytes([number]) * (1 << 20) for number in range(12)}
        with pytest.raises(RemoteFull):
            all(put(engine, f"kvs1/{number}", value) for number, value in values.items())
        stored = [number for number in values if engine.exist([f"kvs1/{number}"], LONG_S) == [True]]
        assert 0 < len(stored) < 12
        for number in stored:
            assert get(engine, f"kvs1/{number}") == values[number]
        assert engine.stats()["connections_opened"] == 1


def test_passwords(server: Valkey) -> None:
    server.ask("ACL", "SETUSER", "reader", "on", ">pass word", "~*", "+@all", "-@write")
    server.ask("CONFIG", "SET", "requirepass", "se/cret")
    where = f"127.0.0.1:{server.port}"
    with opened(f"valkey://:se%2Fcret@{where}/3") as engine:
        assert put(engine, "kvs1/a", b"a")
        assert list(engine.list("", LONG_S)) == ["kvs1/a"]
    with opened(f"valkey://:se%2Fcret@{where}/4") as engine:
        assert list(engine.list("", LONG_S)) == []
    with opened(f"redis://reader:pass%20word@{where}/3") as engine:
        assert get(engine, "kvs1/a") == b"a"
        with pytest.raises(RemoteRefused, match="NOPERM"):
            put(engine, "kvs1/b", b"b")
    for url in (f"valkey://{where}", f"valkey://:wrong@{where}", f"valkey://:se%2Fcret@{where}/99"):
        with opened(url) as engine, pytest.raises(RemoteRefused) as caught:
            get(engine, "kvs1/a")
        assert "cret" not in str(caught.value)


def test_more_threads_than_connections_wait_for_their_turn(server: Valkey) -> None:
    with opened(server.url, connections=2) as engine:
        put(engine, "kvs1/a", b"a" * 100_000)
        run_together(*(lambda: [get(engine, "kvs1/a") for _ in range(20)] for _ in range(12)))
        assert engine.stats()["connections_opened"] <= 2
        server.stop()
        run_together(*(lambda: _times_out(engine) for _ in range(6)))
        server.go_on()


def _times_out(engine: RemoteEngine) -> None:
    with pytest.raises(RemoteTimeout):
        engine.exist(["kvs1/a"], SOON_S)


def test_values_expire_and_a_touch_lets_them_live_longer(server: Valkey) -> None:
    with opened(server.url) as engine:
        for key, ttl_s in (("kvs1/short", 600.0), ("kvs1/long", 6000.0), ("kvs1/ever", None)):
            put(engine, key, b"x", ttl_s=ttl_s)
        engine.touch(["kvs1/short", "kvs1/long", "kvs1/ever", "kvs1/none"], 3000, LONG_S)
        left = [int(server.ask("TTL", f"kvs1/{name}")[1:-2]) for name in ("short", "long", "ever", "none")]
        assert 2900 <= left[0] <= 3000
        assert 5900 <= left[1] <= 6000
        assert left[2:] == [-1, -2]
        put(engine, "kvs1/soon", b"x", ttl_s=0.001)
        while engine.exist(["kvs1/soon"], LONG_S) == [True]:
            pass


@pytest.mark.parametrize(
    "url",
    [
        "valkey://",
        "valkey://:secret@/1",
        "valkey://:secret@h:port",
        "redis://:secret@h/x",
        "redis://:secret@h?a=1",
        "redis://h:99999",
        "redis://:secret",
        "redis://h,secret",
        "redis+cluster://:secret@h/1",
    ],
)
def test_urls_that_name_no_server(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_engine(url)
    assert "secret" not in str(caught.value)


def test_names_of_servers_are_looked_up() -> None:
    with valkey() as server, opened(f"valkey://localhost:{server.port}") as engine:
        assert put(engine, "kvs1/a", b"a")
    with opened("valkey://no-such-host.invalid") as engine, pytest.raises((RemoteUnavailable, RemoteTimeout)):
        engine.exist(["kvs1/a"], 5)
