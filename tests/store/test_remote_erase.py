"""What is erased in a store is gone from the remote tier, as far as the store may and can."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remotestores as rs
import small_stores as small

from kvstore import KVStore
from kvstore.tiers.remote.engines.faulty import FaultPlan
from kvstore.tiers.remote.opening import open_engine

BLOCK = small.BLOCK
TOKENS = small.tokens_of(1, 6 * BLOCK)
OTHER = np.concatenate([TOKENS[: 2 * BLOCK], small.tokens_of(2, 3 * BLOCK)])
SMALL_DISK = {"host": 0, "disk": 4 * small.SEGMENT}
OPTIONS = pytest.mark.parametrize("options", [{}, {"host": 0}], ids=["with memory", "from disk alone"])


@pytest.fixture(params=["values", "parcels"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"memory:{tmp_path.name}"
    return rs.WithParcels(url) if request.param == "parcels" else url


@pytest.fixture
def remote(url: str) -> Any:
    return rs.settings(url)


def _there(path: Path, remote: Any, tokens: Any, namespace: bytes = b"") -> int:
    """How many tokens a store that has nothing finds in the remote tier."""
    with rs.open_store(path, remote) as store:
        return small.stored(store, tokens, namespace)


def _put(store: KVStore, *sequences: Any, namespace: bytes = b"") -> None:
    for tokens in sequences:
        small.put(store, tokens, namespace)
    assert store.flush(remote=True).remote_due == 0


@OPTIONS
def test_an_erased_sequence_is_gone_there(tmp_path: Path, remote: Any, options: dict[str, int]) -> None:
    with rs.open_store(tmp_path / "a", remote, **options) as store:
        _put(store, TOKENS)
        result = store.delete(TOKENS, erase=True)
        assert (result.removed_blocks, result.remote_blocks, result.remote_left) == (6, 6, 0)
        assert small.stored(store, TOKENS) == 0
        assert rs.counters(store)["remote_erased"] == 6
    assert _there(tmp_path / "b", remote, TOKENS) == 0


@OPTIONS
def test_what_others_begin_with_stays(tmp_path: Path, remote: Any, options: dict[str, int]) -> None:
    with rs.open_store(tmp_path / "a", remote, **options) as store:
        _put(store, TOKENS, OTHER)
        result = store.delete(TOKENS, erase=True)
        assert (result.kept_blocks, result.remote_blocks) == (2, 4)
    assert _there(tmp_path / "b", remote, OTHER) == len(OTHER)
    assert _there(tmp_path / "c", remote, TOKENS) == 2 * BLOCK


@OPTIONS
def test_what_continues_it_goes_too(tmp_path: Path, remote: Any, options: dict[str, int]) -> None:
    with rs.open_store(tmp_path / "a", remote, **options) as store:
        _put(store, TOKENS, OTHER)
        assert store.delete(TOKENS[: 2 * BLOCK], erase=True).remote_blocks == 9
    with rs.open_store(tmp_path / "b", remote) as store:
        engine = store._engine.remote
        assert engine is not None
        found = engine.tier._link.engine()
        assert found is not None
        assert list(found.list("kvs1/", 5.0)) == []


def test_what_is_not_here_any_more_goes_there(tmp_path: Path, remote: Any) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    with rs.open_store(tmp_path / "b", remote) as store:
        result = store.delete(TOKENS, erase=True)
        assert (result.removed_blocks, result.remote_blocks) == (0, 6)
        assert small.stored(store, TOKENS) == 0


@OPTIONS
def test_a_namespace_goes_there(tmp_path: Path, remote: Any, options: dict[str, int]) -> None:
    with rs.open_store(tmp_path / "a", remote, **options) as store:
        _put(store, TOKENS, OTHER, namespace=b"tenant")
        _put(store, TOKENS)
        assert store.delete_namespace(b"tenant", erase=True).remote_blocks == 9
    assert _there(tmp_path / "b", remote, TOKENS, b"tenant") == 0
    assert _there(tmp_path / "c", remote, TOKENS) == len(TOKENS)


def test_a_session_goes_there_without_what_another_begins_with(tmp_path: Path, remote: Any) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        store.session("one").save(TOKENS, small.kv_of(TOKENS))
        store.session("two").save(OTHER, small.kv_of(OTHER))
        assert store.flush(remote=True).remote_due == 0
        assert store.session("one").delete(blocks=True, erase=True).remote_blocks == 4
        assert store.session("two").delete(erase=True).remote_blocks == 0
    assert _there(tmp_path / "b", remote, OTHER) == len(OTHER)


def test_a_delete_leaves_it_there(tmp_path: Path, remote: Any) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        _put(store, TOKENS)
        store.delete(TOKENS)
        store.delete_namespace(b"")
    assert _there(tmp_path / "b", remote, TOKENS) == len(TOKENS)


@pytest.mark.parametrize("kept", [{"erase": False}, {"read_only": True}])
def test_a_store_that_may_not_leaves_it_there(tmp_path: Path, url: str, kept: dict[str, bool]) -> None:
    remote = rs.settings(url)
    rs.filled(tmp_path / "a", remote, TOKENS)
    with rs.open_store(tmp_path / "b", rs.settings(url, **kept)) as store:
        small.put(store, TOKENS)
        result = store.delete(TOKENS, erase=True)
        assert (result.removed_blocks, result.remote_blocks, result.remote_left) == (6, 0, 0)
    assert _there(tmp_path / "c", remote, TOKENS) == len(TOKENS)


def test_a_server_that_is_down_is_told(tmp_path: Path, url: str) -> None:
    faulty = rs.settings(url, settings={"faults": FaultPlan()})
    with rs.open_store(tmp_path / "a", faulty) as store:
        _put(store, TOKENS)
        there = store._engine.remote
        assert there is not None
        engine: Any = there.tier._link.engine()
        engine.plan = FaultPlan(failing=1.0)
        result = store.delete(TOKENS, erase=True)
        assert (result.removed_blocks, result.remote_blocks, result.remote_left) == (6, 0, 6)
        engine.plan = FaultPlan()
        rs.until(lambda: store.delete(TOKENS, erase=True).remote_blocks == 6)
    assert _there(tmp_path / "b", faulty, TOKENS) == 0


def _blocks(url: str) -> set[str]:
    """What lies there, by name."""
    return {name for name in open_engine(url).list("kvs1/", 60) if "/profile/" not in name}


def test_what_the_disk_gave_up_and_waits_for_the_server_goes_too(tmp_path: Path, url: str) -> None:
    faulty = rs.settings(url, upload="eviction", settings={"faults": FaultPlan(failing=1.0)})
    with rs.open_store(tmp_path / "a", faulty, **SMALL_DISK) as store:
        small.put(store, TOKENS)
        other = 100
        while store.contains(TOKENS):
            small.put(store, small.tokens_of(other, 6 * BLOCK))
            store.flush()
            other += 1
        there = store._engine.remote
        assert there is not None
        assert there.stats()["due"] > 0
        store.delete(TOKENS, erase=True)
        engine: Any = there.tier._link.engine()
        engine.plan = FaultPlan()
        rs.until(lambda: there.tier.takes_writes)
        assert store.flush(remote=True).remote_due == 0
    assert _there(tmp_path / "b", rs.settings(url), TOKENS) == 0


def test_what_a_get_brought_is_not_kept_behind_an_erase(tmp_path: Path, remote: Any) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    with rs.open_store(tmp_path / "b", remote) as store:
        there, keeps = store._engine.remote, threading.Event()
        assert there is not None
        assert there.keeper is not None
        there.keeper._worker.start(keeps.wait)  # nothing is kept yet
        rs.got(store, TOKENS)
        erasing = threading.Thread(target=store.delete, args=(TOKENS,), kwargs={"erase": True})
        erasing.start()
        erasing.join(0.3)  # one that does not wait has ended by then
        keeps.set()
        erasing.join()
        store.flush()
        assert (store.contains(TOKENS), len(_blocks(remote.url))) == (0, 0)


def test_a_block_that_only_begins_like_a_kept_one_goes(tmp_path: Path, remote: Any) -> None:
    like = np.concatenate([TOKENS[: BLOCK // 2], small.tokens_of(3, BLOCK)])
    with rs.open_store(tmp_path / "a", remote) as store:
        _put(store, like, TOKENS)
        assert store.delete(TOKENS, erase=True).kept_tokens == BLOCK // 2
    assert _there(tmp_path / "b", remote, TOKENS) == 0
    assert _there(tmp_path / "c", remote, like) == BLOCK
