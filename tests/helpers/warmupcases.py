"""Prompts of shared parts, and the settings of a store whose puts are durable when they return."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from tiny_models import VOCABULARY

from kvstore import KVStore, StoreConfig, TierConfig
from kvstore.integrations.transformers import cache_layers

MIB = 1 << 20
CONFIG = StoreConfig(
    host=TierConfig(64 * MIB, "raw"),
    disk=TierConfig(192 * MIB, "zstd"),
    segment_bytes=MIB,
    block_tokens=16,
    donors=False,
    durability="put",
)


def product(*counts: int, length: int = 12, seed: int = 0) -> list[list[int]]:
    """Prompts of parts, in every combination."""
    chance = random.Random(seed)
    parts = [
        [[chance.randrange(1, VOCABULARY) for _ in range(length + 3 * number)] for number in range(count)]
        for count in counts
    ]
    return [list(itertools.chain(*each)) for each in itertools.product(*parts)]


def facts(store: KVStore) -> list[tuple[Any, ...]]:
    """What two stores of the same prompts have in common."""
    return [(each.tokens.tolist(), each.blocks, each.namespace, each.pinned) for each in store.inventory().sequences]


def holds_what_it_would_compute(store: KVStore, model: Any, prompt: list[int], namespace: bytes = b"") -> bool:
    """Whether the store has all of a prompt, as the model computes it at once, up to rounding."""
    hit = store.get(prompt, namespace=namespace)
    with torch.no_grad():
        whole = model(torch.tensor([prompt]), use_cache=True).past_key_values
    assert hit is not None
    pairs = zip(cache_layers(hit.cache()), cache_layers(whole), strict=True)
    return hit.tokens == len(prompt) and all(
        torch.allclose(mine, its, atol=1e-4) for pair in pairs for mine, its in zip(*pair, strict=True)
    )
