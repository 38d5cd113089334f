"""Large reads of one get take turns, so that what was read is decoded while the next is read; small ones do not."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faultfs import Fault, FaultFS
from small_stores import IDENTITY, all_is_well, catalog_entries, config, flip, put, stored, tokens_of

from kvstore import KVStore
from kvstore.errors import StoreClosed
from kvstore.read import fetch

TOKENS = tokens_of(1, 40)
WAIT_S = 20.0  # for what comes at once where all is well


class WatchedFS(FaultFS):
    """Notes how many reads are under way, and fails where a sector is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = threading.Lock()
        self.now = self.most = self.reads = 0
        self.bad = -1
        self.meet: threading.Barrier | None = None
        self.third = threading.Event()

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        with self.counting:
            self.now += 1
            self.reads += 1
            self.most = max(self.most, self.now)
            if self.reads == 3:
                self.third.set()
        try:
            if self.meet is not None:
                self.meet.wait(WAIT_S)
            time.sleep(0.002)  # others may come meanwhile
            if offset <= self.bad < offset + sum(len(b) for b in buffers):
                raise OSError(errno.EIO, "bad sector")
            return super().preadv(fd, buffers, offset)
        finally:
            with self.counting:
                self.now -= 1

    def begin(self) -> None:
        self.now = self.most = self.reads = 0
        self.third.clear()


@contextmanager
def opened(folder: Path, fs: FaultFS, threads: int = 4) -> Iterator[KVStore]:
    """A store with ten blocks of 4 KiB on disk."""
    with KVStore(folder, IDENTITY, config(host=0, threads=threads), fs=fs) as store:
        put(store, TOKENS)
        store.flush()
        yield store


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read counts as a large one."""
    monkeypatch.setattr(fetch, "_READ_BYTES", 4096)


@pytest.mark.usefixtures("large")
def test_large_reads_of_a_get_come_two_at_a_time(tmp_path: Path) -> None:
    fs = WatchedFS()
    with opened(tmp_path, fs) as store:
        fs.begin()
        assert stored(store, TOKENS) == 40
        assert fs.reads == 10
        assert fs.most <= 2


@pytest.mark.usefixtures("large")
def test_the_next_large_read_begins_while_others_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, check = WatchedFS(), fetch.check_record

    def checked(*arguments: Any) -> Any:
        assert fs.third.wait(WAIT_S), "no third read began"
        return check(*arguments)

    with opened(tmp_path, fs) as store:
        fs.begin()
        monkeypatch.setattr(fetch, "check_record", checked)
        assert stored(store, TOKENS) == 40


def test_small_reads_do_not_wait_for_each_other(tmp_path: Path) -> None:
    fs = WatchedFS()
    with opened(tmp_path, fs, threads=1) as store:  # two ranges
        fs.begin()
        fs.meet = threading.Barrier(2)
        assert stored(store, TOKENS) == 40
        assert (fs.reads, fs.most) == (2, 2)
        fs.meet = None


@pytest.mark.usefixtures("large")
def test_a_bad_sector_in_a_later_read_costs_what_follows(tmp_path: Path) -> None:
    fs = WatchedFS()
    with opened(tmp_path, fs) as store:
        fs.bad = catalog_entries(store)[1].extent.offset + 100
        assert stored(store, TOKENS) == 4
        assert store.stats()["counters"]["damaged_unreadable"] == 1
        fs.bad = -1
        put(store, TOKENS)
        store.flush()
        assert stored(store, TOKENS) == 40
        all_is_well(store)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("code", ["short", errno.EIO, errno.EMFILE])
def test_a_later_read_that_fails_once_is_made_again(code: int | str, tmp_path: Path) -> None:
    fs = WatchedFS()
    with opened(tmp_path, fs) as store:
        fs.fault = Fault("preadv", 2, code)
        assert stored(store, TOKENS) == 40
        assert fs.fault.hits == 1
        assert store.stats()["counters"]["disk_read_errors"] == 1
        fs.fault = None
        all_is_well(store)


@pytest.mark.usefixtures("large")
def test_damage_in_a_later_read_is_never_returned(tmp_path: Path) -> None:
    fs = WatchedFS()
    with opened(tmp_path, fs) as store:
        extent = catalog_entries(store)[1].extent
        flip(tmp_path / "segments" / f"{extent.segment:08x}.seg", extent.offset + 400, 0xFF)
        assert stored(store, TOKENS) == 4
        assert store.stats()["counters"]["damaged_payload_sum"] == 1


@pytest.mark.usefixtures("large")
def test_a_store_that_is_closed_while_large_reads_wait_ends_them(tmp_path: Path) -> None:
    fs, found, closer = WatchedFS(), [], threading.Thread()

    def get(store: KVStore) -> None:
        try:
            found.append(stored(store, TOKENS))
        except StoreClosed:
            found.append(0)

    with opened(tmp_path, fs) as store:
        fs.begin()
        fs.meet = threading.Barrier(3)  # this thread and the first two reads
        getter = threading.Thread(target=get, args=(store,))
        getter.start()
        meet = fs.meet
        while meet.n_waiting < 2:
            time.sleep(0.001)
        closer = threading.Thread(target=store.close)
        closer.start()
        fs.meet = None  # for the reads that follow
        meet.wait(WAIT_S)
        getter.join(WAIT_S)
        closer.join(WAIT_S)
        assert not getter.is_alive()
        assert not closer.is_alive()
    assert found in ([40], [0])
