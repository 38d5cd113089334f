"""Stores of one sequence whose records are all on disk, and predicted, and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from profilecases import ROPE, identity_of, level_kv, predicted_kv, profile_of

from kvstore import KVLayout, KVStore, StoreConfig, TierConfig
from kvstore.config import MIB
from kvstore.metrics import Metric

LAYOUT = KVLayout.uniform(9, 2, 16, rope=ROPE)
COUNT = 50
TOKENS = np.arange(COUNT, dtype=np.uint32)
SECTIONS = {"predictive": ("lossless",), **{f"predictive:{level}": ("lossless", "levels") for level in (1, 2, 3)}}


def contents(codec: str) -> Any:
    profile = profile_of(LAYOUT, *SECTIONS[codec])
    if codec == "predictive":
        return predicted_kv(profile, TOKENS, 0)
    return level_kv(profile, int(codec[-1]), TOKENS, 0)


def predicted_store(path: Path, codec: str, threads: int = 2, host: int = 0) -> KVStore:
    """A store whose records are all on disk, and predicted."""
    file = path / "profile"
    if not file.exists():
        path.mkdir(exist_ok=True)
        profile_of(LAYOUT, *SECTIONS[codec]).save(file)
    tiers = {"host": TierConfig(host, codec) if host else TierConfig(0), "disk": TierConfig(16 * MIB, codec)}
    made = StoreConfig(**tiers, profile=file, block_tokens=16, threads=threads)
    with KVStore(path / "store", identity_of(LAYOUT), made) as store:
        store.put(TOKENS, contents(codec))
        store.flush()
        assert not store.stats()["counters"].get(Metric.FALLBACK_RAW_CHUNKS.value)  # all are predicted
    return KVStore(path / "store", identity_of(LAYOUT), made)
