"""Families on a disk that is full or fails, and of stores whose disk tier is not exact or needs a profile."""

from __future__ import annotations

import errno
import shutil
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import donorcases
import family_stores
import numpy as np
import predictcases
import pytest
import seeds
import small_stores
from awaiting import calls_of
from family_stores import BLOCK, IDENTITY, LAYOUT, behind, config, counter, join, members, passage, stored
from faultfs import Fault, FaultFS
from length import FULL
from threadruns import HANGS_S

from kvstore import KVStore
from kvstore.codecs import Profile
from kvstore.metrics import Metric, Metrics

TEXT = passage(1)
MEMBER = behind(10, TEXT)
ROUNDS = 400 if FULL else 60


# ---- a small budget ----------------------------------------------------------------------------------------------


def texts(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Passages out of a few, in any company."""
    parts = [passage(int(rng.integers(100, 140)), int(rng.integers(1, 60)))]
    for number in rng.integers(1, 6, int(rng.integers(1, 3))):
        text = passage(int(number))
        first = int(rng.integers(0, BLOCK))
        parts.append(text[first : first + int(rng.integers(BLOCK, len(text)))])
    return join(*parts)


@pytest.mark.parametrize("host", [0, 1 << 16])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_got_from_a_full_disk_is_exact_and_no_member_outlives_its_donor(
    path: Path, seed: int, host: int
) -> None:
    rng = np.random.default_rng(seeds.nth(seed))
    budget = 8 * small_stores.SEGMENT
    given: list[Any] = []
    for _ in range(2):
        with KVStore(path, IDENTITY, config(host=host, disk=budget)) as store:
            for _ in range(ROUNDS // 2):
                tokens = texts(rng)
                given.append(tokens)
                family_stores.put(store, tokens)
                if rng.random() < 0.5:
                    store.flush()
                for other in rng.integers(0, len(given), 2):
                    stored(store, given[other])
                if rng.random() < 0.1:
                    store.delete(given[int(rng.integers(len(given)))])
            store.flush()
            for tokens in given:
                stored(store, tokens)
            assert counter(store, "disk_evicted_records") > 0
            assert counter(store, "member_records") > 10
            assert counter(store, "quarantined_records") == 0
            family_stores.families_hold(store)
            small_stores.all_is_well(store)
            assert small_stores.disk_use(path) <= store.config.disk.bytes
    with KVStore(path, IDENTITY, config(disk=budget)) as store:
        assert sum(stored(store, tokens) > 0 for tokens in given) > 0
        family_stores.families_hold(store)


def test_a_donor_that_is_evicted_takes_its_members(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT)
        family_stores.put(store, MEMBER)
        store.flush()
        assert members(store) == 4
        residency, disk = store._residency, store._residency.disk
        assert disk is not None
        victims: list[int] = []
        while batch := residency.evict():
            victims += batch
            disk.remove(batch)
            family_stores.families_hold(store)
        assert sorted(victims) == list(range(1, 10))
        # Donors were used no earlier than their members: those went first, by themselves.
        assert counter(store, "dropped_members") == 0
        assert small_stores.catalog_entries(store) == []


def test_members_go_with_a_donor_that_was_used_before_them(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT[:BLOCK])
        family_stores.put(store, behind(10, TEXT[:BLOCK]))
        store.flush()
        assert members(store) == 1
        residency = store._residency
        residency.index.match(*residency.index.path(3), touch=True)  # the member alone: its donor not
        assert residency.evict() == [3, 1]
        assert counter(store, "dropped_members") == 1
        assert members(store) == 0
        assert stored(store, behind(10, TEXT[:BLOCK])) == BLOCK
        assert stored(store, TEXT) == 0


def test_a_queued_member_of_a_donor_that_is_evicted_is_dropped_and_said_to_be(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT)
        store.flush()
        disk = store._residency.disk
        assert disk is not None
        # As when another group is being written, and needs room: by another thread, so without the order of locks.
        with ExitStack() as unlocked, calls_of(store._residency._families, "add", 4) as planned:
            disk._write_lock.acquire()
            unlocked.callback(disk._write_lock.release)
            put = family_stores.put(store, MEMBER)
            assert planned.wait(HANGS_S)
            evicted = [record for batch in iter(store._residency.evict, []) for record in batch]
            assert sorted(evicted) == [1, 2, 3, 4]
            disk.remove(evicted)
        flushed = store.flush()
        assert flushed.durable_blocks + flushed.dropped_blocks == put.new_blocks
        assert flushed.dropped_blocks == counter(store, "dropped_members")
        assert stored(store, MEMBER) >= BLOCK
        family_stores.families_hold(store)
        family_stores.put(store, MEMBER)
        assert store.flush().dropped_blocks == 0
        assert stored(store, MEMBER) == len(MEMBER)


# ---- a failing disk ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("host", [0, 1 << 20])
def test_a_donor_whose_write_fails_takes_its_members_with_it(path: Path, call: str, code: int, host: int) -> None:
    started = threading.Event()
    goes_on = threading.Event()

    def before(name: str) -> None:
        if name == call and fs.fault is not None:
            started.set()
            assert goes_on.wait(HANGS_S)

    fs = FaultFS(before=before)
    roomy = config(host=host, segment_bytes=4 * small_stores.SEGMENT)  # no new segment is begun meanwhile
    with KVStore(path, IDENTITY, roomy, fs=fs) as store:
        family_stores.put(store, passage(50))
        store.flush()
        fs.fault = Fault(call, 1, code)
        donors = family_stores.put(store, TEXT)
        assert started.wait(HANGS_S)  # the first group is being written while the second is coded against it
        # Coded, not only planned: a block whose donor goes before that stands alone, and is written.
        with calls_of(Metrics, "add", 4, lambda _, metric, *__: metric == Metric.MEMBER_RECORDS) as coded:
            new = family_stores.put(store, MEMBER)
            assert coded.wait(HANGS_S)
        goes_on.set()
        flushed = store.flush()
        assert fs.fault.hits == 1
        assert flushed.dropped_blocks == donors.new_blocks + 4
        assert flushed.durable_blocks == new.new_blocks - 4
        assert counter(store, "dropped_members") == 4
        for tokens in (TEXT, MEMBER):
            assert stored(store, tokens) in ((len(tokens),) if host else (0, BLOCK))
        for tokens in (TEXT, MEMBER):
            family_stores.put(store, tokens)
        assert store.flush().dropped_blocks == 0
        store._residency.host.clear()
        for tokens in (TEXT, MEMBER, passage(50)):
            assert stored(store, tokens) == len(tokens)
        small_stores.all_is_well(store)
    with KVStore(path, IDENTITY, roomy) as store:
        for tokens in (TEXT, MEMBER):
            assert stored(store, tokens) == len(tokens)
        assert counter(store, "lost_members") == 0
        family_stores.families_hold(store)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_delete_on_a_failing_disk_gives_nothing_wrong(path: Path, call: str) -> None:
    fs = FaultFS()
    with KVStore(path, IDENTITY, config(), fs=fs) as store:
        family_stores.put(store, TEXT)
        family_stores.put(store, MEMBER)
        store.flush()
        assert members(store) == 4
        fs.fault = Fault(call, 1, errno.EIO, sticky=True)
        store.delete(TEXT)
        assert fs.fault.hits
        fs.fault = None
        assert stored(store, TEXT) == 0
        assert stored(store, MEMBER) <= len(MEMBER)
        family_stores.put(store, MEMBER)
        store.flush()
        assert stored(store, MEMBER) == len(MEMBER)
        family_stores.families_hold(store)
        small_stores.all_is_well(store)
    with KVStore(path, IDENTITY, config()) as store:
        assert stored(store, MEMBER) == len(MEMBER)


def test_a_donor_that_cannot_be_read_makes_members_misses(path: Path) -> None:
    fs = FaultFS()
    with KVStore(path, IDENTITY, config(), fs=fs) as store:
        family_stores.put(store, TEXT)
        family_stores.put(store, MEMBER)
        store.flush()
        store._engine.assembler.reader.clear()
        fs.fault = Fault("preadv", 3, errno.EIO, sticky=True)  # first the run of records, then donors
        found = stored(store, MEMBER)
        assert fs.fault.hits
        assert found < len(MEMBER)
        assert counter(store, "disk_read_errors") >= 1
        fs.fault = None
        for tokens in (TEXT, MEMBER):
            stored(store, tokens)
            family_stores.put(store, tokens)
            store.flush()
            assert stored(store, tokens) == len(tokens)
        family_stores.families_hold(store)


# ---- lossy stores, profiles --------------------------------------------------------------------------------------


def test_a_lossy_store_codes_against_what_is_on_disk_alone(path: Path) -> None:
    identity = replace(IDENTITY, codec_family="lossy")
    with KVStore(path, identity, config(host=1 << 20)) as store:
        family_stores.put(store, join(TEXT, passage(30, 5), TEXT))  # its own beginning is not on disk yet
        store.flush()
        assert members(store) == 0
        family_stores.put(store, MEMBER)
        store.flush()
        assert members(store) >= 3
        store._residency.host.clear()
        store._engine.assembler.reader.clear()
        assert stored(store, MEMBER) == len(MEMBER)
        store.delete(join(TEXT, passage(30, 5), TEXT))
        store._residency.host.clear()
        assert stored(store, MEMBER) == len(MEMBER)
        family_stores.families_hold(store)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Random arrays: coded with them blocks are larger, and no less exact."""
    shapes = [(x.heads, x.key_dim, x.value_dim) for x in LAYOUT.layers]
    sections = {"lossless": predictcases.arrays_of(shapes, True, 1)[1], "donor": donorcases.arrays_of(shapes, True, 1)}
    return Profile.new(IDENTITY, sections)


def test_members_need_the_profile_they_were_coded_with(path: Path, profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile")
    settings = {"codec": "predictive", "profile": tmp_path / "profile"}
    with KVStore(path, IDENTITY, config(**settings)) as store:
        family_stores.put(store, TEXT)
        family_stores.put(store, MEMBER)
        store.flush()
        found = members(store)
        assert found >= 3
        store._engine.assembler.reader.clear()
        assert stored(store, MEMBER) == len(MEMBER)
    (tmp_path / "profile").unlink()
    with KVStore(path, IDENTITY, config()) as store:  # with the store's own copy
        assert members(store) == found
        assert stored(store, MEMBER) == len(MEMBER)
    shutil.move(path / "profiles", tmp_path / "profiles")
    with KVStore(path, IDENTITY, config()) as store:
        assert stored(store, MEMBER) <= BLOCK
        assert counter(store, "unknown_profile") > 0
        assert counter(store, "quarantined_records") == 0
        assert members(store) == found
        family_stores.put(store, passage(60))
        store.flush()
        assert stored(store, passage(60)) == len(passage(60))
    shutil.move(tmp_path / "profiles", path / "profiles")
    with KVStore(path, IDENTITY, config()) as store:
        assert stored(store, MEMBER) == len(MEMBER)
        assert store.delete(TEXT)
        assert counter(store, "recoded_members") == found
        assert stored(store, MEMBER) == len(MEMBER)


@pytest.mark.parametrize("pin", [False, True])
def test_what_is_put_again_without_its_profile_takes_the_place_of_donors(
    path: Path, profile: Profile, tmp_path: Path, pin: bool
) -> None:
    profile.save(tmp_path / "profile")
    with KVStore(path, IDENTITY, config(codec="predictive", profile=tmp_path / "profile")) as store:
        for tokens in (TEXT, MEMBER):
            family_stores.put(store, tokens)
            store.flush()
        assert members(store) >= 3
    shutil.rmtree(path / "profiles")
    with KVStore(path, IDENTITY, config()) as store:
        for tokens in (MEMBER, TEXT):
            assert stored(store, tokens) <= BLOCK
        family_stores.put(store, TEXT, pin=pin)
        store.flush()
        assert stored(store, TEXT) == len(TEXT)
        assert counter(store, "replaced_unreadable") > 0
        assert counter(store, "dropped_members") >= 3
        assert store.check(deep=True).problems == ()
        family_stores.put(store, MEMBER, pin=pin)
        store.flush()
        assert stored(store, MEMBER) == len(MEMBER)
    with KVStore(path, IDENTITY, config()) as store:
        assert [stored(store, tokens) for tokens in (TEXT, MEMBER)] == [len(TEXT), len(MEMBER)]
        report = store.check(deep=True)
        assert (report.problems, report.unreadable_records, report.pinned) == ((), 0, 2 * pin)
