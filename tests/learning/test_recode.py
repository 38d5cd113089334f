"""Records that are written anew: what moved or left meanwhile is left alone, and nothing is evicted for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import learncases
import pytest
import small_stores

from kvstore import KVStore, TenantConfig, TierConfig
from kvstore.codecs import codec_by_name
from kvstore.learning.recode import ColdRecoder
from kvstore.read.stored_block import BlockReader
from kvstore.tiers.disk.segment import Extent
from kvstore.tiers.disk.segments import Segments
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.writes import SealedRecord

SEQUENCES = range(4)


def _disk(store: KVStore) -> DiskTier:
    disk = store._residency.disk
    assert disk is not None
    return disk


def _sealed(store: KVStore, record: int) -> SealedRecord:
    learner = store._engine.learner
    assert learner is not None
    reader: BlockReader = learner._reader
    stored = reader.read(record)
    assert stored is not None
    made = stored.block().encode(codec_by_name("zstd"), reader.pool)
    return SealedRecord(made.header, stored.entry.parent, made.buffer)


def test_a_record_is_rewritten_in_place_of_itself(tmp_path: Path) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store, count=len(SEQUENCES))
        disk = _disk(store)
        was = disk.entry(3)
        assert was is not None
        assert disk.rewrite([(was, _sealed(store, 3))]) == {3}
        now = disk.entry(3)
        assert now is not None
        assert (now.codec, now.tag, now.flags) == (16, was.tag, was.flags)
        assert learncases.is_whole(store, SEQUENCES)
        small_stores.all_is_well(store, deep=True)
    with learncases.open_store(tmp_path / "store") as store:
        assert learncases.is_whole(store, SEQUENCES)


def test_what_tenants_take_follows_records_that_are_coded_anew(tmp_path: Path) -> None:
    tenants = {"": TenantConfig(quota_bytes=1 << 30)}
    raw = TierConfig(64 << 20, "raw")
    with learncases.open_store(tmp_path / "store", disk=raw, tenants=tenants) as store:
        learncases.fill(store, count=len(SEQUENCES))
        learner, before = store._engine.learner, store.stats()["namespaces"][""]["bytes"]
        assert learner is not None
        recoder = ColdRecoder(learner._reader, pause=lambda: None)
        assert recoder.run(codec_by_name("entropy"), 1 << 10, lambda done, below: None)
        assert store.stats()["counters"].get("recoded_records", 0) > 0
        assert store.stats()["namespaces"][""]["bytes"] < before
        small_stores.all_is_well(store, deep=True)


def test_a_record_that_moved_or_left_is_left_alone(tmp_path: Path) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store, count=len(SEQUENCES))
        disk = _disk(store)
        was, sealed = disk.entry(3), _sealed(store, 3)
        assert was is not None
        elsewhere = replace(was, extent=Extent(was.extent.segment, was.extent.offset + 4096, was.extent.nbytes))
        assert disk.rewrite([(elsewhere, sealed)]) == set()
        store.delete(learncases.tokens_of(0))
        assert disk.rewrite([(was, sealed)]) == set()
        assert disk.entry(3) is None
        small_stores.all_is_well(store, deep=True)


def test_without_room_nothing_is_evicted_and_nothing_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store, count=len(SEQUENCES))
        disk, counters = _disk(store), store.stats()["counters"]
        was, sealed = disk.entry(3), _sealed(store, 3)
        assert was is not None
        monkeypatch.setattr(Segments, "has_room", lambda self, sizes: False)
        assert disk.rewrite([(was, sealed)]) == set()
        now = disk.entry(3)
        assert now is not None
        assert (now.extent, now.codec) == (was.extent, was.codec)
        assert store.stats()["counters"] == counters
        small_stores.all_is_well(store, deep=True)


def test_a_record_that_would_not_decode_to_the_same_block_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store)
        monkeypatch.setattr(ColdRecoder, "_gives", lambda *_: False)
        assert store.learn().state == "adopted"
        assert set(learncases.codecs_on_disk(store)) == {7}
        assert store.stats()["counters"]["recoding_refused"] == len(learncases.codecs_on_disk(store))
