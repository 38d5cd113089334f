"""Caches of a workload's sequences: computed as a program would, put, and looked at."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.workloads.arrival import Ids
from kvstore import KVStore
from kvstore.integrations.transformers import cache_layers


@torch.inference_mode()
def computed(model: Any, store: KVStore, tokens: Ids) -> Any:
    """The cache of `tokens`: what is stored of it from `store`, the rest computed. Per layer (K, V), each
    `[1, heads, n, dim]`."""
    hit = store.get(tokens, max_tokens=len(tokens) - 1)
    cache = DynamicCache(config=model.config) if hit is None else hit.cache()
    known = 0 if hit is None else hit.tokens
    rest = torch.tensor(tokens[None, known:].astype("int64"))
    model(rest, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache_layers(cache)


def put(store: KVStore, tokens: Ids, layers: Any) -> tuple[int, int]:
    """(bytes, raw bytes) that the disk holds more than before, durable."""
    before = held(store)
    if store.put(tokens, layers).dropped_blocks or store.flush().dropped_blocks:
        raise SystemExit("blocks were dropped; is the disk full?")
    after = held(store)
    return after[0] - before[0], after[1] - before[1]


def held(store: KVStore) -> tuple[int, int]:
    """Bytes of live records and the catalog, raw bytes of the records."""
    disk = store.stats()["disk"]
    return disk["bytes"] + disk["catalog_bytes"], disk["raw_bytes"]


def tensor_bytes(peer: Any, layers: Any, count: int) -> int:
    """Coded bytes of the last `count` tokens, K and V of each layer as a tensor."""
    if not count:
        return 0
    parts = [tensor[..., -count:, :].clone(memory_format=torch.contiguous_format) for pair in layers for tensor in pair]
    return sum(len(peer.encode(part.view(torch.uint8).numpy().reshape(-1))) for part in parts)


def digest(layers: Any) -> bytes:
    hasher = hashlib.sha256()
    for tensor in (tensor for pair in layers for tensor in pair):
        hasher.update(tensor.contiguous().view(torch.uint8).numpy())
    return hasher.digest()


def digest_of(store: KVStore, tokens: Ids) -> bytes | None:
    hit = store.get(tokens, reserve=0)
    return None if hit is None or hit.tokens < len(tokens) else digest(hit.layers)
