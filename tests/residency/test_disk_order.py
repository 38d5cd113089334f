"""What a full disk gives up, under each eviction policy."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import family_stores
import numpy as np
import pytest
import seeds
from durable import favour, put, stored
from kvcases import GatedFS, config, identity, kv_of, open_store, quick_directory, tokens
from small_stores import all_is_well, disk_order_agrees, disk_use
from threadruns import run_together

from kvstore import KVStore, TierConfig
from kvstore.config import KIB, StoreConfig
from kvstore.core.guard import RESIDENCY, Guard
from kvstore.errors import ConfigError
from kvstore.eviction import POLICIES, LeafFirstLFU
from kvstore.residency import disk_eviction
from kvstore.residency.disk_order import DiskOrder, Durable

NAMES = sorted(POLICIES)
BUDGET = 8 * 64 * KIB
TIGHT: dict[str, Any] = {"host": TierConfig(0), "disk": TierConfig(BUDGET, "raw")}
PROMPT = tokens(16, seed=1000)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with quick_directory() as path:
        yield path


def counter(store: KVStore, name: str) -> float:
    return store.stats()["counters"].get(name, 0)


# ---- the name --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [0, BUDGET])
def test_an_unknown_policy_is_refused_before_anything_is_made(tmp_path: Path, disk: int) -> None:
    settings = StoreConfig.from_env({"KVSTORE_EVICTION": "fifo"}, base=config(disk=TierConfig(disk, "raw")))
    with pytest.raises(
        ConfigError, match="eviction: expected one of lru, lfu, s3fifo, arc, prior, adaptive, found 'fifo'"
    ):
        KVStore(tmp_path / "store", identity(), settings)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("value", [3, "", None])
def test_a_policy_is_a_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="eviction: expected a policy's name"):
        StoreConfig(eviction=value)


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_tiers_have_the_policy_too(tmp_path: Path, name: str) -> None:
    with open_store(tmp_path, eviction=name) as store:
        policy = store._residency.host._policy
        assert type(getattr(policy, "order", policy)) is POLICIES[name]
        disk_order_agrees(store)
    with open_store(tmp_path, eviction=name, read_only=True) as reader:
        disk_order_agrees(reader)


# ---- a tiny budget ---------------------------------------------------------------------------------------------------


def histories(seed: int) -> Iterator[np.ndarray]:
    """Sequences behind one prompt, some of which continue others."""
    chance = random.Random(seeds.nth(seed))
    made = [PROMPT]
    for number in range(120):
        before = chance.choice(made)
        made.append(
            np.concatenate([before[: chance.randrange(len(before) + 1)], tokens(chance.randrange(1, 40), number)])
        )
        yield made[-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_keeps_its_budget_what_is_pinned_and_every_parent(tmp_path: Path, name: str) -> None:
    pinned = np.concatenate([PROMPT, tokens(20, seed=2000)])
    sequences = list(histories(1))
    with open_store(tmp_path, eviction=name, **TIGHT) as store:
        put(store, pinned, pin=True)
        for number, ids in enumerate(sequences):
            put(store, ids)
            if number % 3 == 0:
                stored(store, sequences[number // 2])
            disk_order_agrees(store)
        assert counter(store, "disk_evicted_records") > 50
        assert counter(store, "fallback_eviction") == 0
        assert store.stats()["disk"]["bytes"] <= BUDGET
        assert disk_use(tmp_path) <= BUDGET
        assert stored(store, pinned) == len(pinned)
        lengths = [store.contains(ids) for ids in sequences]
        assert [stored(store, ids) for ids in sequences] == lengths  # nothing in the index is without its parents
        all_is_well(store, deep=True)
    with open_store(tmp_path, eviction=name, **TIGHT) as store:
        assert counter(store, "unreachable_records") == 0
        assert [stored(store, ids) for ids in sequences] == lengths
        disk_order_agrees(store)
        for ids in histories(2):
            put(store, ids)
        assert stored(store, pinned) == len(pinned)
        disk_order_agrees(store)
        all_is_well(store, deep=True)


@pytest.mark.parametrize(("name", "kept"), [("lfu", 32), ("s3fifo", 32), ("lru", 0)])
def test_what_is_used_often_stays_where_recency_alone_drops_it(tmp_path: Path, name: str, kept: int) -> None:
    favourite = tokens(32, seed=999)
    with open_store(tmp_path, eviction=name, **TIGHT) as store:
        favour(store, favourite)
        for seed in range(60):  # more than the disk holds, each once
            put(store, tokens(32, seed))
        assert counter(store, "disk_evicted_records") > 100
        assert stored(store, favourite) == kept
        all_is_well(store, deep=True)


@pytest.mark.parametrize("name", NAMES)
def test_members_leave_with_their_donors(tmp_path: Path, name: str) -> None:
    chance = random.Random(seeds.nth(3))
    passages = [family_stores.passage(number) for number in range(6)]
    settings = family_stores.config(host=0, disk=8 * 64 * KIB, eviction=name)
    given = []
    for _ in range(2):
        with KVStore(tmp_path / "store", family_stores.IDENTITY, settings) as store:
            for _ in range(40):
                company = family_stores.passage(chance.randrange(100, 140), chance.randrange(1, 60))
                given.append(family_stores.join(company, chance.choice(passages)))
                family_stores.put(store, given[-1])
                family_stores.stored(store, chance.choice(given))
            store.flush()
            assert counter(store, "member_records") > 0
            family_stores.families_hold(store)
            disk_order_agrees(store)
            all_is_well(store, deep=True)
            for ids in given:
                family_stores.stored(store, ids)


# ---- which victim ----------------------------------------------------------------------------------------------------


def test_what_a_queued_block_continues_stays(tmp_path: Path) -> None:
    fs, first = GatedFS(), tokens(16)
    other, longer = tokens(8, seed=1), np.concatenate([first, tokens(8, seed=2)])
    with open_store(tmp_path, fs=fs, eviction="lfu") as store:
        put(store, first)
        put(store, other)
        for _ in range(3):
            stored(store, other)
            stored(store, tokens(8, seed=9))
        fs.shut()
        store.put(longer, kv_of(longer))
        assert store._residency.evict() == [3]  # the policy would rather give up 2, which was used less
        assert store._residency.evict() == []
        assert counter(store, "fallback_eviction") == 0
        fs.gate.set()
        store.flush()
        disk_order_agrees(store)
        assert store._residency.evict() == [4]


def test_a_donor_that_a_queued_block_waits_for_goes_only_by_the_fallback_which_is_counted(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs, eviction="lfu") as store:
        residency = store._residency
        put(store, tokens(8))
        put(store, tokens(8, seed=1))
        fs.shut()
        store.put(tokens(8, seed=2), kv_of(tokens(8, seed=2)))
        with residency._lock:
            residency._families.add(3, [1])
        assert residency.evict() == [2]
        assert counter(store, "fallback_eviction") == 0
        assert residency.evict() == [1]
        assert counter(store, "fallback_eviction") == 1
        with residency._lock:
            residency._families.remove(3)
        fs.gate.set()


def test_a_pinned_record_is_named_once_and_comes_back_when_its_pin_goes() -> None:
    guard, pinned, asked = Guard(RESIDENCY), {1, 2}, list[int]()

    def is_kept(record: int) -> bool:
        asked.append(record)
        return record in pinned

    order = DiskOrder(LeafFirstLFU(), guard, is_kept, may_go=lambda record: True)
    with guard:
        order.load([Durable(1, 0), Durable(2, 1), Durable(3, 0), Durable(4, 0)])
        assert order.victim() == 3
        asked.clear()
        assert order.victim() == 3
        assert asked == [3]
        assert order.held() == {1, 2, 3, 4}
        order.forget(3)
        order.forget(4)
        assert order.victim() == 0
        pinned.clear()
        order.unpinned([1, 2])
        order.touch([1, 2])
        order.touch([9])
        assert [order.victim(), order.held()] == [2, {1, 2}]


def test_a_deleted_pin_frees_what_it_kept(tmp_path: Path) -> None:
    pinned, other = (np.concatenate([PROMPT, tokens(8, seed)]) for seed in (1, 2))
    with open_store(tmp_path, eviction="lfu") as store:
        put(store, pinned, pin=True)
        put(store, other)
        assert [store._residency.evict(), store._residency.evict()] == [[4], []]
        put(store, other)
        assert store.delete(pinned) == 1
        disk_order_agrees(store)
        assert [store._residency.evict() for _ in range(4)] == [[5], [2], [1], []]
        assert counter(store, "fallback_eviction") == 0


# ---- who calls a policy ----------------------------------------------------------------------------------------------


class Alone(LeafFirstLFU):
    """Fails where two threads are in it at once."""

    def __init__(self) -> None:
        super().__init__()
        self._busy = threading.Lock()
        self.failed = False

    def _enter(self) -> None:
        self.failed |= not self._busy.acquire(blocking=False)

    def _exit(self) -> None:
        self._busy.release()

    def add(self, record_id: int, parent: int = 0, nbytes: int = 0, uses: int = 1) -> None:
        self._enter()
        super().add(record_id, parent, nbytes, uses)
        self._exit()

    def touch(self, path: Iterable[int]) -> None:
        self._enter()
        super().touch(path)
        self._exit()

    def discard(self, record_id: int) -> None:
        self._enter()
        super().discard(record_id)
        self._exit()

    def victims(self) -> Iterator[int]:
        self._enter()
        named = list(super().victims())
        self._exit()
        return iter(named)


def test_whoever_owns_a_policy_lets_one_thread_in_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_eviction, "POLICIES", {"alone": Alone})
    settings = {"host": TierConfig(64 * KIB, "raw"), "disk": TierConfig(BUDGET, "raw")}
    sequences = [np.concatenate([PROMPT, tokens(16, seed)]) for seed in range(40)]
    errors: list[BaseException] = []

    def use(store: KVStore, seed: int) -> None:
        try:
            chance = random.Random(seed)
            for _ in range(40):
                ids = chance.choice(sequences)
                store.put(ids, kv_of(ids)) if chance.random() < 0.5 else stored(store, ids)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with open_store(tmp_path, eviction="alone", **settings) as store:
            run_together(*(partial(use, store, seed) for seed in range(4)))
            store.flush()
            residency = store._residency
            owned = [residency.host._policy, residency.device._policy, residency._disk_order._policy]
            assert not errors
            assert not any(policy.failed for policy in owned)
            disk_order_agrees(store)
            assert counter(store, "disk_evicted_records") > 0
    finally:
        sys.setswitchinterval(interval)


def test_an_order_fails_for_a_thread_without_the_lock() -> None:
    order = DiskOrder(LeafFirstLFU(), Guard(RESIDENCY), is_kept=lambda record: False, may_go=lambda record: True)
    for call in (
        order.victim,
        order.held,
        lambda: order.unpinned([1]),
        lambda: order.touch([1]),
        lambda: order.forget(1),
    ):
        with pytest.raises(AssertionError, match="the lock of residency is not held"):
            call()
