"""A group that finds no space because gets still read what was evicted waits for them a moment before it drops."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_stores
from small_stores import tokens_of

from kvstore import FlushResult, KVStore
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.tier import DiskTier


@pytest.fixture
def full_store(tmp_path: Path) -> Iterator[KVStore]:
    """A store of six segments, all of them used."""
    with KVStore(
        tmp_path / "store", small_stores.IDENTITY, small_stores.config(disk=6 * small_stores.SEGMENT)
    ) as store:
        for number in range(12):
            small_stores.put(store, tokens_of(number, 40))
            store.flush()
        yield store


def _disk(store: KVStore) -> DiskTier:
    disk = store._residency.disk
    assert disk is not None
    return disk


def _held(store: KVStore) -> list[Entry]:
    """Every record on disk, as a get that is about to read it holds it."""
    records = [entry.record for entry in small_stores.catalog_entries(store)]
    return [entry for entry in _disk(store).locate(records) if entry is not None]


@pytest.mark.threads
def test_nothing_is_dropped_if_the_readers_end_in_time(full_store: KVStore) -> None:
    held = _held(full_store)
    timer = threading.Timer(0.05, _disk(full_store).release, (held,))
    timer.start()
    for number in (20, 21, 22):
        tokens = tokens_of(number, 40)
        put = small_stores.put(full_store, tokens)
        assert full_store.flush() == FlushResult(put.new_blocks, 0)
    timer.join()
    assert small_stores.stored(full_store, tokens) == 40
    small_stores.all_is_well(full_store)


def test_readers_that_stay_cost_a_bounded_wait_and_are_never_overwritten(
    full_store: KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    held = _held(full_store)
    dropped = 0
    for number in range(20, 24):
        small_stores.put(full_store, tokens_of(number, 40))
        dropped += full_store.flush().dropped_blocks
    assert dropped > 0, "six segments that are read cannot take four more groups"
    assert full_store.stats()["counters"]["dropped_no_space"] == dropped
    assert re.search(
        r"dropped_no_space.*\W[56] of [56] segments in use, .* [1-6] wait for gets that read there", caplog.text
    )
    _disk(full_store).release(held)
    assert small_stores.put(full_store, tokens_of(30, 40)).dropped_blocks == 0
    assert full_store.flush().dropped_blocks == 0
    small_stores.all_is_well(full_store)
