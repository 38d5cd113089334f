"""Lifetimes and pins, in memory and across restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from durable import put, stored
from kvcases import GatedFS, kv_of, open_store, quick_directory, tokens
from threadruns import HANGS_S

from kvstore import KVStore, TierConfig
from kvstore.config import KIB

RECORD = 4096
SMALL_DISK = {"host": TierConfig(0), "disk": TierConfig(8 * 64 * KIB, "raw")}
MEMORY_ONLY = {"host": TierConfig(8 * RECORD, "raw"), "disk": TierConfig(0)}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with quick_directory() as path:
        yield path


def crowd(store: KVStore) -> None:
    """Puts more than there is room for."""
    for seed in range(1, 100):
        put(store, tokens(20, seed))


def put_and_wait(store: KVStore, clock: list[float], *puts: tuple[np.ndarray, float | None]) -> None:
    """Puts sequences with their lifetimes, and lets 500 seconds pass."""
    for ids, ttl in puts:
        put(store, ids, ttl=ttl)
    clock[0] = 500


# ---- time to live ------------------------------------------------------------------------------------------------


def test_before_its_time_a_sequence_is_there_and_after_it_not(tmp_path: Path, clock: list[float]) -> None:
    with open_store(tmp_path) as store:
        put(store, tokens(20), ttl=100)
        assert stored(store, tokens(20)) == 20
        clock[0] = 200
        assert stored(store, tokens(20)) == 0


def test_without_a_ttl_a_sequence_has_no_end(tmp_path: Path, clock: list[float]) -> None:
    with open_store(tmp_path) as store:
        put(store, tokens(20))
        clock[0] = 1e9
        put(store, tokens(3, seed=1))
        assert stored(store, tokens(20)) == 20


@pytest.mark.parametrize("settings", [{}, {"disk": TierConfig(0)}], ids=["disk", "memory"])
def test_the_next_put_removes_what_is_past_its_time(tmp_path: Path, clock: list[float], settings: dict) -> None:
    with open_store(tmp_path, **settings) as store:
        put(store, tokens(20), ttl=100)
        clock[0] = 200
        put(store, tokens(3, seed=1))
        stats = store.stats()
        assert stats["index"]["records"] == stats["host"]["records"] == 1
        assert stats.get("disk", {"records": 1})["records"] == 1
        assert stats["counters"]["expired_records"] == 3
        assert store.contains(tokens(20)) == 0


def test_expired_tokens_can_be_put_again(tmp_path: Path, clock: list[float]) -> None:
    with open_store(tmp_path) as store:
        put(store, tokens(20), ttl=100)
        clock[0] = 200
        assert put(store, tokens(20)).new_blocks == 3
        clock[0] = 400
        assert stored(store, tokens(20)) == 20


def test_a_ttl_goes_on_through_a_restart(tmp_path: Path, clock: list[float]) -> None:
    with open_store(tmp_path) as store:
        put(store, tokens(20), ttl=100)
        put(store, tokens(9, seed=1), ttl=1000)
    with open_store(tmp_path) as store:
        assert stored(store, tokens(20)) == 20
    clock[0] = 200
    with open_store(tmp_path) as store:
        assert stored(store, tokens(20)) == 0
        assert stored(store, tokens(9, seed=1)) == 9


def test_a_longer_ttl_prolongs_and_a_shorter_one_does_not_shorten(tmp_path: Path, clock: list[float]) -> None:
    with open_store(tmp_path) as store:
        put_and_wait(store, clock, (tokens(20), 100), (tokens(20), 1000), (tokens(20), 10))
        assert stored(store, tokens(20)) == 20
    with open_store(tmp_path) as store:
        assert stored(store, tokens(20)) == 20
        clock[0] = 2000
        assert stored(store, tokens(20)) == 0


def test_a_put_without_ttl_keeps_for_ever(tmp_path: Path, clock: list[float]) -> None:
    with open_store(tmp_path) as store:
        put(store, tokens(20), ttl=100)
        put(store, tokens(20))
    clock[0] = 1e6
    with open_store(tmp_path) as store:
        assert stored(store, tokens(20)) == 20


def test_changes_in_the_same_group_as_the_put_are_durable(tmp_path: Path, clock: list[float]) -> None:
    """Two puts of a sequence that are still queued when the second comes."""
    fs = GatedFS()
    with open_store(tmp_path, fs=fs) as store:
        fs.shut()
        store.put(tokens(3, seed=9), kv_of(tokens(3, seed=9)))
        assert fs.waiting.wait(HANGS_S)  # from here on everything waits and forms a group
        store.put(tokens(3, seed=8), kv_of(tokens(3, seed=8)))
        store.put(tokens(20), kv_of(tokens(20)), ttl=100)
        store.put(tokens(20), kv_of(tokens(20)), ttl=1000)
        fs.gate.set()
    clock[0] = 500
    with open_store(tmp_path) as store:
        assert stored(store, tokens(20)) == 20


def test_a_beginning_lives_as_long_as_what_continues_it(tmp_path: Path, clock: list[float]) -> None:
    ids = tokens(32)
    with open_store(tmp_path) as store:
        put_and_wait(store, clock, (ids[:16], 100), (ids, 1000))
        put(store, tokens(3, seed=1))
        assert stored(store, ids) == 32
    with open_store(tmp_path) as store:
        assert stored(store, ids) == 32


def test_an_end_that_expires_leaves_the_beginning(tmp_path: Path, clock: list[float]) -> None:
    ids = tokens(32)
    with open_store(tmp_path) as store:
        put_and_wait(store, clock, (ids[:16], None), (ids, 100))
        assert stored(store, ids) == 16
        put(store, tokens(3, seed=1))
        assert store.contains(ids) == 16


def test_a_tail_that_grew_takes_the_lifetime_of_its_growth(tmp_path: Path, clock: list[float]) -> None:
    ids = tokens(20)
    with open_store(tmp_path) as store:
        put_and_wait(store, clock, (ids[:12], 100), (ids, 1000))
        assert stored(store, ids) == 20
        put(store, tokens(3, seed=1))
        assert stored(store, ids) == 20


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), True, "1"])
def test_a_ttl_that_is_no_positive_number_of_seconds_is_refused(tmp_path: Path, ttl: Any) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(ValueError, match="ttl: expected 0 < seconds"):
            store.put(tokens(3), kv_of(tokens(3)), ttl=ttl)
        assert store.contains(tokens(3)) == 0


# ---- pins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SMALL_DISK, MEMORY_ONLY], ids=["disk", "memory"])
def test_a_pinned_sequence_outlives_everything_else(tmp_path: Path, settings: dict) -> None:
    with open_store(tmp_path, **settings) as store:
        put(store, tokens(20), pin=True)
        crowd(store)
        assert stored(store, tokens(20)) == 20
        assert stored(store, tokens(20, seed=1)) == 0


@pytest.mark.parametrize("settings", [SMALL_DISK, MEMORY_ONLY], ids=["disk", "memory"])
def test_a_pin_can_be_given_to_what_is_stored(tmp_path: Path, settings: dict) -> None:
    with open_store(tmp_path, **settings) as store:
        put(store, tokens(20))
        assert put(store, tokens(20), pin=True).new_blocks == 0
        crowd(store)
        assert stored(store, tokens(20)) == 20


@pytest.mark.parametrize("settings", [SMALL_DISK, MEMORY_ONLY], ids=["disk", "memory"])
def test_in_one_large_group_a_pinned_sequence_stays(tmp_path: Path, settings: dict) -> None:
    with open_store(tmp_path, **settings) as store:
        for seed in range(50):
            store.put(tokens(20, seed), kv_of(tokens(20, seed)), pin=seed == 7)
        store.flush()
        assert stored(store, tokens(20, seed=7)) == 20


@pytest.mark.parametrize("later", [False, True])
def test_a_pin_survives_a_restart(tmp_path: Path, later: bool) -> None:
    with open_store(tmp_path, **SMALL_DISK) as store:
        put(store, tokens(20), pin=not later)
        if later:
            put(store, tokens(20), pin=True)
    with open_store(tmp_path, **SMALL_DISK) as store:
        crowd(store)
        assert stored(store, tokens(20)) == 20


def test_a_pin_given_in_the_same_group_as_the_put_survives_a_restart(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs, **SMALL_DISK) as store:
        fs.shut()
        store.put(tokens(3, seed=999), kv_of(tokens(3, seed=999)))
        assert fs.waiting.wait(HANGS_S)
        store.put(tokens(3, seed=998), kv_of(tokens(3, seed=998)))
        store.put(tokens(20), kv_of(tokens(20)))
        store.put(tokens(20), kv_of(tokens(20)), pin=True)
        fs.gate.set()
    with open_store(tmp_path, **SMALL_DISK) as store:
        crowd(store)
        assert stored(store, tokens(20)) == 20


def test_pins_are_not_above_the_budget(tmp_path: Path) -> None:
    with open_store(tmp_path, **MEMORY_ONLY) as store:
        for seed in range(10):
            put(store, tokens(20, seed), pin=True)
        assert store.stats()["host"]["bytes"] <= 8 * RECORD
        assert stored(store, tokens(20)) == 20
        assert store.stats()["counters"]["refused_pins"] > 0


def test_a_pinned_sequence_that_expires_goes(tmp_path: Path, clock: list[float]) -> None:
    with open_store(tmp_path) as store:
        put(store, tokens(20), ttl=100, pin=True)
        clock[0] = 200
        assert stored(store, tokens(20)) == 0


def test_a_pinned_sequence_can_be_deleted(tmp_path: Path) -> None:
    with open_store(tmp_path, **MEMORY_ONLY) as store:
        put(store, tokens(20), pin=True)
        assert store.delete(tokens(20)) == 3
        for seed in range(1, 20):
            put(store, tokens(20, seed))
        assert stored(store, tokens(20)) == 0
        assert stored(store, tokens(20, seed=19)) == 20


def test_a_pinned_beginning_stays_when_its_end_goes(tmp_path: Path) -> None:
    ids = tokens(32)
    with open_store(tmp_path, **SMALL_DISK) as store:
        put(store, ids[:16], pin=True)
        put(store, ids)
        crowd(store)
        assert stored(store, ids) == 16


def test_a_pinned_tail_stays_when_the_sequence_grows(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path, **SMALL_DISK) as store:
        put(store, ids[:12], pin=True)
        put(store, ids)
        crowd(store)
        assert stored(store, ids[:12]) == 12
    with open_store(tmp_path, **SMALL_DISK) as store:
        assert stored(store, ids[:12]) == 12
