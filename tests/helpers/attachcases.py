"""Prompts for an attached model, and the settings of its store."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import VOCABULARY

from kvstore import KVStore, StoreConfig, TierConfig
from kvstore.core.results import RequestReport

MIB = 1 << 20
CONFIG = StoreConfig(
    host=TierConfig(16 * MIB, "raw"), disk=TierConfig(16 * MIB, "zstd"), segment_bytes=MIB, block_tokens=16
)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def said(store: KVStore) -> RequestReport:
    assert store.last_request is not None
    return store.last_request
