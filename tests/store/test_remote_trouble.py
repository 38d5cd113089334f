"""Servers that are down, die, hang, lie or are full: no call of the store fails, waits or answers wrongly for it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remotestores as rs
import small_stores as small

import kvstore.open_remote
import kvstore.write.upload
from kvstore import KVStore
from kvstore.core.explanation import Reason
from kvstore.tiers.remote.engines.faulty import FaultPlan, FaultyEngine
from kvstore.tiers.remote.engines.memory import MemoryEngine
from kvstore.tiers.remote.opening import open_engine

TOKENS = small.tokens_of(1, 6 * small.BLOCK)
SHORT_S = 0.05


def _engine(store: KVStore) -> Any:
    remote = store._engine.remote
    assert remote is not None
    return remote.tier._link.engine()


def _faulty(name: str, plan: FaultPlan | None = None, **remote: Any) -> Any:
    return rs.settings(f"memory:{name}", settings={"faults": plan or FaultPlan()}, **remote)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_a_store_works_with_a_server_that_is_down(tmp_path: Path, closed_port: int) -> None:
    remote = rs.settings(f"valkey://127.0.0.1:{closed_port}", deadline_s=SHORT_S, flush_timeout_s=SHORT_S)
    with rs.open_store(tmp_path / "a", remote) as store:
        for number in range(1, 4):
            small.put(store, small.tokens_of(number, 9))
            assert store.get(small.tokens_of(number + 10, 9)) is None
        assert store.flush(remote=True).remote_due > 0
        assert [small.stored(store, small.tokens_of(number, 9)) for number in range(1, 4)] == [9, 9, 9]
        store.check()
        counts = rs.counters(store)
    # Which it is depends on who meets it first, the gets or the thread that writes.
    assert sum(counts.get(f"remote_{what}", 0) for what in ("skipped", "read_errors", "breaks")) > 0


def test_a_server_that_dies_and_comes_back_is_asked_again(tmp_path: Path) -> None:
    rs.filled(tmp_path / "a", _faulty(tmp_path.name), TOKENS)
    with rs.open_store(tmp_path / "b", _faulty(tmp_path.name)) as store:
        _engine(store).plan = FaultPlan(failing=1.0)
        for _ in range(4):
            assert store.get(TOKENS) is None
        assert rs.counters(store)["remote_breaks"] >= 1
        _engine(store).plan = FaultPlan()
        rs.until(lambda: not store.stats()["remote"]["read_open"])
        assert rs.got(store, TOKENS).tiers == {"remote": len(TOKENS)}
        assert rs.counters(store)["remote_mends"] >= 1


def test_a_server_that_dies_while_writes_are_due_gets_them_later(tmp_path: Path) -> None:
    with rs.open_store(tmp_path / "a", _faulty(tmp_path.name, flush_timeout_s=60.0)) as store:
        _engine(store).plan = FaultPlan(failing=1.0)
        small.put(store, TOKENS)
        store.flush()
        rs.until(lambda: rs.counters(store).get("remote_read_errors", 0) >= 1)
        _engine(store).plan = FaultPlan()
        rs.until(lambda: store.flush(remote=True).remote_due == 0)
        assert rs.counters(store)["remote_written_records"] == 6
    with rs.open_store(tmp_path / "b", _faulty(tmp_path.name)) as store:
        assert small.stored(store, TOKENS) == len(TOKENS)


class _Stuck(MemoryEngine):
    """Its calls do not return before they are let go, whatever time they were given."""

    go = threading.Event()

    def get_into(self, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        self.go.wait()
        return super().get_into(key, buffer, timeout_s)


def test_no_get_waits_for_an_engine_that_never_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rs.filled(tmp_path / "a", rs.settings(f"memory:{tmp_path.name}"), TOKENS)
    monkeypatch.setattr(kvstore.open_remote, "open_engine", lambda url: _Stuck(tmp_path.name))
    with rs.open_store(tmp_path / "b", rs.settings("memory:x", deadline_s=SHORT_S)) as store:
        small.put(store, TOKENS[: small.BLOCK])
        hit = rs.got(store, TOKENS)  # would hang here
        assert (hit.tokens, hit.reason) == (small.BLOCK, Reason.REMOTE_LATE)
        assert rs.counters(store)["remote_late"] == 5
        _Stuck.go.set()


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    plan = FaultPlan(failing=1.0)
    with rs.open_store(tmp_path / "a", _faulty(tmp_path.name, plan, queue_bytes=1, close_timeout_s=0.0)) as store:
        for number in range(1, 6):
            small.put(store, small.tokens_of(number, 8))
            store.flush()
        counts = rs.counters(store)
        assert counts["dropped_remote_queue"] >= 6
        assert store.stats()["remote"]["due"] <= 2


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_no_get_is_wrong(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rare = {"failing": 0.03, "full": 0.03, "missing": 0.05, "ghosts": 0.05, "hanging": 0.01}
    bad = FaultPlan(seed, truncated=0.1, flipped=0.1, swapped=0.2, **rare)
    remote = _faulty(tmp_path.name, bad, deadline_s=0.2, write_timeout_s=0.2, flush_timeout_s=2.0, belief_s=0.5)
    stems = [small.tokens_of(number, 5 * small.BLOCK) for number in range(1, 5)]
    with rs.open_store(tmp_path / "a", remote) as one, rs.open_store(tmp_path / "b", remote) as other:
        for _ in range(40):
            stem = stems[rng.integers(len(stems))]
            tokens = np.concatenate([stem[: rng.integers(1, len(stem) + 1)], rng.integers(0, 3, 6).astype(np.uint32)])
            store = (one, other)[rng.integers(2)]
            if rng.random() < 0.4:
                small.put(store, tokens)
                store.flush(remote=True)
            else:
                small.stored(store, tokens)  # fails where one bit is wrong
            if rng.random() < 0.1:
                store.delete(tokens)
        for store in (one, other):
            store.flush()
            assert store.check(deep=True).problems == ()
        assert sum(rs.counters(store).get("remote_read_records", 0) for store in (one, other)) > 0
        assert isinstance(_engine(one), FaultyEngine)


def _lose_all(remote: Any) -> None:
    """As a server does that is restarted."""
    engine = open_engine(remote.url, **remote.settings)
    names = list(engine.list("kvs1/", 60.0))
    assert engine.delete(names, 60.0) == len(names) > 0


@pytest.mark.parametrize("kind", [str, rs.WithParcels])
@pytest.mark.parametrize("upload", ["put", "second use"])
def test_what_the_server_lost_is_written_when_it_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upload: Any, kind: Any
) -> None:
    remote = rs.settings(kind(f"memory:{tmp_path.name}"), upload=upload, belief_s=0.0)
    for path, sent_s in ((tmp_path / "a", 0.0), (tmp_path / "b", 900.0)):
        monkeypatch.setattr(kvstore.write.upload, "_SENT_S", sent_s)
        with rs.open_store(path, remote) as store:
            for _ in range(2):
                small.put(store, TOKENS)
                assert store.flush(remote=True).remote_due == 0
            _lose_all(remote)
            if not sent_s:  # it looks again
                small.put(store, TOKENS)
                assert store.flush(remote=True).remote_due == 0
        if sent_s:  # it looks when it is opened anew
            with rs.open_store(path, remote) as store:
                small.put(store, TOKENS)
                assert store.flush(remote=True).remote_due == 0
        with rs.open_store(tmp_path / f"{path.name}-reader", remote) as store:
            assert small.stored(store, TOKENS) == len(TOKENS)
        _lose_all(remote)


def test_a_store_that_had_no_server_gives_it_what_is_put_again(tmp_path: Path) -> None:
    remote = rs.settings(f"memory:{tmp_path.name}")
    with KVStore(tmp_path / "a", small.IDENTITY, small.config()) as store:
        small.put(store, TOKENS)
    with rs.open_store(tmp_path / "a", remote) as store:
        assert small.put(store, TOKENS).new_tokens == 0
        assert store.flush(remote=True).remote_due == 0
    with rs.open_store(tmp_path / "b", remote) as store:
        assert small.stored(store, TOKENS) == len(TOKENS)
