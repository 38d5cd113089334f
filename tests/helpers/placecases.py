"""Caches with windows, with states and with both, as the tests of places put and get them."""

from __future__ import annotations

from typing import Any

from statecases import HYBRID, ONLY_STATES, WITH_WINDOWS, cache_of, is_state_of
from windowcases import ONLY_SLIDING, WINDOWED, is_kept, kept

from kvstore import Hit, KVLayout, KVStore

LAYOUTS = {
    "mixed": WINDOWED,
    "sliding": ONLY_SLIDING,
    "hybrid": HYBRID,
    "states": ONLY_STATES,
    "windows and states": WITH_WINDOWS,
}


def put(store: KVStore, ids: Any, layout: KVLayout, ttl: float | None = None) -> None:
    store.put(ids, cache_of(ids, layout) if layout.states else kept(ids, layout), ttl=ttl)


def is_exact(hit: Hit, ids: Any, layout: KVLayout) -> bool:
    return is_state_of(hit, ids, layout) if layout.states else is_kept(hit, ids, layout)


def got(store: KVStore, ids: Any, layout: KVLayout) -> int:
    hit = store.get(ids)
    if hit is None:
        return 0
    assert is_exact(hit, ids, layout)
    return hit.tokens
