"""Finding 11: sessions stay within a budget, are counted, forgotten by last use and time, and listed without tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_stores
from kvcases import GatedFS, kv_of, open_store, tokens
from small_stores import all_is_well, disk_use

from kvstore import KVStore, StoreConfig, TierConfig
from kvstore.config import KIB, MIB
from kvstore.core.session_record import SessionRecord
from kvstore.errors import ConfigError
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.environment import CatalogError

BUDGET = 4 * MIB


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock is ahead."""
    ahead, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    return ahead


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(disk=BUDGET)) as opened:
        yield opened


def note(store: KVStore, name: str, ids: np.ndarray, **how: float | bool) -> None:
    """Notes a session without a cache, as one whose cache was evicted."""
    handle = store.session(name)
    record = SessionRecord(name, handle._namespace, ids, 0.0, time.time(), 0, **how)  # type: ignore[arg-type]
    handle._store.note(handle._key, record)


def names(store: KVStore) -> set[str]:
    return {info.id for info in store.sessions()}


def test_forks_of_a_long_session_take_little(tmp_path: Path) -> None:
    ids = small_stores.tokens_of(1, 20_000)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(disk=BUDGET)) as store:
        note(store, "main", ids)
        for number in range(850):
            store.session("main").fork(f"fork {number}")
        store.flush()
        assert disk_use(tmp_path) <= store.config.disk.bytes
        stats = store.stats()["sessions"]
        assert stats["sessions"] == 851
        assert stats["bytes"] <= stats["budget"] == store.config.disk.bytes // 8
        assert store.session("fork 849").tokens.tolist() == ids.tolist()
        all_is_well(store)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(disk=BUDGET)) as store:
        assert len(names(store)) == 851
        assert store.session("fork 0").tokens.tolist() == ids.tolist()


def test_sessions_that_take_too_much_go_by_last_use(store: KVStore, clock: list[float]) -> None:
    for number in range(400):  # 400 x 2.5 KB, about
        clock[0] += 1
        note(store, f"s{number}", small_stores.tokens_of(number, 500))
        if number % 50 == 0:
            store.session("s0").resume()  # a use
            store.flush()
    store.flush()
    stats = store.stats()["sessions"]
    left = names(store)
    assert stats["bytes"] <= stats["budget"]
    assert stats["bytes"] > stats["budget"] * 3 // 4
    assert 100 < stats["sessions"] == len(left) < 300
    assert left == {"s0", *(f"s{number}" for number in range(401 - len(left), 400))}
    assert store.stats()["counters"]["evicted_sessions"] == 400 - len(left)
    gone = store.session("s1")
    assert not gone.exists
    assert gone.resume() is None
    assert gone.tokens.tolist() == []
    all_is_well(store)


def test_pinned_sessions_go_last(store: KVStore, clock: list[float]) -> None:
    for number in range(300):
        clock[0] += 1
        note(store, f"s{number}", small_stores.tokens_of(number, 500), pinned=number < 10)
    store.flush()
    assert {f"s{number}" for number in range(10)} <= names(store)
    assert "s10" not in names(store)


def test_a_session_ends_with_the_time_to_live_of_its_save(tmp_path: Path, clock: list[float]) -> None:
    ids = small_stores.tokens_of(1, 9)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()) as store:
        store.session("short").save(ids, small_stores.kv_of(ids), ttl=60)
        store.session("long").save(ids, small_stores.kv_of(ids))
        store.session("short").fork("fork")
        store.flush()
        assert names(store) == {"short", "long", "fork"}
        clock[0] += 61
        assert names(store) == {"long"}
        assert not store.session("short").exists
        assert store.session("fork").tokens.tolist() == []
        assert store.stats()["sessions"]["sessions"] == 3
        store._engine.sessions._expire_at = 0.0
        store._engine.sessions.expire()
        assert store.stats()["sessions"]["sessions"] == 1
        assert store.stats()["counters"]["expired_sessions"] == 2
        all_is_well(store)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()) as store:
        assert names(store) == {"long"}


def test_saving_again_without_a_time_to_live_takes_it_away(store: KVStore, clock: list[float]) -> None:
    ids = small_stores.tokens_of(1, 9)
    store.session("chat").save(ids, small_stores.kv_of(ids), ttl=60)
    store.session("chat").save(ids, small_stores.kv_of(ids))
    clock[0] += 61
    assert store.session("chat").exists


