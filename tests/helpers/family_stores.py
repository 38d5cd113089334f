"""Caches that resemble each other where their tokens do, as a model's do: what a block can be coded against.

Keys and values follow from (token, layer), K turned by its position, plus a little noise that follows from namespace
and the whole prefix. So blocks with the same tokens at other places or behind other beginnings are alike and never
equal, and any process can say what a `get` must return, without having seen the `put`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from small_stores import SEGMENT, all_is_well, catalog_entries

from kvstore import Hit, KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.tiers.disk.budget import BESIDE_BYTES

BLOCK = 32
THETA = 10_000.0
LAYOUT = KVLayout.uniform(2, 2, 16, rope='{"rope_theta": 10000.0, "rope_type": "default"}')
IDENTITY = ModelIdentity("alike", "1", "00", "", LAYOUT)
NOISE = 0.01  # of a value: what a prefix changes

Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]
Layers = list[tuple[torch.Tensor, torch.Tensor]]
_MASK = (1 << 64) - 1


def config(
    host: int = 0, disk: int = 8 << 20, codec: str = "entropy", segment_bytes: int = SEGMENT, **settings: Any
) -> StoreConfig:
    """Budgets in bytes, that of the disk for its segments alone; blocks of 32 tokens, segments of 64 KiB, one worker
    thread, and no host tier, so that what is got was decoded against donors."""
    defaults: dict[str, Any] = {"block_tokens": BLOCK, "segment_bytes": segment_bytes, "threads": 1}
    return StoreConfig(
        host=TierConfig(host, "splitzip"), disk=TierConfig(disk + BESIDE_BYTES, codec), **{**defaults, **settings}
    )


def passage(number: int, count: int = 4 * BLOCK) -> Tokens:
    """`count` tokens; passages of different numbers share nothing."""
    return np.random.default_rng([number, 7]).integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)


def join(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


def behind(number: int, tokens: Tokens, count: int = BLOCK) -> Tokens:
    """The tokens behind another beginning, of `count` tokens."""
    return join(passage(number, count), tokens)


def kv_of(tokens: Iterable[int], namespace: bytes = b"", layout: KVLayout = LAYOUT) -> Layers:
    """The cache of a sequence: per layer (K, V), `[heads, tokens, dim]` bfloat16."""
    ids = [int(token) for token in tokens]
    state = int.from_bytes(namespace.ljust(8, b"\0")[:8], "little") ^ len(namespace)
    states = []
    for token in ids:
        state = (state * 6364136223846793005 + token + 1442695040888963407) & _MASK
        states.append(state)
    token_rows, prefix_rows = np.array(ids, np.uint64), np.array(states, np.uint64)
    layers = []
    for number, shape in enumerate(layout.layers):
        pair = []
        for which, dim in enumerate((shape.key_dim, shape.value_dim)):
            salt = np.arange(shape.heads * dim, dtype=np.uint64) + np.uint64((number * 2 + which + 1) << 32)
            salt = salt.reshape(shape.heads, 1, dim) * np.uint64(0x9E3779B97F4A7C15)
            values = _normal(token_rows[None, :, None] * np.uint64(0xD6E8FEB86659FD93) + salt)
            if not which and layout.rope != "none":
                values = _turned(values, np.arange(len(ids)))
            values = values + NOISE * _normal(prefix_rows[None, :, None] ^ salt)
            pair.append(torch.from_numpy(values.astype(np.float32)).bfloat16())
        layers.append((pair[0], pair[1]))
    return layers


def put(store: KVStore, tokens: Tokens, namespace: bytes = b"", **options: Any) -> Any:
    """Puts a sequence with the contents that `kv_of` gives it."""
    return store.put(tokens, kv_of(tokens, namespace, store.identity.layout), namespace=namespace, **options)


def is_exact(hit: Hit, tokens: Iterable[int], namespace: bytes = b"", layout: KVLayout = LAYOUT) -> bool:
    """Whether a hit holds exactly the bits of the first `hit.tokens` tokens."""
    want = kv_of(list(tokens)[: hit.tokens], namespace, layout)
    return len(want) == len(hit.layers) and all(
        a.shape[1:] == b.shape and torch.equal(a[0].contiguous().view(torch.int16), b.view(torch.int16))
        for pair, expected in zip(hit.layers, want, strict=True)
        for a, b in zip(pair, expected, strict=True)
    )


def stored(store: KVStore, tokens: Tokens, namespace: bytes = b"", **options: Any) -> int:
    """How many leading tokens `get` returns; fails where it returns one wrong bit."""
    hit = store.get(tokens, namespace=namespace, **options)
    if hit is None:
        return 0
    assert is_exact(hit, tokens, namespace, store.identity.layout), f"wrong bytes in {hit.tokens} tokens"
    return hit.tokens


def members(store: KVStore) -> int:
    """How many records are coded against others."""
    found: int = store.stats()["families"]["members"]
    return found


def counter(store: KVStore, name: str) -> float:
    found: float = store.stats()["counters"].get(name, 0)
    return found


def member_entries(store: KVStore) -> list[Any]:
    """The catalog's entries of members, by number; also held against what the store knows of its families."""
    entries = [entry for entry in catalog_entries(store) if entry.donors]
    for entry in entries:
        assert entry.codec == DonorCodec.id
        assert store._residency.donors_of(entry.record) == entry.donors
    return entries


def families_hold(store: KVStore) -> None:
    """Everything that the store says of itself agrees, and on disk members alone are coded with the donor codec."""
    all_is_well(store)
    assert all(bool(entry.donors) == (entry.codec == DonorCodec.id) for entry in catalog_entries(store))


def disk_bytes(store: KVStore) -> int:
    """Pages of live records."""
    found: int = store.stats()["disk"]["bytes"]
    return found


def _normal(states: np.ndarray) -> np.ndarray:
    """About normal, from hashes."""
    mixed = _mix(states)
    lanes = [((mixed >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.float64) for i in range(4)]
    return (sum(lanes) / 65536 - 2) * np.sqrt(3)


def _turned(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    half = keys.shape[-1] // 2
    angles = positions[:, None] * THETA ** -(np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = keys[..., :half], keys[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
