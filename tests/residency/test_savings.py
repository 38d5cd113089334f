"""Blocks keep their names, and what they save is known, whichever record holds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from durable import favour, put, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcases import open_store, quick_directory, tokens
from length import part
from small_stores import disk_order_agrees

from kvstore import KVStore, TierConfig
from kvstore.config import KIB
from kvstore.core.guard import RESIDENCY, Guard
from kvstore.eviction import POLICIES, LeafFirstLFU, LeafFirstS3FIFO
from kvstore.residency.block_policy import BlockPolicy, new_policy
from kvstore.residency.disk_order import DiskOrder, Durable
from kvstore.residency.savings import Savings

TIGHT: dict[str, Any] = {"host": TierConfig(0), "disk": TierConfig(8 * 64 * KIB, "raw")}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with quick_directory() as path:
        yield path


def order_of(store: KVStore) -> Any:
    return store._residency._disk_order._policy.order


def test_a_block_that_comes_back_to_the_disk_is_known_from_before(tmp_path: Path) -> None:
    """Its record is another one by then. S3-FIFO takes what comes back into the main queue at once."""
    favourite = tokens(8, seed=999)
    with open_store(tmp_path, eviction="s3fifo", **TIGHT) as store:
        put(store, favourite)
        (name,) = order_of(store)._leaves
        for seed in range(200):
            if name in order_of(store)._ghosts:
                break
            put(store, tokens(8, seed))
        assert name in order_of(store)._ghosts
        assert stored(store, favourite) == 0
        put(store, favourite)
        assert order_of(store)._leaves.queue(name) is True
        disk_order_agrees(store)


@pytest.mark.parametrize("policy", ["lfu", "adaptive", "prior"])
def test_how_often_a_block_was_used_is_known_after_the_store_was_opened_anew(tmp_path: Path, policy: str) -> None:
    favourite = tokens(8, seed=999)
    with open_store(tmp_path, eviction=policy, **TIGHT) as store:
        favour(store, favourite)
    with open_store(tmp_path, eviction=policy, **TIGHT) as store:
        order = store._residency._disk_order
        with store._residency._lock:
            assert len(order.held()) == 5  # all of it is told to the policy
            policy_of = getattr(order._policy, "order", order._policy)
            if policy == "lfu":
                assert policy_of._leaves.key(1)[0] > policy_of._leaves.key(2)[0]
            else:
                prior = policy_of if policy == "prior" else policy_of._shadows[0].order
                uses = [known.uses for known in prior._known.values()]
                assert max(uses) >= 5 > min(uses)


def test_where_deep_tokens_take_longer_to_compute_they_save_more() -> None:
    savings = Savings()
    savings.load([1, 2, 3], [10, 11, 12], [0, 6400, 6400], [64, 64, 32])
    assert savings.rate(1, 1000) == savings.rate(2, 1000) > savings.rate(3, 1000)
    savings.ask = lambda: 0.001
    savings.count_use()
    assert savings.rate(2, 1000) > 5 * savings.rate(1, 1000)
    assert savings.rate(4, 1000) == savings.rate(1, 0) == 1.0
    savings.forget(1)
    assert savings.name(1) == 1


def test_the_gate_says_how_computing_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.gate.prefill.ENOUGH_S", 1.0)
    with open_store(tmp_path) as store:
        assert store._residency.savings.ask is not None
        assert store._residency.savings.ask() == 0.0
        for length in (64, 512, 2048, 64, 512, 2048):
            store.gate.observe_prefill(length, 0.03 + 0.001 * length + 5e-7 * length * length / 2)
        assert store._residency.savings.ask() == pytest.approx(5e-4, rel=0.1)


def test_two_records_of_one_block_are_both_held() -> None:
    savings = Savings()
    savings.load([1, 2], [77, 77], [0, 0], [64, 64])
    policy = BlockPolicy(lambda _: LeafFirstLFU(), savings)
    for record in (1, 2, 1):
        policy.add(record)
    assert sorted(policy.victims()) == [1, 2]
    policy.discard(1)
    assert list(policy.victims()) == [2]


def test_what_remembers_nothing_of_what_left_is_asked_about_records() -> None:
    assert type(new_policy(LeafFirstLFU, Savings())) is LeafFirstLFU
    assert type(new_policy(LeafFirstS3FIFO, Savings()).order) is LeafFirstS3FIFO  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["s3fifo", "adaptive"])
@settings(max_examples=part(25), deadline=None)
@given(
    loaded=st.integers(0, 60),
    calls=st.lists(
        st.tuples(st.sampled_from(["touch", "written", "forget", "victim"]), st.integers(1, 80)), max_size=20
    ),
)
def test_what_waits_to_be_told_changes_no_order(name: str, loaded: int, calls: list[tuple[str, int]]) -> None:
    """The reference is told all of it at once."""
    guard = Guard(RESIDENCY)
    orders = [
        DiskOrder(POLICIES[name](), guard, is_kept=lambda record: False, may_go=lambda record: True) for _ in range(2)
    ]
    with guard:
        for order in orders:
            order.load(Durable(record, record // 3, 1, 1 + record % 4) for record in range(1, loaded + 1))
        orders[1]._catch_up(loaded)
        for call, record in calls:
            for order in orders:
                if call == "touch":
                    order.touch([record // 3, record])
                elif call == "written":
                    order.written([record // 3, record], [Durable(record, record // 3)])
                elif call == "forget":
                    order.forget(record)
                elif record < 20:
                    order.victim()
        assert orders[0].victim() == orders[1].victim()
        assert orders[0].held() == orders[1].held()


def test_sessions_that_go_on_outlive_what_came_once_on_disk(tmp_path: Path) -> None:
    prompt = tokens(16, seed=1)
    with open_store(tmp_path, eviction="adaptive", **TIGHT) as store:
        hits = 0
        for turn in range(60):
            hits += stored(store, prompt) == 16
            put(store, np.concatenate([prompt, tokens(8, seed=100 + turn)]))
            for seed in range(2):
                put(store, tokens(24, seed=1000 + 2 * turn + seed))
        assert hits == 59
        disk_order_agrees(store)
