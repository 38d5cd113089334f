"""Stores that share a remote tier."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import small_stores

from kvstore import Hit, KVStore, RemoteConfig


class WithParcels(str):
    """A URL whose engine is to put records of small stores together, four at a time."""

    __slots__ = ()


GROUP = 4


def settings(url: str, **remote: Any) -> RemoteConfig:
    """Deadlines that a loaded machine meets, and beliefs that no test waits for."""
    if isinstance(url, WithParcels):
        block_bytes = small_stores.BLOCK * small_stores.LAYOUT.bytes_per_token
        remote["settings"] = {"parcel_bytes": GROUP * block_bytes, **remote.get("settings", {})}
    return RemoteConfig(str(url), **{"deadline_s": 20.0, "upload": "put", "miss_s": 0.0, **remote})


def open_store(path: Path, remote: RemoteConfig, **options: Any) -> KVStore:
    """A small store with this remote tier."""
    return KVStore(path, small_stores.IDENTITY, small_stores.config(remote=remote, **options))


def counters(store: KVStore) -> dict[str, float]:
    return dict(store.stats()["counters"])


def filled(path: Path, remote: RemoteConfig, *sequences: Any, **options: Any) -> None:
    """Make a store, put sequences, write them to the remote tier, and close the store."""
    with open_store(path, remote, **options) as store:
        for tokens in sequences:
            small_stores.put(store, tokens)
        assert store.flush(remote=True).remote_due == 0


def got(store: KVStore, tokens: Any) -> Hit:
    """The hit of a get, which must be exact."""
    hit = store.get(tokens)
    assert hit is not None
    assert small_stores.is_exact(hit, tokens)
    return hit


def until(is_so: Callable[[], bool]) -> None:
    """Return as soon as another thread of a store has made it so; fail if it never does."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.02)
