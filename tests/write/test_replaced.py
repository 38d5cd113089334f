"""A stored tail goes when what replaces it is durable, and not before; and then it goes for good."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import small_stores
from faultfs import Fault, FaultFS
from small_stores import IDENTITY, config, stored, tokens_of

from kvstore import KVStore

TOKENS = tokens_of(1, 30)


def broken() -> Fault:
    return Fault("pwritev", 1, errno.EIO, sticky=True)


def a_replacement_fails(store: KVStore, fs: FaultFS) -> None:
    """A tail of 21 tokens is on disk; the one of 22 that was to replace it could not be written."""
    small_stores.put(store, TOKENS[:21])
    store.flush()
    fs.fault = broken()
    small_stores.put(store, TOKENS[:22])
    store.flush()
    fs.fault = None


@pytest.mark.parametrize("lengths", [(23,), (22, 23), (22, 26, 30)])
def test_a_tail_stays_where_nothing_that_replaces_it_can_be_written(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    fs = FaultFS()
    with KVStore(tmp_path, IDENTITY, config(host=0), fs=fs) as store:
        small_stores.put(store, TOKENS[:21])
        store.flush()
        fs.fault = broken()
        for length in lengths:
            small_stores.put(store, TOKENS[:length])
        store.flush()
        assert fs.fault.hits
        fs.fault = None
    with KVStore(tmp_path, IDENTITY, config(host=0)) as store:
        assert stored(store, TOKENS) == 21
        small_stores.all_is_well(store)


def test_it_goes_with_a_later_replacement_and_does_not_come_back(tmp_path: Path) -> None:
    fs = FaultFS()
    with KVStore(tmp_path, IDENTITY, config(), fs=fs) as store:
        a_replacement_fails(store, fs)
        small_stores.put(store, TOKENS[:23])
        store.flush()
        assert stored(store, TOKENS) == 23
        assert store.delete(TOKENS[:23])
    with KVStore(tmp_path, IDENTITY, config()) as store:
        assert store.stats()["disk"]["records"] == 0
        assert stored(store, TOKENS) == 0


def test_it_is_deleted_with_what_was_to_replace_it(tmp_path: Path) -> None:
    fs = FaultFS()
    with KVStore(tmp_path, IDENTITY, config(), fs=fs) as store:
        a_replacement_fails(store, fs)
        assert store.delete(TOKENS[:22])
    with KVStore(tmp_path, IDENTITY, config()) as store:
        assert stored(store, TOKENS) == 0
