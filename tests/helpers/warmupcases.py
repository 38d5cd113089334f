"""Prompts of shared parts, and the settings of a store whose puts are durable when they return."""

from __future__ import annotations

import itertools
import random

from tiny_models import VOCABULARY

from kvstore import StoreConfig, TierConfig

MIB = 1 << 20
CONFIG = StoreConfig(
    host=TierConfig(64 * MIB),
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
