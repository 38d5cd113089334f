"""The store as the subject of a benchmark: raw records of one size, and sequences of random bits to put into it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import MIB
from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig

BLOCK = 64  # tokens
PUT = 16 * MIB  # raw bytes of one put: a conversation of one or two thousand tokens


def identity_for(record: int) -> ModelIdentity:
    """A model whose blocks of 64 tokens have `record` raw bytes: 16 layers, heads of 64 bfloat16 values."""
    layout = KVLayout.uniform(16, record // (16 * 2 * 64 * 2 * BLOCK), 64)
    return ModelIdentity("benchmark", "", f"{record}", "", layout)


def noise(layout: KVLayout, tokens: int) -> list[tuple[Any, Any]]:
    """Per layer (K, V) of random bits. The store copies these: their owner may write into them again."""
    return [
        (
            torch.randint(-(1 << 15), 1 << 15, (1, x.heads, tokens, x.key_dim), dtype=torch.int16).view(torch.bfloat16),
            torch.randint(-(1 << 15), 1 << 15, (1, x.heads, tokens, x.value_dim), dtype=torch.int16).view(
                torch.bfloat16
            ),
        )
        for x in layout.layers
    ]


class Ours:
    """A store of raw records of `record` bytes, and the sequences that were put into it: `put_bytes` each.

    copied: put tensors that the store has to copy, rather than a model's cache, whose tensors it may keep.
    """

    def __init__(
        self,
        path: Path,
        record: int,
        disk: int,
        host: int = 0,
        group: int = 64 * MIB,
        put_bytes: int = PUT,
        copied: bool = False,
    ) -> None:
        from transformers import DynamicCache

        identity = identity_for(record)
        config = StoreConfig(host=TierConfig(host, "raw"), disk=TierConfig(disk, "raw"), group_bytes=group)
        self.store = KVStore(path, identity, config)
        self.put_bytes = put_bytes
        self.tokens = put_bytes // record * BLOCK
        pairs = noise(identity.layout, self.tokens)
        self.cache: Any = pairs if copied else DynamicCache(pairs)
        self.sequences = 0
        self._tokens: list[Any] = []

    def sequence(self, number: int) -> Any:
        """The tokens of sequence `number`; made once, so that making them is not measured with what they are for."""
        for new in range(len(self._tokens), number + 1):
            self._tokens.append(np.random.default_rng(new).integers(0, 1 << 15, self.tokens, dtype=np.uint32))
        return self._tokens[number]

    def put(self) -> None:
        if self.store.put(self.sequence(self.sequences), self.cache).dropped_blocks:
            raise RuntimeError("a put was dropped: this disk is slower than the put's time limit")
        self.sequences += 1

    def write(self, total: int) -> float:
        """Seconds until `total` new bytes are durable."""
        puts = total // self.put_bytes
        self.sequence(self.sequences + puts)
        begin = time.perf_counter()
        for _ in range(puts):
            self.put()
        if self.store.flush().dropped_blocks:
            raise RuntimeError("blocks were dropped; is the disk full?")
        return time.perf_counter() - begin

    def prefetch(self, number: int) -> None:
        """Brings one sequence into the host tier."""
        if self.store.prefetch(self.sequence(number)).result() != self.tokens:
            raise RuntimeError("the sequence does not fit the host tier")

    def get(self, number: int, tier: str) -> None:
        """Gets one sequence whole, all of it from `tier`."""
        hit = self.store.get(self.sequence(number))
        if hit is None or hit.tiers != {tier: self.tokens}:
            raise RuntimeError(f"expected {self.tokens} tokens from {tier}, found {hit and hit.tiers}")
