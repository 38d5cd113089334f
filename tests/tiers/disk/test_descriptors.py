"""Finding 7, "Descriptors": few files are open at a time, and what this process lacks is no damage of the store."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_stores
import trials
from faultfs import Fault, FaultFS
from length import FULL

from kvstore import KVStore
from kvstore.codecs import Profile
from kvstore.config import PAGE_BYTES
from kvstore.errors import DiskError
from kvstore.metrics import Metrics
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.files import SegmentFiles, most_open, segment_path
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.profiles import Profiles

PASSING = {name: getattr(errno, name) for name in ("EMFILE", "EACCES", *(("ENFILE", "EINTR") if FULL else ()))}
COUNT = 40  # sequences that fill some twenty segments
DAMAGE = ("damaged", "rebuilt", "mended", "lost", "quarantined", "unreachable_records", "compacted")


def config(**settings: Any) -> Any:
    return small_stores.config(host=0, **settings)


@pytest.fixture(scope="module")
def filled() -> Iterator[Path]:
    """A store that no test of this file changes."""
    with small_stores.scratch() as folder:
        with KVStore(folder / "store", small_stores.IDENTITY, config()) as store:
            put_all(store)
            assert len(list((folder / "store" / "segments").iterdir())) > 10
        yield folder / "store"


def put_all(store: KVStore) -> None:
    for number in range(1, COUNT):
        assert small_stores.put(store, small_stores.tokens_of(number, 32)).dropped_blocks == 0
    assert store.flush().dropped_blocks == 0


def holds_all(store: KVStore) -> None:
    for number in range(1, COUNT):
        assert small_stores.stored(store, small_stores.tokens_of(number, 32)) == 32
    assert unharmed(store)


def unharmed(store: KVStore) -> bool:
    return not [name for name in store.stats()["counters"] if any(word in name for word in DAMAGE)]


def open_segments() -> int:
    """How many descriptors of this process are those of segments."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").endswith(".seg")
        except OSError:
            continue
    return found


