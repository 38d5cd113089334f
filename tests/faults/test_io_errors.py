"""Every file call fails once, and from then on: what is stored stays right, and the store recovers with the disk."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import failing
import pytest
import seeds
import small_stores
from faultfs import CALLS, Fault, FaultFS, PowerCutFS
from length import FULL
from threadruns import HANGS_S

from kvstore import FlushResult, KVStore

pytestmark = pytest.mark.faults

_FULL_DISK = ("open", "pwritev", "allocate", "truncate", "mkdir")
_HALF = ("pwritev", "preadv", "allocate")
_DESCRIPTORS = ("open", "names", "sync_directory")
_CODES = (
    ("EIO", errno.EIO, CALLS),
    ("ENOSPC", errno.ENOSPC, _FULL_DISK),
    ("EINTR", errno.EINTR, CALLS),
    ("EMFILE", errno.EMFILE, _DESCRIPTORS),
    ("short", "short", _HALF),
)
_MOST = 600  # more calls of one kind than a script makes


def _cases() -> Iterator[Any]:
    for script in failing.SCRIPTS:
        for call in CALLS:
            for name, code, kinds in _CODES:
                for sticky in (False, True):
                    if call in kinds and (FULL or _is_quick(script, call, name, sticky)):
                        kind = "sticky" if sticky else "once"
                        yield pytest.param(script, call, code, sticky, id=f"{script}-{call}-{name}-{kind}")


def _is_quick(script: str, call: str, name: str, sticky: bool) -> bool:
    if script != "plain":
        return name == "EIO" and call in ("pwritev", "fdatasync") and not sticky
    return name in ("EIO", "ENOSPC", "short") or (call == "open" and not sticky)


@pytest.mark.parametrize(("script", "call", "code", "sticky"), list(_cases()))
def test_the_nth_call_fails(script: str, call: str, code: int | str, sticky: bool) -> None:
    stride = 1 if FULL else 211  # of the calls after the first few: others with each seed
    for nth in range(1, _MOST):
        if nth > (2 if FULL else 1) and nth % stride != seeds.nth(len(call) + sticky) % stride:
            continue
        fault = Fault(call, nth, code, sticky)
        with small_stores.scratch() as folder:
            try:
                _run(script, folder / "store", FaultFS(fault))
            except BaseException as error:
                raise AssertionError(f"call {nth} of {call}") from error
        if not fault.hits:
            return
    pytest.fail(f"{_MOST} calls of {call} were not enough")


def _run(script: str, path: Path, fs: FaultFS) -> None:
    def heal() -> None:
        fs.fault = None
        fs.forget_failed_syncs()

    failing.SCRIPTS[script](path, fs, heal)
    assert fs.resynced == []


@pytest.mark.parametrize("call", ["pwritev", "preadv", "fdatasync", "allocate", "open", "unlink", "close", "size"])
def test_an_open_store_works_again_after_the_fault_clears(tmp_path: Path, call: str) -> None:
    fs = FaultFS()
    with KVStore(tmp_path, small_stores.IDENTITY, failing.config(), fs=fs) as store:
        small_stores.put(store, small_stores.tokens_of(1, 9), pin=True)
        store.flush()
        for _ in range(3):
            fs.fault = Fault(call, 1, errno.EIO, sticky=True)
            for number in range(10, 40):
                small_stores.put(store, small_stores.tokens_of(number, 40))
                small_stores.stored(store, small_stores.tokens_of(number - 3, 40))
            store.flush()
            fs.fault = None
            failing.works(store)
            small_stores.all_is_well(store)
        assert fs.resynced == []


def test_what_is_not_written_yet_is_not_evicted(tmp_path: Path) -> None:
    disk_goes_on = threading.Event()
    disk_goes_on.set()
    fs = FaultFS(before=lambda call: disk_goes_on.wait(HANGS_S) if call == "pwritev" else None)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(host=0), fs=fs) as store:
        small_stores.put(store, small_stores.tokens_of(1, 40))
        store.flush()
        disk_goes_on.clear()
        small_stores.put(store, small_stores.tokens_of(2, 40))
        evicted = [r for batch in iter(store._residency.evict, []) for r in batch]
        disk_goes_on.set()
        assert len(evicted) == 10
        assert store.flush() == FlushResult(10, 0)
        assert small_stores.stored(store, small_stores.tokens_of(1, 40)) == 0
        assert small_stores.stored(store, small_stores.tokens_of(2, 40)) == 40


def test_a_full_disk_drops_puts_and_says_so_while_gets_go_on(tmp_path: Path) -> None:
    fs = FaultFS()
    kept = small_stores.tokens_of(1, 40)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(host=0), fs=fs) as store:
        small_stores.put(store, kept)
        store.flush()
        fs.fault = Fault("pwritev", 1, errno.ENOSPC, sticky=True)
        small_stores.put(store, small_stores.tokens_of(2, 40))
        assert store.flush().dropped_blocks == 10
        counters = store.stats()["counters"]
        # Half of them were placed, and could not be written; for the rest no segment could be made.
        assert counters["dropped_write_error"] == counters["dropped_no_space"] == 5
        assert counters["disk_write_errors"] == counters["disk_full"] == 1
        assert store.contains(small_stores.tokens_of(2, 40)) == 0
        assert small_stores.stored(store, kept) == 40
        fs.fault = None
        small_stores.put(store, small_stores.tokens_of(2, 40))
        assert store.flush().durable_blocks == 10
        assert small_stores.stored(store, small_stores.tokens_of(2, 40)) == 40


def test_a_segment_whose_sync_failed_is_sealed(tmp_path: Path) -> None:
    fs = FaultFS()
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(host=0), fs=fs) as store:
        small_stores.put(store, small_stores.tokens_of(1, 9))
        store.flush()
        segments = store._residency.disk.segments
        current = segments.current.number
        fs.fault = Fault("fdatasync", 1, errno.EIO)
        small_stores.put(store, small_stores.tokens_of(2, 9))
        assert store.flush().dropped_blocks == 3
        assert segments.by_number[current].sealed
        small_stores.put(store, small_stores.tokens_of(3, 9))
        assert store.flush().durable_blocks == 3
        assert all(entry.extent.segment != current for entry in small_stores.catalog_entries(store)[3:])
        assert small_stores.stored(store, small_stores.tokens_of(1, 9)) == 9
        assert fs.resynced == []


def test_a_damaged_sector_costs_only_the_block_that_lies_in_it(tmp_path: Path) -> None:
    """One unreadable record of a run that is read with one call: its neighbours still come back."""

    class BadSector(FaultFS):
        bad = -1

        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            if offset <= self.bad < offset + sum(len(b) for b in buffers):
                raise OSError(errno.EIO, "bad sector")
            return super().preadv(fd, buffers, offset)

    fs = BadSector()
    tokens = small_stores.tokens_of(1, 40)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(host=0), fs=fs) as store:
        small_stores.put(store, tokens)
        store.flush()
        fs.bad = small_stores.catalog_entries(store)[7].extent.offset + 100
        assert small_stores.stored(store, tokens) == 28
        assert store.stats()["counters"]["disk_read_errors"] >= 1
        fs.bad = -1
        small_stores.put(store, tokens)  # what could not be read is stored again
        store.flush()
        assert small_stores.stored(store, tokens) == 40


@pytest.mark.parametrize("code", [errno.EIO, errno.EINTR, errno.EMFILE, "short"])
def test_what_cannot_be_read_when_its_segment_is_emptied_stays_where_it_is(tmp_path: Path, code: int | str) -> None:
    fs = FaultFS()
    pinned = [small_stores.tokens_of(number, 9) for number in range(1, 5)]
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(host=0, disk=6 << 16), fs=fs) as store:
        for number in range(24):
            small_stores.put(store, small_stores.tokens_of(100 + number, 40))
            if number % 6 == 0:  # in as many segments
                small_stores.put(store, pinned[number // 6], pin=True)
            store.flush()
        for fault in (Fault("preadv", 1, code), Fault("preadv", 2, code), Fault("preadv", 1, code, sticky=True)):
            fs.fault = fault
            for number in range(10, 60):  # several times the budget
                small_stores.put(store, small_stores.tokens_of(number, 40))
                store.flush()
            assert fault.hits, "no segment had to be emptied"
            fs.fault = None
            assert [small_stores.stored(store, tokens) for tokens in pinned] == [9] * 4
            failing.works(store)
            small_stores.all_is_well(store)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(host=0, disk=6 << 16)) as store:
        assert [small_stores.stored(store, tokens) for tokens in pinned] == [9] * 4


def test_a_sector_that_stays_bad_under_a_pinned_block_does_not_stop_the_store(tmp_path: Path) -> None:
    """Other segments are emptied in its place, for ever."""

    class BadSegment(FaultFS):
        bad = ""

        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            if self.bad and os.readlink(f"/proc/self/fd/{fd}").endswith(self.bad):
                raise OSError(errno.EIO, "bad sector")
            return super().preadv(fd, buffers, offset)

    fs, pinned = BadSegment(), small_stores.tokens_of(1, 9)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(host=0, disk=6 << 16), fs=fs) as store:
        small_stores.put(store, pinned, pin=True)
        store.flush()
        fs.bad = f"{small_stores.catalog_entries(store)[0].extent.segment:08x}.seg"
        for number in range(10, 100):
            put = small_stores.put(store, small_stores.tokens_of(number, 40))
            assert store.flush() == FlushResult(put.new_blocks, 0)
        assert store.stats()["counters"]["disk_read_errors"] >= 1
        fs.bad = ""
        assert small_stores.stored(store, pinned) == 9
        small_stores.all_is_well(store)


@pytest.mark.parametrize("seed", range(30 if FULL else 6))
def test_flushed_puts_survive_a_power_cut(seed: int) -> None:
    rng = random.Random(seeds.nth(seed))
    with small_stores.scratch() as folder:
        fs = PowerCutFS(rng, sector=rng.choice((512, 4096)))
        config = small_stores.config(disk=16 * small_stores.SEGMENT if seed % 2 else 256 * small_stores.SEGMENT)
        flushed: list[int] = []
        cut_at = rng.randrange(4, 60)
        copies: list[Path] = []

        def before(call: str) -> None:
            # Inside a call of the writing thread nothing else writes: what is copied is one instant.
            nonlocal cut_at
            if call in ("pwritev", "fdatasync"):
                cut_at -= 1
                if cut_at == 0:
                    fs.cut(str(folder / "store"), str(folder / "copy"))
                    copies.append(folder / "copy")

        fs.before = before
        with KVStore(folder / "store", small_stores.IDENTITY, config, fs=fs) as store:
            for number in range(1, 5):
                small_stores.put(store, small_stores.tokens_of(number, 9), pin=True)
            store.flush()
            number = 10
            while not copies:
                for _ in range(rng.randrange(1, 4)):
                    small_stores.put(store, small_stores.tokens_of(number, rng.choice((3, 9, 40))))
                    number += 1
                before_flush = number
                store.flush()
                if not copies:
                    flushed = list(range(10, before_flush))
            lengths = {n: store.contains(small_stores.tokens_of(n, 40)) for n in range(10, number)}
        with KVStore(copies[0], small_stores.IDENTITY, config) as store:
            for n in flushed if seed % 2 == 0 else []:
                assert small_stores.stored(store, small_stores.tokens_of(n, 40)) == lengths[n], (
                    f"seed {seed}, sequence {n}"
                )
            for n in range(1, number):
                small_stores.stored(store, small_stores.tokens_of(n, 40))
            if flushed:
                assert all(small_stores.stored(store, small_stores.tokens_of(n, 9)) == 9 for n in range(1, 5))
            small_stores.all_is_well(store)
