"""Puts that are durable on return, and gets that check what they find."""

from __future__ import annotations

from typing import Any

import numpy as np
from kvcases import kv_of, same_kv

from kvstore import KVStore, PutResult


def put(store: KVStore, ids: np.ndarray, **settings: Any) -> PutResult:
    result = store.put(ids, kv_of(ids), **settings)
    store.flush()
    return result


def stored(store: KVStore, ids: np.ndarray) -> int:
    """How many tokens come back; what comes back is checked."""
    hit = store.get(ids)
    if hit is None:
        return 0
    assert same_kv(hit.layers, kv_of(ids[: hit.tokens]))
    return hit.tokens
