"""The disk tier alone: groups of sealed records in, the same bytes out, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disktiers import SEGMENT, Harness, payload
from kvcases import identity
from sessioncases import deleted, saved, tokens_in

from kvstore import StoreConfig, TierConfig
from kvstore.config import PAGE_BYTES
from kvstore.core.record import FLAG_PINNED
from kvstore.errors import CorruptStore, IdentityMismatch, StoreNotFound
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk import open as open_module
from kvstore.tiers.disk.budget import BESIDE_BYTES
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.entry import Scan
from kvstore.tiers.disk.environment import CatalogDamaged, Environment
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.lock import WriterLock
from kvstore.tiers.disk.tier import DiskTier

FEW_SEGMENTS = 4


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Harness]]:
    harnesses: list[Harness] = []

    def make(**settings: Any) -> Harness:
        harnesses.append(Harness(tmp_path, **settings))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.tier.close()


Open = Callable[..., Harness]


def test_a_group_is_on_disk_and_comes_back(opened: Open) -> None:
    h = opened()
    assert h.write(1, 2, 3) == {1, 2, 3}
    for number in (1, 2, 3):
        assert h.payload(number)[:3000] == payload(number, 3000)
    assert h.payload(4) is None
    assert (h.tier.holds(2), h.tier.holds(4)) == (True, False)


def test_a_group_is_there_after_reopening(opened: Open) -> None:
    h = opened()
    h.write(1, 2)
    h.tier.close()
    again = opened()
    assert again.payload(2)[:3000] == payload(2, 3000)
    assert again.tier.take_scan().entries["record"].tolist() == [1, 2]


def test_neighbours_are_read_with_one_call(opened: Open) -> None:
    h = opened()
    h.write(1, 2, 3)
    entries = h.tier.locate([1, 2, 3])
    buffers = [h.pool.take(e.extent.nbytes) for e in entries]
    h.tier.read(entries, buffers)
    h.tier.release(entries)
    for number, buffer in zip((1, 2, 3), buffers, strict=True):
        assert payload(number, 3000) in bytes(buffer.view)


def test_a_record_that_is_no_longer_wanted_is_not_committed(opened: Open) -> None:
    h = opened()
    h.dead = {2}
    assert h.write(1, 2, 3) == {1, 3}
    assert h.payload(2) is None
    assert h.tier.stats()["records"] == 2


def test_superseded_records_leave_with_the_same_commit(opened: Open) -> None:
    h = opened()
    h.write(1, 2)
    h.write(3, superseded=[([1], [3])])
    assert [h.tier.holds(n) for n in (1, 2, 3)] == [False, True, True]


def test_superseded_records_stay_where_what_replaces_them_is_not_written(opened: Open) -> None:
    h = opened()
    h.write(1, 2)
    behind = h.draft(3, start=4)
    assert h.tier.write([behind], superseded=[([1], [3, 4])]) == {3}  # 4 is wanted, and does not come
    assert [h.tier.holds(n) for n in (1, 2, 3)] == [True, True, True]
    assert h.write(5, superseded=[([1], [5, 6])]) == {5}  # what begins where 1 does comes
    assert [h.tier.holds(n) for n in (1, 2, 5)] == [False, True, True]
    h.write(6, superseded=[([2], [6])])
    assert [h.tier.holds(n) for n in (2, 6)] == [False, True]


def test_changed_records_keep_their_place(opened: Open) -> None:
    h = opened()
    h.write(1)
    before = h.tier.entry(1)
    h.tier.write([], changed=[(1, 123.5, True)])
    after = h.tier.entry(1)
    assert (after.expiry, after.flags, after.extent) == (123.5, FLAG_PINNED, before.extent)
    h.tier.write([], changed=[(1, None, False)])
    assert (h.tier.entry(1).expiry, h.tier.entry(1).flags) == (123.5, 0)
    assert h.tier.stats()["bytes"] == before.extent.nbytes


def test_a_change_of_a_record_of_the_same_group_is_not_lost(opened: Open) -> None:
    h = opened()
    h.write(1, 2, changed=[(1, 123.5, True)])
    assert (h.tier.entry(1).expiry, h.tier.entry(1).flags) == (123.5, FLAG_PINNED)
    assert (h.tier.entry(2).expiry, h.tier.entry(2).flags) == (0.0, 0)
    assert h.tier.stats()["bytes"] == 2 * PAGE_BYTES


def test_a_record_that_is_changed_twice_in_a_group_has_the_last_change(opened: Open) -> None:
    h = opened()
    h.write(1, 2)
    h.tier.write([], changed=[(1, 5.0, False), (1, 9.0, True)])
    assert (h.tier.entry(1).expiry, h.tier.entry(1).flags) == (9.0, FLAG_PINNED)
    assert (h.tier.stats()["bytes"], h.tier.stats()["records"]) == (2 * PAGE_BYTES, 2)


def test_a_record_that_is_changed_and_superseded_in_one_group_is_gone(opened: Open) -> None:
    h = opened()
    h.write(1, 2)
    h.write(3, superseded=[([1], [3])], changed=[(1, 123.5, True)])
    assert not h.tier.holds(1)
    assert (h.tier.stats()["bytes"], h.tier.stats()["records"]) == (2 * PAGE_BYTES, 2)


def test_a_change_of_a_record_that_is_gone_does_nothing(opened: Open) -> None:
    h = opened()
    assert h.write(1, changed=[(7, 1.0, True)]) == {1}
    assert not h.tier.holds(7)


def test_sessions_ride_in_the_commit_of_their_group(opened: Open) -> None:
    h = opened()
    h.write(1, sessions=[saved("s")])
    assert tokens_in(h.tier.catalog) == {"s": [0, 1, 2]}
    h.write(sessions=[deleted("s")])
    assert tokens_in(h.tier.catalog) == {}


def test_an_empty_group_is_nothing(opened: Open) -> None:
    h = opened()
    version = h.tier.catalog.environment.version()
    assert h.tier.write([]) == set()
    assert h.tier.catalog.environment.version() == version


def test_removing_is_durable_and_says_how_many(opened: Open) -> None:
    h = opened()
    h.write(1, 2)
    assert h.tier.remove([1, 7]) == 1
    h.tier.close()
    again = opened()
    assert [again.tier.holds(n) for n in (1, 2)] == [False, True]


def test_stats_add_up(opened: Open) -> None:
    h = opened()
    h.write(1, 2, nbytes=5000)
    stats = h.tier.stats()
    assert (stats["records"], stats["tokens"], stats["bytes"]) == (2, 8, 4 * PAGE_BYTES)
    assert stats["raw_bytes"] == 8 * identity().layout.bytes_per_token
    assert (stats["segments"], stats["file_bytes"]) == (1, SEGMENT)
    h.tier.remove([1])
    stats = h.tier.stats()
    assert (stats["records"], stats["tokens"], stats["bytes"]) == (1, 4, 2 * PAGE_BYTES)


def test_stats_are_the_same_after_reopening(opened: Open) -> None:
    h = opened()
    h.write(1, 2, 3, nbytes=5000)
    h.tier.remove([2])
    before = h.tier.stats()
    h.tier.close()
    assert opened().tier.stats() == before


# ---- budget ------------------------------------------------------------------------------------------------------


def test_ten_times_the_budget_stays_within_budget_and_one_segment(opened: Open) -> None:
    h = opened(segments=8)
    for number in range(1, 10 * 8 * 15, 6):
        written = h.write(*range(number, number + 6))
        assert written == set(range(number, number + 6))
        stats = h.tier.stats()
        assert stats["file_bytes"] + stats["catalog_bytes"] <= 9 * SEGMENT
    for number in h.order:
        assert h.payload(number)[:3000] == payload(number, 3000)
    assert h.tier.stats()["records"] == len(h.order)
    assert len(h.order) > 8 * 15 // 2  # most of the budget is in use
    assert h.metrics[Metric.DISK_EVICTED_RECORDS] > 0


def test_the_oldest_records_are_evicted(opened: Open) -> None:
    h = opened()
    for number in range(1, 300):
        h.write(number)
    held = [number for number in range(1, 300) if h.tier.holds(number)]
    assert held == list(range(held[0], 300))


def test_pinned_records_survive_any_number_of_others(opened: Open) -> None:
    h = opened()
    h.pinned = set(range(1, 400, 25))
    for number in range(1, 400):
        h.write(number)
    assert all(h.payload(number)[:3000] == payload(number, 3000) for number in h.pinned)
    assert h.metrics[Metric.DISK_MOVED_RECORDS] > 0


def test_a_disk_full_of_pinned_records_drops_and_counts(opened: Open) -> None:
    h = opened(segments=FEW_SEGMENTS)
    h.pinned = set(range(1, 500))
    written = [number for number in range(1, 200) if h.write(number)]
    assert written == list(range(1, len(written) + 1))
    assert len(written) >= 3 * 15 - 15
    assert h.metrics[Metric.DROPPED_NO_SPACE] == 199 - len(written)
    assert all(h.payload(number)[:3000] == payload(number, 3000) for number in written)
    assert h.tier.stats()["file_bytes"] <= (FEW_SEGMENTS + 1) * SEGMENT


def test_records_that_are_being_read_are_not_overwritten(opened: Open) -> None:
    h = opened(segments=FEW_SEGMENTS)
    h.write(1)
    entries = h.tier.locate([1])
    for number in range(2, 300):
        h.write(number)
    assert not h.tier.holds(1)
    buffer = h.pool.take(entries[0].extent.nbytes)
    h.tier.read(entries, [buffer])
    h.tier.release(entries)
    assert payload(1, 3000) in bytes(buffer.view)


def test_space_of_removed_records_is_used_again(opened: Open) -> None:
    h = opened()
    for number in range(1, 2000, 10):
        h.write(*range(number, number + 10))
        h.tier.remove(range(number, number + 10))
    assert h.metrics[Metric.DISK_EVICTED_RECORDS] == 0
    assert h.tier.stats()["segments"] <= 2


# ---- opening -----------------------------------------------------------------------------------------------------


def test_a_new_directory_is_made(tmp_path: Path) -> None:
    h = Harness(tmp_path / "deep" / "down")
    h.tier.close()
    assert (tmp_path / "deep" / "down" / "store.json").exists()


def test_a_reader_of_nothing_is_refused(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(CorruptStore, match=r"store\.json is missing"):
        opened(read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_segments_without_a_superblock_are_refused_and_kept(opened: Open, tmp_path: Path) -> None:
    h = opened()
    h.write(1)
    h.tier.close()
    for name in ("store.json", "store.json.copy"):
        (tmp_path / name).unlink()
    with pytest.raises(CorruptStore, match=r"store\.json is missing"):
        opened()
    assert len(list((tmp_path / "segments").iterdir())) == 1


def test_after_a_refused_opening_the_store_can_be_opened(opened: Open, tmp_path: Path) -> None:
    opened().tier.close()
    config = StoreConfig(disk=TierConfig(8 * SEGMENT + BESIDE_BYTES, "raw"), segment_bytes=SEGMENT, block_tokens=4)
    with pytest.raises(IdentityMismatch):
        DiskTier(
            FileSystem(), str(tmp_path), identity(weights="other"), config, False, Metrics(), BufferPool(0), int, bool
        )
    opened().write(1)


def test_a_lost_segment_loses_its_records_alone(opened: Open, tmp_path: Path) -> None:
    h = opened()
    h.write(*range(1, 16))
    h.write(*range(16, 20))
    h.tier.close()
    (tmp_path / "segments" / "00000001.seg").unlink()
    again = opened()
    assert [n for n in range(1, 20) if again.tier.holds(n)] == list(range(16, 20))
    assert again.metrics[Metric.LOST_ENTRIES] == 15
    assert again.payload(17)[:3000] == payload(17, 3000)


def test_a_damaged_catalog_is_rebuilt_with_every_record(opened: Open, tmp_path: Path) -> None:
    h = opened()
    h.write(*range(1, 20), sessions=[])
    h.tier.close()
    (tmp_path / "catalog" / "data.mdb").write_bytes(b"no lmdb")
    again = opened()
    assert all(again.payload(n)[:3000] == payload(n, 3000) for n in range(1, 20))
    assert (again.metrics[Metric.CATALOG_REBUILT], again.metrics[Metric.CATALOG_REBUILT_RECORDS]) == (1, 19)
    assert not (tmp_path / "catalog" / "data.mdb.damaged").exists()


def test_a_reader_refuses_a_damaged_catalog_and_says_what_to_do(opened: Open, tmp_path: Path) -> None:
    h = opened()
    h.write(1)
    h.tier.close()
    (tmp_path / "catalog" / "data.mdb").write_bytes(b"no lmdb")
    with pytest.raises(CorruptStore, match="open the store for writing to rebuild it"):
        opened(read_only=True)


@pytest.mark.parametrize("made", ["nothing", "an empty file", "some databases"])
def test_a_store_that_is_not_made_yet_is_not_found_by_a_reader(opened: Open, tmp_path: Path, made: str) -> None:
    opened().tier.close()
    file = tmp_path / "catalog" / "data.mdb"
    file.unlink()
    if made == "an empty file":
        file.touch()
    elif made == "some databases":
        Environment(str(file.parent), 1 << 20, False, [b"records", b"places"], (), lambda opened: None).close()
    with pytest.raises(StoreNotFound, match=r"is being made, or was not finished .* open it again when a program has"):
        opened(read_only=True)
    h = opened()
    h.write(1)
    h.tier.close()
    assert opened(read_only=True).payload(1)[:3000] == payload(1, 3000)


def test_a_segment_that_its_writer_removes_while_a_reader_opens_is_no_error(opened: Open, tmp_path: Path) -> None:
    class Vanishing(FileSystem):
        def names(self, path: str) -> list[str]:
            return [*super().names(path), *(["00000063.seg"] if path.endswith("segments") else [])]

    h = opened()
    h.write(1)
    h.tier.close()
    assert opened(read_only=True, fs=Vanishing()).payload(1)[:3000] == payload(1, 3000)


def test_a_reader_waits_for_a_writer_that_makes_the_store(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().tier.close()
    file, aside = tmp_path / "catalog" / "data.mdb", tmp_path / "aside"
    file.rename(aside)
    writer = WriterLock(FileSystem(), str(tmp_path))
    writer.take()
    waits: list[float] = []

    def made_meanwhile(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            aside.rename(file)

    monkeypatch.setattr(open_module.time, "sleep", made_meanwhile)
    assert opened(read_only=True).tier.stats()["records"] == 0
    assert len(waits) == 3
    writer.release()


def test_a_catalog_that_breaks_while_it_is_mended_is_rebuilt(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    h = opened()
    h.write(1, 2, 3)
    h.tier.close()
    scan, broken = Catalog.scan, [True]

    def breaks_once(self: Catalog, after: int = 0) -> Scan:
        if broken and broken.pop():
            raise CatalogDamaged("catalog: read: wrong page")
        return scan(self, after)

    monkeypatch.setattr(Catalog, "scan", breaks_once)
    again = opened()
    assert not broken
    assert again.metrics[Metric.CATALOG_REBUILT] == 1
    assert again.metrics[Metric.CATALOG_REBUILT_RECORDS] == 3
