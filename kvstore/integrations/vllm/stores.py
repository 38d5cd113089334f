"""The stores that connectors of this process have open.

The worker owns the store: it has the tensors, and one process writes a store. The scheduler asks the index alone. Where
both are in one process they share the store; else the scheduler opens it for reading, and sees what is on disk.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from kvstore.config import StoreConfig, TierConfig
from kvstore.core.identity import ModelIdentity
from kvstore.store import KVStore
from kvstore.stored import stored_identity

_lock = threading.Lock()
_written: dict[str, KVStore] = {}  # by folder


def open_written(path: str, identity: ModelIdentity, config: StoreConfig) -> KVStore:
    """Open a store for writing, for the worker. Raises as `KVStore`."""
    store = KVStore(path, identity, config)
    with _lock:
        _written[store.path] = store
    return store


def close_written(store: KVStore) -> None:
    """Close what `open_written` opened."""
    with _lock:
        if _written.get(store.path) is store:
            del _written[store.path]
    store.close()


def open_index(path: str, config: StoreConfig) -> tuple[KVStore, bool]:
    """Return the store of the worker, for the scheduler, and whether it was opened for it and is to be closed.

    Raises:
        StoreNotFound: no worker has made it.
    """
    with _lock:
        store = _written.get(path)
    if store is not None:
        return store, False
    reading = replace(config, host=TierConfig(0), device=TierConfig(0), threads=1)
    return KVStore(path, stored_identity(path), reading, read_only=True), True