@contextmanager
def spare(count: int) -> Iterator[None]:
    """At most `count` more files can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- few are open ----------------------------------------------------------------------------------------------------


def test_a_store_of_many_segments_keeps_few_open(tmp_path: Path) -> None:
    most = 0

    def look(call: str) -> None:
        nonlocal most
        most = max(most, open_segments())

    with KVStore(tmp_path, small_stores.IDENTITY, config(open_segments=3), fs=FaultFS(before=look)) as store:
        put_all(store)
        holds_all(store)
        assert len(list((tmp_path / "segments").iterdir())) > 10
        assert 0 < open_segments() <= 3
        small_stores.all_is_well(store, deep=True)
    assert most <= 3 + 3  # the cached, and those that the disk thread and readers use
    assert open_segments() == 0


@pytest.mark.parametrize("count", [12, 13, 14, 15])
def test_a_store_is_filled_and_opened_with_fewer_descriptors_than_segments(tmp_path: Path, count: int) -> None:
    def fill_and_open() -> bool:
        # The process has many files open, so that the share of segments is more than what is left.
        assert [os.open(os.devnull, os.O_RDONLY) for _ in range(200)]
        with spare(count):
            with KVStore(tmp_path, small_stores.IDENTITY, config(open_segments=100)) as store:
                put_all(store)
                holds_all(store)
            with KVStore(tmp_path, small_stores.IDENTITY, config(open_segments=100)) as store:
                holds_all(store)
                small_stores.put(store, small_stores.tokens_of(99, 32))
                assert store.flush().dropped_blocks == 0
        return True

    # A process of its own: no thread that another test left opens or closes files meanwhile.
    assert trials.in_child(fill_and_open) == {"result": True}


@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "reader"])
def test_a_restart_with_any_number_of_descriptors_damages_nothing(filled: Path, read_only: bool) -> None:
    opened = []
    for count in range(24):
        with spare(count):
            try:
                store = KVStore(filled, small_stores.IDENTITY, config(), read_only=read_only)
            except DiskError:
                continue
            small_stores.stored(store, small_stores.tokens_of(1, 32))
            assert unharmed(store)
        opened.append(count)
        if len(opened) == 1:
            holds_all(store)  # what could not be read without descriptors is there as soon as there are some
        store.close()
    assert opened
    assert opened == list(range(opened[0], 24))
    with KVStore(filled, small_stores.IDENTITY, config()) as store:
        holds_all(store)
        small_stores.all_is_well(store, deep=True)


def test_the_limit_is_a_share_of_what_the_process_may_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
        assert most_open(100_000) == min(1024, soft) // 4
        assert most_open(7) == 7
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- the files themselves --------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SegmentFiles]:
    for number in range(1, 6):
        Path(segment_path(str(tmp_path), number)).write_bytes(bytes([number]) * PAGE_BYTES)
    made = SegmentFiles(FileSystem(), str(tmp_path), most=2)
    made.direct = False
    yield made
    made.close()


def test_the_least_recently_used_file_is_closed(files: SegmentFiles) -> None:
    one, two = files.get(1).fd, files.get(2).fd
    assert files.get(1).fd == one
    assert files.get(3).fd != one
    assert (len(files), files.get(1).fd) == (2, one)
    assert files.get(3).fd != two or open_segments() == 2


def test_a_file_in_use_is_closed_only_after(files: SegmentFiles) -> None:
    used = files.get(1)
    for number in (2, 3, 4, 5):
        files.get(number)
    files.close()
    assert os.pread(used.fd, 1, 0) == b"\1"
    assert open_segments() == 1
    del used
    assert open_segments() == 0


def test_without_descriptors_those_of_idle_files_are_taken(files: SegmentFiles) -> None:
    files.get(1)
    files.get(2)
    with spare(0):
        assert os.pread(files.get(3).fd, 1, 0) == b"\3"
    assert len(files) == 1


# ---- errors that pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "size", "names", "preadv", "kind"])
@pytest.mark.parametrize("code", PASSING.values(), ids=PASSING)
@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "reader"])
def test_opening_with_a_passing_error_damages_nothing(filled: Path, call: str, code: int, read_only: bool) -> None:
    for nth in range(1, 500, 1 if FULL else 9):
        fault = Fault(call, nth, code)
        try:
            store = KVStore(filled, small_stores.IDENTITY, config(), read_only=read_only, fs=FaultFS(fault))
        except DiskError:
            pass
        else:
            assert unharmed(store)
            store.close()
        if not fault.hits:
            break
    with KVStore(filled, small_stores.IDENTITY, config()) as store:
        holds_all(store)


@pytest.mark.parametrize("call", ["preadv", "open"])
@pytest.mark.parametrize("code", PASSING.values(), ids=PASSING)
def test_a_get_with_a_passing_error_is_a_miss_that_comes_back(filled: Path, call: str, code: int) -> None:
    fs = FaultFS()
    with KVStore(filled, small_stores.IDENTITY, config(open_segments=1), fs=fs) as store:
        fs.fault = Fault(call, 1, code, sticky=True)
        tokens = small_stores.tokens_of(3, 32)
        assert small_stores.stored(store, tokens) == 0
        assert store.stats()["counters"]["short_unreadable"] == 1
        assert store.stats()["counters"]["disk_read_errors"] > 0
        fs.fault = None
        holds_all(store)


@pytest.mark.parametrize("code", PASSING.values(), ids=PASSING)
def test_a_record_that_cannot_be_moved_now_stays_where_it_is(tmp_path: Path, code: int) -> None:
    fs = FaultFS()
    settings = config(disk=6 * small_stores.SEGMENT)
    with KVStore(tmp_path, small_stores.IDENTITY, settings, fs=fs) as store:
        pinned = [small_stores.tokens_of(number, 8) for number in range(1, 30)]
        for number, tokens in enumerate(pinned):
            small_stores.put(store, tokens, pin=number % 3 == 0)
            store.flush()
        fs.fault = Fault("preadv", 1, code, sticky=True)
        for number in range(100, 130):
            small_stores.put(store, small_stores.tokens_of(number, 32))
            store.flush()
        assert fs.fault.hits
        assert unharmed(store)
        fs.fault = None
        assert [small_stores.stored(store, tokens) for tokens in pinned[::3]] == [8] * 10
        small_stores.all_is_well(store, deep=True)


def test_a_catalog_that_cannot_be_asked_now_loses_no_record(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVStore(filled, small_stores.IDENTITY, config()) as store:
        catalog = store._residency.disk.catalog  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            patch.setattr(catalog, "get", _refuse)
            assert small_stores.stored(store, small_stores.tokens_of(3, 32)) == 0
        holds_all(store)


def _refuse(records: Any) -> Any:
    raise CatalogError("catalog: read: too many readers")


def test_a_profile_that_cannot_be_read_now_is_read_later(tmp_path: Path) -> None:
    profile = Profile.new(small_stores.IDENTITY, {})
    fs, metrics = FaultFS(), Metrics()
    Profiles(fs, str(tmp_path), small_stores.IDENTITY, metrics, profile).keep()
    profiles = Profiles(fs, str(tmp_path), small_stores.IDENTITY, metrics, None)
    fs.fault = Fault("open", 1, errno.EMFILE, sticky=True)
    assert profiles._newest() is None
    assert profiles._load(profile.id) is None
    fs.fault = None
    assert profiles._load(profile.id) is not None
    assert profiles._newest() is not None
    assert metrics.snapshot() == {}
