"""Stores and sequences of programs that end: little to import, and what is put follows from its number."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig

COUNT = 48
_LAYOUT = KVLayout.uniform(2, 2, 64, "float32")
_CONFIG = StoreConfig(
    host=TierConfig(1 << 20, "raw"),
    disk=TierConfig(64 << 20, "entropy"),
    block_tokens=16,
    segment_bytes=1 << 20,
    donors=False,
)


def open_store(path: str, **options: Any) -> KVStore:
    return KVStore(path, ModelIdentity("m", "r", "w", "t", _LAYOUT), _CONFIG, **options)


def tokens(number: int) -> np.ndarray:
    return np.arange(COUNT, dtype=np.uint32) + np.uint32(number * 1000)


def _kv(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.arange(2 * COUNT * 64, dtype=torch.float32).view(2, COUNT, 64) * number
    return [(made + layer, made - layer) for layer in range(2)]


def put(store: KVStore, number: int) -> None:
    assert store.put(tokens(number), _kv(number)).dropped_blocks == 0


def is_there(store: KVStore, number: int) -> bool:
    """Whether the whole sequence is there; fails where one bit is wrong."""
    hit = store.get(tokens(number))
    if hit is None or hit.tokens < COUNT:
        return False
    for (k, v), (wanted_k, wanted_v) in zip(hit.layers, _kv(number), strict=True):
        assert torch.equal(k[0], wanted_k)
        assert torch.equal(v[0], wanted_v)
    return True
