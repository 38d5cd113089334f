"""The lives of values in the remote tier: whoever has a block that lives longer writes it again, and nobody is given
what is past its time."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import remotestores as rs
import small_stores as small
from kvcases import open_store, tokens
from placecases import LAYOUTS, got, put
from typer.testing import CliRunner

from kvstore import KVStore, RemoteConfig
from kvstore.cli import app
from kvstore.core.places import Place
from kvstore.errors import RemoteFull
from kvstore.tiers.remote.engines.memory import MemoryEngine
from kvstore.tiers.remote.opening import open_engine
from kvstore.write.portable import PortableRecords

TOKENS = small.tokens_of(1, 10 * small.BLOCK)
HOUR = 3600.0


class Clock:
    """The time of day, some seconds ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._real = time.time

    def __call__(self) -> float:
        return self._real() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "time", found)
    return found


@pytest.fixture(params=["alone", "parcels", "sealed parcels"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteConfig:
    url, key = f"memory:{tmp_path.name}", b"k" * 32 if request.param.startswith("sealed") else None
    return rs.settings(url if request.param == "alone" else rs.WithParcels(url), key=key)


def turn(store: KVStore, count: int = len(TOKENS), ttl: float | None = HOUR) -> None:
    small.put(store, TOKENS[:count], ttl=ttl)
    assert store.flush(remote=True).remote_due == 0


def elsewhere(path: Path, remote: RemoteConfig) -> int:
    """How many tokens a machine gets that has nothing itself."""
    with rs.open_store(path, remote) as store:
        return small.stored(store, TOKENS)


def test_what_is_put_again_lives_on_there(tmp_path: Path, remote: RemoteConfig, clock: Clock) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        for number, count in enumerate((17, 24, 33, 40)):  # each turn later than half of the life of the one before
            turn(store, count)
            clock.ahead += 0.8 * HOUR
            assert elsewhere(tmp_path / f"b{number}", remote) == count // small.BLOCK * small.BLOCK
        assert rs.counters(store)["remote_replaced"] > 0
        small.all_is_well(store)
    clock.ahead += HOUR
    assert elsewhere(tmp_path / "late", remote) == 0  # a life that ends is a promise


def test_a_life_that_hardly_grew_is_not_written_again(tmp_path: Path, remote: RemoteConfig, clock: Clock) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        turn(store)
        written = rs.counters(store)["remote_written_records"]
        clock.ahead += 0.2 * HOUR
        turn(store)
        assert rs.counters(store)["remote_written_records"] == written
        turn(store, ttl=None)  # for ever
        assert rs.counters(store)["remote_written_records"] == 2 * written
        clock.ahead += 100 * HOUR
        turn(store, ttl=None)
        assert rs.counters(store)["remote_written_records"] == 2 * written
    assert elsewhere(tmp_path / "b", remote) == len(TOKENS)


def test_after_a_restart_the_life_there_is_read(tmp_path: Path, remote: RemoteConfig, clock: Clock) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        turn(store)
    clock.ahead += 0.8 * HOUR
    with rs.open_store(tmp_path / "a", remote) as store:
        turn(store)
        assert rs.counters(store)["remote_replaced"] == len(TOKENS) // small.BLOCK
    clock.ahead += 0.8 * HOUR
    assert elsewhere(tmp_path / "b", remote) == len(TOKENS)


def test_a_longer_life_of_another_store_stays(tmp_path: Path, remote: RemoteConfig, clock: Clock) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        turn(store, ttl=None)
    with rs.open_store(tmp_path / "b", remote) as store:
        turn(store)
        clock.ahead += 0.9 * HOUR
        turn(store)
        assert "remote_replaced" not in rs.counters(store)
    clock.ahead += 100 * HOUR
    assert elsewhere(tmp_path / "c", remote) == len(TOKENS)


def test_whoever_finds_it_past_its_time_puts_it_anew(tmp_path: Path, remote: RemoteConfig, clock: Clock) -> None:
    """A prefix that lives on there, and behind it a turn that does not."""
    with rs.open_store(tmp_path / "a", remote) as store:
        turn(store, 24, ttl=None)
        turn(store)
    clock.ahead += 2 * HOUR
    with rs.open_store(tmp_path / "b", remote) as store:
        assert small.stored(store, TOKENS) == 24
        counts = rs.counters(store)
        assert (counts["remote_expired"] > 0, counts.get("remote_damaged", 0)) == (True, 0)
        hit = store.get(TOKENS)
        assert hit is not None
        turn(store)
    assert elsewhere(tmp_path / "c", remote) == len(TOKENS)


def test_a_get_says_that_it_is_past_its_time_there(tmp_path: Path, remote: RemoteConfig, clock: Clock) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        turn(store)
    clock.ahead += 2 * HOUR
    with rs.open_store(tmp_path / "b", remote) as store:
        assert store.get(TOKENS) is None
        assert rs.counters(store)["short_remote"] == 1


def test_what_the_disk_gives_up_takes_the_place_of_what_is_past_its_time(
    tmp_path: Path, remote: RemoteConfig, clock: Clock
) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        turn(store)
    clock.ahead += 2 * HOUR
    leaving = replace(remote, upload="eviction")
    with rs.open_store(tmp_path / "b", leaving, host=0, disk=3 * small.SEGMENT) as store:
        assert store.get(TOKENS) is None
        small.put(store, TOKENS)
        number = 2
        while store.contains(TOKENS) and number < 1000:
            small.put(store, small.tokens_of(number, 60))
            store.flush()
            number += 1
        assert store.flush(remote=True).remote_due == 0
        assert rs.counters(store)["remote_replaced"] > 0
    assert elsewhere(tmp_path / "c", remote) > 0


@pytest.mark.parametrize("kind", LAYOUTS)
def test_places_live_on_there_too(tmp_path: Path, clock: Clock, kind: str) -> None:
    layout, remote, ids = LAYOUTS[kind], rs.settings(f"memory:{tmp_path.name}"), tokens(100, seed=3)
    with open_store(tmp_path / "a", layout, remote=remote) as store:
        for _ in range(3):
            put(store, ids, layout, ttl=HOUR)
            assert store.flush(remote=True).remote_due == 0
            clock.ahead += 0.8 * HOUR
        assert rs.counters(store)["remote_replaced"] > 0
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        assert got(store, ids, layout) == len(ids)


def test_a_place_whose_records_the_server_lost_is_written_anew(tmp_path: Path) -> None:
    layout, remote, ids = LAYOUTS["hybrid"], rs.settings(f"memory:{tmp_path.name}"), tokens(100, seed=3)
    with open_store(tmp_path / "a", layout, remote=remote) as store:
        put(store, ids, layout)
        assert store.flush(remote=True).remote_due == 0
    engine = open_engine(remote.url)
    assert isinstance(engine, MemoryEngine)
    names = [name for name in engine.list("kvs1/", 60.0) if name.endswith(".place")]
    buffer = bytearray(1 << 16)
    for name in names:  # it names a record with other states than there are
        size = engine.get_into(name, memoryview(buffer), 60.0)
        assert size is not None
        place = Place.unpack(bytes(buffer[:size]))
        other = replace(place, cuts=(*place.cuts[:-1], place.cuts[-1] + 1))
        engine.delete([name], 60.0)
        engine.put(name, [other.pack()], 60.0)
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        assert got(store, ids, layout) == 0
        put(store, ids, layout)
        assert store.flush(remote=True).remote_due == 0
        assert rs.counters(store)["remote_replaced"] == 1
    with open_store(tmp_path / "c", layout, remote=remote) as store:
        assert got(store, ids, layout) == len(ids)


def test_a_life_that_another_store_made_longer_stays(tmp_path: Path, remote: RemoteConfig, clock: Clock) -> None:
    with rs.open_store(tmp_path / "a", remote) as one, rs.open_store(tmp_path / "b", remote) as other:
        turn(one)
        turn(other)
        clock.ahead += 0.5 * HOUR
        turn(other, ttl=None)
        clock.ahead += 0.3 * HOUR
        turn(one)  # what it remembers of the lives there is not so any more
        assert "remote_replaced" not in rs.counters(one)
    clock.ahead += 100 * HOUR
    assert elsewhere(tmp_path / "c", remote) == len(TOKENS)


def test_stores_that_share_a_session_write_it_no_more_often(
    tmp_path: Path, remote: RemoteConfig, clock: Clock
) -> None:
    with rs.open_store(tmp_path / "a", remote) as one, rs.open_store(tmp_path / "b", remote) as other:
        for _ in range(20):
            turn(one)
            turn(other)
            clock.ahead += 0.1 * HOUR
        written = sum(rs.counters(store).get("remote_written_records", 0) for store in (one, other))
    assert written <= 2 * 2.5 * len(TOKENS) / small.BLOCK


def test_what_else_is_in_a_parcel_stays(tmp_path: Path, clock: Clock) -> None:
    """A store that has the beginning of another's sequence puts that for longer."""
    remote = rs.settings(rs.WithParcels(f"memory:{tmp_path.name}"))
    with rs.open_store(tmp_path / "a", remote) as store:
        turn(store)
    with rs.open_store(tmp_path / "b", remote) as store:
        turn(store, 2 * small.BLOCK, ttl=3 * HOUR)
        assert rs.counters(store)["remote_replaced"] == 2
    assert elsewhere(tmp_path / "c", remote) == len(TOKENS)
    clock.ahead += 2 * HOUR
    assert elsewhere(tmp_path / "d", remote) == 2 * small.BLOCK


def test_what_cannot_be_written_leaves_what_is_there(
    tmp_path: Path, remote: RemoteConfig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        turn(store)
        with monkeypatch.context() as broken:
            broken.setattr(PortableRecords, "__call__", lambda *_: None)
            turn(store, ttl=None)
        with monkeypatch.context() as broken:
            broken.setattr(MemoryEngine, "put", _refuse)
            turn(store, ttl=None)
        assert "remote_replaced" not in rs.counters(store)
        assert elsewhere(tmp_path / "b", remote) == len(TOKENS)
        turn(store, ttl=None)
        clock.ahead += 2 * HOUR
        assert elsewhere(tmp_path / "c", remote) == len(TOKENS)


def _refuse(*_: object) -> None:
    raise RemoteFull("no room")


def test_a_long_sequence_past_its_time_is_put_anew_as_a_whole(
    tmp_path: Path, remote: RemoteConfig, clock: Clock
) -> None:
    tokens = small.tokens_of(3, 50 * small.BLOCK)
    with rs.open_store(tmp_path / "a", remote) as store:
        small.put(store, tokens, ttl=HOUR)
        assert store.flush(remote=True).remote_due == 0
    clock.ahead += 2 * HOUR
    with rs.open_store(tmp_path / "b", remote) as store:
        assert store.get(tokens) is None  # it read some of them
        small.put(store, tokens)
        assert store.flush(remote=True).remote_due == 0
        assert rs.counters(store)["remote_replaced"] == 50
    with rs.open_store(tmp_path / "c", remote) as store:
        assert small.stored(store, tokens) == len(tokens)


def test_a_put_while_its_sequence_is_written_counts(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, begun, go_on = rs.settings(f"memory:{tmp_path.name}"), threading.Event(), threading.Event()
    really = MemoryEngine.put

    def slow(engine: MemoryEngine, *arguments: Any) -> bool:
        done = really(engine, *arguments)
        begun.set()
        assert go_on.wait(60)
        return done

    with rs.open_store(tmp_path / "a", remote) as store:
        with monkeypatch.context() as held:
            held.setattr(MemoryEngine, "put", slow)
            small.put(store, TOKENS, ttl=HOUR)
            assert begun.wait(60)
            small.put(store, TOKENS)
            go_on.set()
            assert store.flush(remote=True).remote_due == 0
    clock.ahead += 2 * HOUR
    assert elsewhere(tmp_path / "b", remote) == len(TOKENS)


def test_verify_counts_what_is_past_its_time_and_gc_removes_it(tmp_path: Path, clock: Clock) -> None:
    url = f"folder://{tmp_path / 'shared'}"
    with rs.open_store(tmp_path / "a", rs.settings(url)) as store:
        turn(store, 8, ttl=None)
        turn(store)
    clock.ahead += 2 * HOUR
    runner = CliRunner()
    done = runner.invoke(app, ["remote", "verify", url, "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["problems"], found["expired"]) == (0, [], 8)
    assert runner.invoke(app, ["remote", "gc", url, "--yes"]).exit_code == 0
    assert json.loads(runner.invoke(app, ["remote", "verify", url, "--json"]).stdout)["values"] == 2
