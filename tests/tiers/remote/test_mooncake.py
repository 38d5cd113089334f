"""A Mooncake store whose parts die: calls end in time, and a store beside it goes on."""

from __future__ import annotations

import importlib.util
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import remotestores as rc
import small_stores as small
from mooncakes import Mooncake, can_run
from remotecases import LONG_S, get, opened, put

from kvstore.errors import ConfigError, RemoteError, RemoteTimeout, RemoteUnavailable
from kvstore.tiers.remote.opening import open_engine

if importlib.util.find_spec("mooncake") is None or not can_run():
    pytest.skip("Mooncake is not installed here; make test-remote installs it beside", allow_module_level=True)

LATE_S = 0.5  # on a loaded machine; 20 ms are promised


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Mooncake]:
    server = Mooncake(tmp_path)
    yield server
    server.end()


def test_stores_share_by_way_of_it(tmp_path: Path, server: Mooncake) -> None:
    tokens = small.tokens_of(1, 6 * small.BLOCK + 2)
    remote = rc.settings(server.url, deadline_s=LONG_S)
    rc.filled(tmp_path / "a", remote, tokens)
    with rc.open_store(tmp_path / "b", remote) as store:
        assert rc.got(store, tokens).tiers == {"remote": 6 * small.BLOCK}
        assert store.check(deep=True).problems == ()


def test_values_of_a_node_that_died_are_not_there_or_cannot_be_read(server: Mooncake) -> None:
    with opened(server.url) as engine:
        put(engine, "kvs1/a", b"value")
        server.node.kill()
        server.node.wait()
        begin = time.monotonic()
        with suppress(RemoteError):
            assert engine.get_into("kvs1/a", memoryview(bytearray(9)), 2.0) is None
        assert time.monotonic() - begin < 2.0 + LATE_S


def test_calls_end_in_time_when_the_master_died(server: Mooncake) -> None:
    with opened(server.url) as engine:
        put(engine, "kvs1/a", b"value")
        server.master.kill()
        server.master.wait()
        for call in (
            lambda: engine.get_into("kvs1/a", memoryview(bytearray(9)), 0.3),
            lambda: engine.put("kvs1/b", [b"x"], 0.3),
            lambda: engine.exist(["kvs1/a"], 0.3),
        ):
            begin = time.monotonic()
            with pytest.raises(RemoteError):
                call()
            assert time.monotonic() - begin < 0.3 + LATE_S


def test_without_a_master_it_opens_fails_in_time_and_closes() -> None:
    begin = time.monotonic()
    with opened("mooncake://127.0.0.1:9?local=127.0.0.1") as engine:
        with pytest.raises((RemoteUnavailable, RemoteTimeout)):
            engine.exist(["kvs1/a"], 1.0)
    assert time.monotonic() - begin < 1.0 + LATE_S


def test_a_master_that_never_answers_keeps_nobody_waiting(server: Mooncake) -> None:
    """Neither at opening nor later; the program's other threads go on, too."""
    with opened(server.url) as engine, opened(server.url) as late:
        put(engine, "kvs1/a", b"value")
        server.master.send_signal(signal.SIGSTOP)
        for each in (engine, late):
            begin = time.monotonic()
            with pytest.raises(RemoteTimeout):
                each.exist(["kvs1/a"], 0.3)
            assert time.monotonic() - begin < 0.3 + LATE_S


def test_what_another_program_wrote_is_no_value(server: Mooncake) -> None:
    from mooncake.store import MooncakeDistributedStore

    with opened(server.url) as engine:
        put(engine, "kvs1/a", b"ours")
        other = MooncakeDistributedStore()
        master = server.url.removeprefix("mooncake://").partition("?")[0]
        assert other.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", master) == 0
        assert other.put("kvs1/foreign", b"not ours") == 0
        with pytest.raises(RemoteError, match="not written by this engine"):
            get(engine, "kvs1/foreign")
        assert get(engine, "kvs1/a") == b"ours"
        other.close()


@pytest.mark.parametrize(
    "url", ["mooncake://", "mooncake://h/x", "mooncake://h?no=1", "mooncake://h:x", "mooncake://u@h"]
)
def test_urls_that_it_does_not_take(url: str) -> None:
    with pytest.raises(ConfigError):
        open_engine(url)


def test_without_its_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvstore.tiers.remote.engines.mooncake", raising=False)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"kvstore-lm\[mooncake\]"):
        open_engine("mooncake://host")
