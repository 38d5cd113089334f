"""What a real server tells of keys that others write and remove."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from remotecases import LONG_S, opened, put
from scripted import HELLO, scripted
from threadruns import HANGS_S
from valkeys import valkey

from kvstore.tiers.remote.engines.resp import feed

OK = b"+OK\r\n"


def _told() -> tuple[Callable[[Sequence[str] | None], None], Callable[[], Any]]:
    said: queue.SimpleQueue[Sequence[str] | None] = queue.SimpleQueue()
    return said.put, lambda: said.get(timeout=HANGS_S)


def test_writes_and_removals_of_others_are_told() -> None:
    callback, next_told = _told()
    with valkey() as server, opened(server.url) as reader, opened(server.url) as writer:
        end = reader.changes("kvs1/a", callback)
        assert next_told() is None  # connected
        put(writer, "kvs1/a1", b"x")
        assert next_told() == ["kvs1/a1"]
        put(writer, "kvs1/b1", b"x")  # another prefix
        writer.delete(["kvs1/a1"], LONG_S)
        assert next_told() == ["kvs1/a1"]
        put(writer, "kvs1/a2", b"x", ttl_s=0.001)
        assert {next_told()[0], next_told()[0]} == {"kvs1/a2"}  # written, expired
        put(writer, "kvs1/a3", b"x")
        assert next_told() == ["kvs1/a3"]
        server.ask("FLUSHALL")
        assert next_told() is None
        assert reader.stats()["feed_keys"] == 5
        end()


def test_evictions_are_told() -> None:
    callback, next_told = _told()
    with valkey("--maxmemory-policy", "allkeys-lru") as server, opened(server.url) as engine:
        engine.changes("kvs1/", callback)
        assert next_told() is None
        put(engine, "kvs1/a", bytes(1 << 20))
        assert next_told() == ["kvs1/a"]
        server.ask("CONFIG", "SET", "maxmemory", 1 << 20)
        assert next_told() == ["kvs1/a"]
        assert engine.exist(["kvs1/a"], LONG_S) == [False]


def test_a_server_that_comes_back_is_listened_to_again() -> None:
    callback, next_told = _told()
    with valkey() as server, opened(server.url) as engine:
        engine.changes("kvs1/", callback)
        assert next_told() is None
        server.end()
        server.start()
        assert next_told() is None  # what happened meanwhile is not known
        put(engine, "kvs1/a", b"x")
        assert next_told() == ["kvs1/a"]
        assert engine.stats()["feed_losses"] >= 1


def test_a_server_that_says_nothing_any_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_QUIET_S", 0.02), ("_ANSWER_S", 0.1), ("_STEP_S", 0.01)):
        monkeypatch.setattr(feed, name, seconds)
    callback, next_told = _told()
    with valkey() as server, opened(server.url) as engine:
        engine.changes("kvs1/", callback)
        assert next_told() is None
        server.stop()
        while engine.stats()["feed_losses"] < 2:  # the connection, and then a new one
            pass
        server.go_on()
        while next_told() is not None:
            pass


@pytest.mark.parametrize(
    "said",
    [
        b">2\r\n$10\r\ninvalidate\r\n*3\r\n$2\r\nk\xff\r\n:1\r\n$5\r\nother\r\n",
        b">1\r\n$4\r\nwhat\r\n",
        b"+PONG\r\n",
        b">2\r\n$10\r\ninvalidate\r\n*1\r\n*1\r\n_\r\n",
    ],
)
def test_strange_news_are_not_passed_on(said: bytes) -> None:
    callback, next_told = _told()
    news = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$6\r\nkvs1/a\r\n"
    with scripted(HELLO, OK + said + news) as server, opened(server.url) as engine:
        engine.changes("kvs1/", callback)
        assert next_told() is None
        assert next_told() == ["kvs1/a"]


def test_garbage_ends_the_connection_and_a_new_one_is_opened() -> None:
    callback, next_told = _told()
    with scripted(HELLO, OK + b"nonsense\r\n") as server, opened(server.url) as engine:
        engine.changes("kvs1/", callback)
        assert [next_told(), next_told()] == [None, None]
        assert server.connections >= 2