def test_a_session_that_alone_is_too_large_is_refused(store: KVStore) -> None:
    ids = small_stores.tokens_of(1, 200_000)
    kv = small_stores.kv_of(ids[:4])
    wide = [tuple(t.expand(-1, 50_000, -1, -1).reshape(t.shape[0], -1, t.shape[2]) for t in pair) for pair in (
        tuple(t.unsqueeze(1) for t in pair) for pair in kv
    )]  # fmt: skip
    with pytest.raises(ConfigError, match=r"session 'huge': 200000 tokens take up to .* raise session_bytes or disk"):
        store.session("huge").save(ids, wide)
    assert not store.session("huge").exists
    assert store.contains(ids) == 0


def test_a_change_that_the_catalog_refuses_is_not_said_to_exist(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the catalog's map is full."""
    note(store, "before", small_stores.tokens_of(1, 5))
    store.flush()

    def refuse(*args: object, **kwargs: object) -> None:
        raise CatalogError("catalog: commit: full")

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "commit", refuse)
        note(store, "new", small_stores.tokens_of(2, 5))
        note(store, "before", small_stores.tokens_of(3, 6))
        store.session("before").fork("fork")
        store.flush()
    assert not store.session("new").exists
    assert not store.session("fork").exists
    assert store.session("before").tokens.tolist() == small_stores.tokens_of(1, 5).tolist()
    assert names(store) == {"before"}
    assert store.stats()["counters"]["dropped_sessions"] == 3


def test_what_is_not_written_yet_is_listed_and_counted(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs) as store:
        fs.shut()
        store.session("chat").save(tokens(9), kv_of(tokens(9)))
        assert store.stats()["sessions"]["sessions"] == 1
        assert store.stats()["sessions"]["bytes"] > 0
        fs.gate.set()


def test_listing_reads_no_tokens(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        note(store, f"s{number}", small_stores.tokens_of(number, 700))
    store.flush()
    monkeypatch.setattr("kvstore.tiers.disk.saved_sessions.SavedSessions._text", None)
    assert [info.tokens for info in store.sessions()] == [700] * 5
    assert store.session("s3").exists


def test_opening_reads_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_stores.config()
    with KVStore(tmp_path, small_stores.IDENTITY, config) as store:
        note(store, "chat", small_stores.tokens_of(1, 700))
    with monkeypatch.context() as patched:
        patched.setattr("kvstore.tiers.disk.saved_sessions.SavedSessions._head", None)
        patched.setattr("kvstore.tiers.disk.saved_sessions.SavedSessions._text", None)
        store = KVStore(tmp_path, small_stores.IDENTITY, config)
    assert store.session("chat").tokens.tolist() == small_stores.tokens_of(1, 700).tolist()
    store.close()


def test_a_reader_counts_them_too(tmp_path: Path) -> None:
    config = small_stores.config()
    with KVStore(tmp_path, small_stores.IDENTITY, config) as store:
        note(store, "chat", small_stores.tokens_of(1, 700))
        store.flush()
        there = store.stats()["sessions"]
    with KVStore(tmp_path, small_stores.IDENTITY, config, read_only=True) as reader:
        assert reader.stats()["sessions"] == there
        all_is_well(reader)


def test_a_store_in_memory_keeps_its_sessions_within_a_budget(tmp_path: Path) -> None:
    config = StoreConfig(host=TierConfig(1 * MIB, "raw"), disk=TierConfig(0), session_bytes=64 * KIB, block_tokens=4)
    with KVStore(tmp_path, small_stores.IDENTITY, config) as store:
        for number in range(200):
            note(store, f"s{number}", small_stores.tokens_of(number, 100))
            store.session("s0").resume()
        store.session("s199").delete()
        store.flush()
        stats = store.stats()["sessions"]
        assert 0 < stats["bytes"] <= stats["budget"] == 64 * KIB
        assert stats["sessions"] == len(names(store))
        assert {"s0", "s198"} <= names(store)
        assert "s1" not in names(store)
        assert store.stats()["counters"]["evicted_sessions"] > 50


@pytest.mark.parametrize(("setting", "bytes_"), [({}, MIB), ({"session_bytes": 5}, 5), ({"session_bytes": 0}, 0)])
def test_the_budget_is_an_eighth_of_the_disk_or_as_set(setting: dict[str, int], bytes_: int) -> None:
    assert StoreConfig(disk=TierConfig(8 * MIB, "raw"), segment_bytes=64 * KIB, **setting).most_session_bytes == bytes_
    assert StoreConfig.from_env({"KVSTORE_SESSION_BYTES": "77"}).most_session_bytes == 77


@pytest.mark.parametrize("wrong", [-1, 1.5, "x", True])
def test_a_budget_that_cannot_be_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="session_bytes"):
        small_stores.config(session_bytes=wrong)
