"""What a get reads from disk is under way before it is wanted; the plain way is the reference."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_stores import IDENTITY, all_is_well, catalog_entries, config, flip, put, stored, tokens_of

from kvstore import KVStore
from kvstore.core.workers import Workers
from kvstore.read import ahead, fetch
from kvstore.tiers.disk import tier
from kvstore.tiers.disk.ahead import SegmentReads
from kvstore.tiers.disk.files import OpenFile, SegmentFiles

TOKENS = tokens_of(1, 40)  # ten blocks, of a page each


class Seen:
    """Notes what is begun and what is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = self.waited = 0
        self.open = self.most = 0
        begin, wait = SegmentReads.begin, SegmentReads.wait

        def begins(reads: SegmentReads, *arguments: Any) -> int:
            self.begun += 1
            self.open += 1
            self.most = max(self.most, self.open)
            return begin(reads, *arguments)

        def waits(reads: SegmentReads, number: int) -> None:
            self.waited += 1
            self.open -= 1
            wait(reads, number)

        monkeypatch.setattr(SegmentReads, "begin", begins)
        monkeypatch.setattr(SegmentReads, "wait", waits)


@contextmanager
def opened(folder: Path, host: int = 0, **settings: Any) -> Iterator[KVStore]:
    with KVStore(folder, IDENTITY, config(host=host, **settings)) as store:
        put(store, TOKENS)
        store.flush()
        if not store.stats()["disk"]["direct_io"]:
            pytest.skip("this file system has no O_DIRECT")
        yield store


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is read by itself."""
    monkeypatch.setattr(fetch, "_READ_BYTES", 4096)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_read_of_a_get_is_begun_and_waited_for(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    with opened(tmp_path, threads=threads) as store:
        for _ in range(3):
            assert stored(store, TOKENS) == 40
            assert store.get(TOKENS).tiers == {"disk": 40}
        assert seen.begun == seen.waited == 60
        assert seen.most > 1
        all_is_well(store)


@pytest.mark.parametrize(("most", "times"), [(1 << 20, 3), (4096, 0)])
def test_what_is_only_copied_is_waited_for_at_once_if_it_is_little(
    most: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, settled = Seen(monkeypatch), []
    settle = SegmentReads.settle
    monkeypatch.setattr(SegmentReads, "settle", lambda reads, n: (settled.append(n), settle(reads, n)))
    monkeypatch.setattr(fetch, "ENOUGH_BYTES", most)
    with opened(tmp_path) as store:
        for _ in range(3):
            assert stored(store, TOKENS) == 40
        assert len(settled) == times
        assert seen.begun == seen.waited == 30


def test_what_is_kept_is_in_memory_when_the_get_returns(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with KVStore(tmp_path, IDENTITY, config(host=1 << 20)) as store:
        for tier in ("disk", "disk", "host"):  # the second read says that it is worth keeping
            hit = store.get(TOKENS)
            assert hit is not None
            assert hit.tiers == {tier: 40}
        all_is_well(store)


def test_no_more_is_under_way_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    monkeypatch.setattr(ahead, "_FIRST_BYTES", 4096)
    monkeypatch.setattr(ahead, "_AHEAD_BYTES", 3 * 4096)
    with opened(tmp_path) as store:
        assert stored(store, TOKENS) == 40
        assert 2 <= seen.most <= 4  # and the range that is wanted


def test_what_is_kept_in_memory_is_what_was_read(tmp_path: Path) -> None:
    with opened(tmp_path, host=1 << 20) as store:
        assert store.prefetch(TOKENS).result() == 40
        assert store.get(TOKENS).tiers == {"host": 40}
        assert stored(store, TOKENS) == 40


def test_without_asynchronous_reads_of_the_system_a_get_reads_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(fs: object, requests: int) -> None:
        raise OSError(errno.EAGAIN, "no contexts left")

    monkeypatch.setattr(tier, "reads_ahead", refused)
    with opened(tmp_path) as store:
        assert stored(store, TOKENS) == 40
        assert store.stats()["counters"]["fallback_reads_in_turn"] == 1
        assert "disk_read_errors" not in store.stats()["counters"]


def test_a_file_that_ends_too_soon_costs_what_follows(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        extent = catalog_entries(store)[3].extent
        os.truncate(tmp_path / "segments" / f"{extent.segment:08x}.seg", extent.offset + 100)
        assert stored(store, TOKENS) == 12
        counters = store.stats()["counters"]
        assert counters["disk_read_errors"] == 7  # each of the reads that failed; then each is made once more
        assert counters["damaged_unreadable"] == 7


def test_damage_is_never_returned(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        extent = catalog_entries(store)[2].extent
        flip(tmp_path / "segments" / f"{extent.segment:08x}.seg", extent.offset + 400, 0xFF)
        assert stored(store, TOKENS) == 8
        assert store.stats()["counters"]["damaged_payload_sum"] == 1


def test_a_segment_that_cannot_be_opened_is_a_failed_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        disk = store._residency.disk
        assert disk is not None
        disk.segments.files.close()
        missing, known = [True], SegmentFiles.get

        def get(files: SegmentFiles, number: int) -> OpenFile:
            if missing:
                missing.pop()
                raise OSError(errno.EMFILE, "too many open files")
            return known(files, number)

        monkeypatch.setattr(SegmentFiles, "get", get)
        assert stored(store, TOKENS) == 40  # the read that could not begin is made when it is wanted
        assert "disk_read_errors" not in store.stats()["counters"]


@pytest.mark.parametrize(("codec", "shared"), [("raw", 0), ("entropy", 1)])
def test_small_blocks_that_are_only_copied_take_no_other_thread(
    codec: str, shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, share = [], Workers.share

    def counted(workers: Workers, *arguments: Any) -> list[Any]:
        calls.append(arguments)
        return share(workers, *arguments)

    with opened(tmp_path, threads=4, codec=codec) as store:
        monkeypatch.setattr(Workers, "share", counted)
        assert stored(store, TOKENS) == 40
        assert len(calls) == shared
        monkeypatch.setattr(fetch, "_BRIEF_COPY_BYTES", 1)
        assert stored(store, TOKENS) == 40
        assert len(calls) == shared + 1


@pytest.mark.parametrize(("codec", "most"), [("raw", 1), ("entropy", 10)])
def test_sources_that_one_thread_reads_are_released_together(
    codec: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, release = [], tier.DiskTier.release

    def counted(disk: tier.DiskTier, entries: Any) -> None:
        calls.append(list(entries))
        release(disk, calls[-1])

    monkeypatch.setattr(tier.DiskTier, "release", counted)
    with opened(tmp_path, threads=4, codec=codec) as store:
        calls.clear()
        assert stored(store, TOKENS) == 40
        assert len(calls) == most
        assert sum(map(len, calls)) == 10
        assert all(entry.hold is None for entries in calls for entry in entries)
        all_is_well(store)


def test_what_an_interrupted_get_read_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        checks, check = iter(range(100)), fetch.check_record

        def interrupted(*arguments: Any) -> Any:
            if next(checks) == 4:
                raise KeyboardInterrupt
            return check(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(fetch, "check_record", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.get(TOKENS)
        disk = store._residency.disk
        assert disk is not None
        assert all(segment.is_left for segment in disk.segments.by_number.values())
        assert stored(store, TOKENS) == 40
        all_is_well(store)
