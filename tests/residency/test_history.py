"""The history of a store: what a sample has, when one is taken, and that a damaged one costs nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_stores import config, identity, put, stored, tokens_of

from kvstore import KVStore
from kvstore.core.history import MOST_SAMPLES, pack, unpack
from kvstore.metrics import Metric
from kvstore.residency.history import Recorder
from kvstore.tiers.disk.environment import CatalogError
from kvstore.timing import Timing


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_goes_on_over_opens_and_readers_see_it(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config(host=0)) as store:
        assert store.history() == ()
        put(store, tokens_of(1, 20))
        store.flush()
        assert stored(store, tokens_of(1, 20)) == 20
        (first,) = store.history()
        assert first.counts[Metric.GET_HITS] == 1
        assert first.counts[Metric.PUT_NEW_TOKENS] == 20
        assert first.timings[Timing.GET].total == first.timings[Timing.PUT].total == 1
        assert first.sizes["disk_bytes"] == store.stats()["disk"]["bytes"]
        assert first.sizes["disk_budget"] == store.config.disk.bytes
    with KVStore(tmp_path, identity(), config()):
        pass  # nobody asked for anything
    with KVStore(tmp_path, identity(), config()) as store:
        assert stored(store, tokens_of(2, 20)) == 0
    with KVStore(tmp_path, identity(), config(), read_only=True) as reader:
        found = reader.history()
    assert [each.counts[Metric.GET_MISSES] for each in found] == [0, 1]
    assert [each.hit_rate for each in found] == [1.0, 0.0]
    assert found[0].end <= found[1].begin


def test_a_sample_is_taken_when_it_is_due_and_only_if_something_happened(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        clock = Clock()
        recorder = Recorder(store._residency, 60.0, clock, clock)
        disk = store._residency.disk
        assert disk is not None
        put(store, tokens_of(1, 20))
        store.flush()
        recorder.tick()
        assert disk.catalog.history() == b""
        clock.now = 61.0
        recorder.tick()
        assert [(each.begin, each.end) for each in unpack(disk.catalog.history())] == [(0.0, 61.0)]
        version = disk.catalog.environment.version()
        clock.now = 300.0
        recorder.tick()
        assert disk.catalog.environment.version() == version
        assert recorder.last() is None
        stored(store, tokens_of(1, 20))
        clock.now = 200.0  # it was set back
        assert [each.counts[Metric.GET_HITS] for each in recorder.history()] == [0, 1]
        assert recorder.history()[-1].end >= recorder.history()[-1].begin


def test_a_store_takes_samples_by_itself(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        recorder, disk = store._engine.recorder, store._residency.disk
        assert recorder is not None
        assert disk is not None
        put(store, tokens_of(1, 20))
        store.flush()
        assert disk.catalog.history() == b""
        recorder._due = 0.0  # as if a minute had passed
        put(store, tokens_of(2, 20))
        store.flush()  # before each group the queue looks whether something is due
        assert [each.timings[Timing.PUT].total >= 1 for each in unpack(disk.catalog.history())] == [True]


def test_a_catalog_that_fails_is_counted_and_the_sample_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        clock = Clock()
        recorder, disk = Recorder(store._residency, 60.0, clock, clock), store._residency.disk
        assert disk is not None
        put(store, tokens_of(1, 20))
        with monkeypatch.context() as broken:

            def refuse(history: bytes) -> None:
                raise CatalogError("catalog: commit: no space")

            broken.setattr(disk.catalog, "save_history", refuse)
            clock.now = 61.0
            recorder.tick()
            assert store.metrics[Metric.CATALOG_ERRORS] == 1
            recorder.tick()  # not at once
            assert store.metrics[Metric.CATALOG_ERRORS] == 1
        clock.now = 122.0
        recorder.tick()
        assert [each.counts[Metric.PUT_NEW_TOKENS] for each in unpack(disk.catalog.history())] == [20]


@pytest.mark.parametrize("damage", [b"", b"x" * 328, np.full(328, 255, np.uint8).tobytes()])
def test_a_history_that_is_none_is_ignored(tmp_path: Path, damage: bytes) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        put(store, tokens_of(1, 20))
        store.flush()
        disk = store._residency.disk
        assert disk is not None
        disk.save_history(damage)
        assert len(store.history()) == 1
    with KVStore(tmp_path, identity(), config()) as store:
        assert len(store.history()) == 1
        assert stored(store, tokens_of(1, 20)) == 20
        assert store.check().ok


def test_a_flipped_bit_in_it_costs_no_record(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        put(store, tokens_of(1, 20))
    catalog = tmp_path / "catalog" / "data.mdb"
    with KVStore(tmp_path, identity(), config(), read_only=True) as reader:
        row = pack(reader.history())
    data = bytearray(catalog.read_bytes())
    at = data.find(row)
    assert at > 0
    while at > 0:  # in the old pages, too
        data[at + 30] ^= 1
        at = data.find(row)
    catalog.write_bytes(bytes(data))
    with KVStore(tmp_path, identity(), config()) as store:
        assert store.history() == ()
        assert store.metrics[Metric.CATALOG_REBUILT] == 0
        assert stored(store, tokens_of(1, 20)) == 20


def test_it_stays_within_its_bound_in_the_catalog(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        clock = Clock()
        recorder = Recorder(store._residency, 60.0, clock, clock)
        put(store, tokens_of(1, 20))
        for _ in range(2 * MOST_SAMPLES):
            stored(store, tokens_of(1, 4))
            clock.now += 60
            recorder.tick()
        found = store.history()
        assert len(found) <= MOST_SAMPLES
        assert sum(each.counts[Metric.GET_HITS] for each in found[:-1]) == 2 * MOST_SAMPLES
        assert store.stats()["disk"]["used_bytes"] <= store.config.disk.bytes
