"""A disk that takes nothing for a while: what is durable is found meanwhile, and what was deleted does not return."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faultfs import Fault, FaultFS
from small_stores import BLOCK, SEGMENT, all_is_well, config, identity, put, stored, tokens_of

from kvstore import DiskError, KVStore
from kvstore.core.waiting import Bell
from kvstore.tiers.disk import space
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.tier import DiskTier

SEQUENCES = [tokens_of(number, 21) for number in range(1, 5)]


@contextlib.contextmanager
def no_writes() -> Iterator[None]:
    """Every write to a file of this process fails, also those of LMDB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def filled(folder: Path) -> KVStore:
    store = KVStore(folder, identity(), config(host=0))
    for tokens in SEQUENCES:
        put(store, tokens, b"n" if tokens is SEQUENCES[3] else b"")
    store.flush()
    return store


def delete_again(store: KVStore) -> None:
    assert store.delete(SEQUENCES[0]) == 0  # the first call made sure that nobody finds it


def wait_for_it(store: KVStore) -> None:
    Bell().wait_for(lambda: not store._engine.residency.disk._orphans, 30)


LATER: dict[str, Callable[[KVStore], object]] = {
    "delete": delete_again,
    "put": lambda store: (put(store, tokens_of(9, 9)), store.flush()),
    "flush": lambda store: store.flush(),
    "erase": lambda store: store.delete(SEQUENCES[0], erase=True),
    "nothing": lambda store: None,
    "some time": wait_for_it,
}


@pytest.mark.parametrize("later", LATER)
def test_what_was_deleted_while_the_disk_took_nothing_does_not_return(
    later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_ORPHANS_S", 0.0)
    with filled(tmp_path) as store:
        with no_writes():
            for delete in (lambda: store.delete(SEQUENCES[0]), lambda: store.delete_namespace("n")):
                with pytest.raises(CatalogError):
                    delete()
        assert stored(store, SEQUENCES[0]) == 0
        LATER[later](store)
    with KVStore(tmp_path, identity(), config(host=0)) as store:
        assert [stored(store, tokens) for tokens in SEQUENCES[:3]] == [0, 21, 21]
        assert stored(store, SEQUENCES[3], b"n") == 0
        all_is_well(store, deep=True)


def test_an_erase_says_what_is_still_there_and_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "_ORPHANS_S", 0.0)
    needle = SEQUENCES[0].tobytes()
    with filled(tmp_path) as store:
        before, limit = DiskTier.begin_erase, contextlib.ExitStack()

        def begin(disk: DiskTier) -> None:  # the disk is full from here on
            before(disk)
            limit.enter_context(no_writes())

        monkeypatch.setattr(DiskTier, "begin_erase", begin)
        with limit, pytest.raises(DiskError, match="still in the catalog"):
            store.delete(SEQUENCES[0], erase=True)
        assert stored(store, SEQUENCES[0]) == 0
        Bell().wait_for(lambda: store.stats()["counters"].get("erases_resumed", 0), 30)
        assert not any(needle in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        assert [stored(store, tokens) for tokens in SEQUENCES[1:3]] == [21, 21]


class FullFS(FaultFS):
    """No room for another segment, nor for anything else."""

    def free(self, path: str) -> int:
        return 0


def test_puts_that_find_no_room_on_a_full_disk_cost_nothing_that_is_stored(tmp_path: Path) -> None:
    filled(tmp_path).close()
    fs = FullFS()
    with KVStore(tmp_path, identity(), config(host=0), fs=fs) as store:
        fs.fault = Fault("allocate", 1, errno.ENOSPC, sticky=True)
        many = SEGMENT // 256 * BLOCK  # more than one segment holds
        for number in range(10, 14):
            put(store, tokens_of(number, many))
        assert store.flush().dropped_blocks > 0
        counters = store.stats()["counters"]
        assert "disk_evicted_records" not in counters
        assert counters["dropped_no_space"] > 0
        assert all(stored(store, tokens) == 21 for tokens in SEQUENCES[:3])


def test_what_is_lost_at_the_close_is_told_with_its_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fs = FullFS(Fault("allocate", 1, errno.ENOSPC, sticky=True))
    with KVStore(tmp_path, identity(), config(host=0), fs=fs) as store:
        put(store, tokens_of(1, 9))
    assert "closed; 3 blocks could not be written and are lost; counted since it was opened: " in caplog.text
    assert "dropped_no_space 3" in caplog.text


def test_no_more_than_once_is_evicted_for_a_catalog_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(host=0, disk=5 * SEGMENT)
    with KVStore(tmp_path, identity(), settings) as store:
        for number in range(100):
            put(store, tokens_of(number, 21))
        store.flush()
        before = store.stats()["counters"].get("disk_evicted_records", 0)
        assert before > 0

        def refuses(*_: object) -> None:
            raise CatalogError("catalog: commit: no space")

        with monkeypatch.context() as full:
            full.setattr(Catalog, "commit", refuses)
            for number in range(100, 140):
                put(store, tokens_of(number, 21))
                store.flush()
            lost = store.stats()["counters"]["disk_evicted_records"] - before
        assert lost <= 2 * SEGMENT // 4096  # so much is evicted for one group; each of 40 needed as much
        put(store, tokens_of(200, 21))
        store.flush()
        assert stored(store, tokens_of(200, 21)) == 21
        all_is_well(store, deep=True)


def test_what_was_deleted_while_the_catalog_could_not_be_read_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise CatalogError("catalog: read: too many readers")

    with filled(tmp_path) as store:
        with monkeypatch.context() as unreadable:
            unreadable.setattr(Catalog, "get", refuses)
            with pytest.raises(CatalogError):
                store.delete(SEQUENCES[0])
        store.flush()
    with KVStore(tmp_path, identity(), config(host=0)) as store:
        assert [stored(store, tokens) for tokens in SEQUENCES[:3]] == [0, 21, 21]
        all_is_well(store, deep=True)
