"""Puts that are durable on return, gets that check what they find, and a catalog that is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from kvcases import kv_of, same_kv, tokens

from kvstore import KVStore, PutResult


def put(store: KVStore, ids: np.ndarray, **settings: Any) -> PutResult:
    result = store.put(ids, kv_of(ids), **settings)
    store.flush()
    return result


def favour(store: KVStore, ids: np.ndarray) -> None:
    """Puts a sequence, and uses it four times, with others put in between."""
    put(store, ids)
    for seed in range(4):
        put(store, tokens(8, seed=3000 + seed))
        assert stored(store, ids) == len(ids)


def lose_meta_pages(folder: Path) -> None:
    """Of the catalog of a closed store, which must be built anew."""
    path = folder / "catalog" / "data.mdb"
    data = bytearray(path.read_bytes())
    data[:8192] = bytes(8192)  # both of them
    path.write_bytes(data)


def stored(store: KVStore, ids: np.ndarray) -> int:
    """How many tokens come back; what comes back is checked."""
    hit = store.get(ids)
    if hit is None:
        return 0
    assert same_kv(hit.layers, kv_of(ids[: hit.tokens]))
    return hit.tokens
