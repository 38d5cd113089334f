"""Caches that can be learned from: each layer is nearly a linear function of the one before. And those that cannot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import KIB, MIB
from kvstore.core.rope import rotate

HEADS, DIM, LAYERS, VOCABULARY = 2, 16, 4, 200
ROPE = json.dumps({"rope_theta": 10000.0, "rope_type": "default"})
LAYOUT = KVLayout.uniform(LAYERS, HEADS, DIM, rope=ROPE)
IDENTITY = ModelIdentity("learned", "1", "00", "", LAYOUT)
LENGTH = 512
ENOUGH = 5  # sequences to learn from, where `trial.LEAST_TOKENS` is as small
_WIDTH = HEADS * DIM
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def config(host: int = 0, **settings: Any) -> StoreConfig:
    """A small store that learns only when it is asked to."""
    settings = {"learn": "off", "segment_bytes": 512 * KIB, "threads": 1, **settings}
    return StoreConfig(
        host=TierConfig(host, "raw"), disk=settings.pop("disk", TierConfig(64 * MIB, "auto")), **settings
    )


def open_store(path: Path, fs: Any = None, **settings: Any) -> KVStore:
    return KVStore(path, IDENTITY, config(**settings), fs=fs)


def tokens_of(number: int, count: int = LENGTH) -> np.ndarray:
    """Sequences of different numbers share no block."""
    tokens = np.random.default_rng(number).integers(0, VOCABULARY, count).astype(np.uint32)
    tokens[:2] = number % VOCABULARY, number // VOCABULARY
    return tokens


def first_layer() -> np.ndarray:
    """K before the rotation, in pairs, and V of every token, float `[VOCABULARY, 2 * _WIDTH]`."""
    return np.random.default_rng(2).normal(size=(VOCABULARY, 2 * _WIDTH))


def kv_of(tokens: np.ndarray, noise: float = 0.02, ropes: Sequence[str] = (ROPE,) * LAYERS) -> Layers:
    """The cache of a sequence, which follows from its tokens.

    noise: of each layer, beside what the one before says. With 1 no layer follows from anything.
    """
    rng, weights = np.random.default_rng(tokens.astype(np.int64)), np.random.default_rng(1)
    x = first_layer()[tokens] if noise < 1 else rng.normal(size=(len(tokens), 2 * _WIDTH))
    layers = []
    for rope in ropes:
        k, v = (part.astype(np.float32) for part in np.split(x, 2, 1))
        k = rotate(k, HEADS, np.arange(len(tokens)), rope, 1)
        layers.append((_tensor(k), _tensor(v)))
        mixed = x @ weights.normal(size=(2 * _WIDTH, 2 * _WIDTH)) / np.sqrt(2 * _WIDTH)
        x = (1 - min(1.0, noise)) * mixed + noise * rng.normal(size=x.shape)
    return layers


def behind(number: int, variant: int, size: float = 0.05) -> tuple[np.ndarray, Layers]:
    """A sequence behind a block of another: what it differs in from itself alone goes on from layer to layer in a way
    of its own."""
    before, tokens = tokens_of(1000 + variant, 64), tokens_of(number)
    rng, weights = np.random.default_rng([number, variant]), np.random.default_rng(3)
    d = size * rng.normal(size=(LENGTH, 2 * _WIDTH)) * np.exp(rng.normal(size=(LENGTH, 1)))
    layers = []
    for (k, v), (first_k, first_v) in zip(kv_of(tokens), kv_of(before), strict=True):
        own = rotate(_rows(k), HEADS, np.arange(LENGTH), ROPE, -1) + d[:, :_WIDTH].astype(np.float32)
        own = _tensor(rotate(own, HEADS, 64 + np.arange(LENGTH), ROPE, 1))
        values = _tensor(_rows(v) + d[:, _WIDTH:].astype(np.float32))
        layers.append((torch.cat([first_k, own], 1), torch.cat([first_v, values], 1)))
        d = d @ weights.normal(size=(2 * _WIDTH, 2 * _WIDTH)) / np.sqrt(2 * _WIDTH)
    return np.concatenate([before, tokens]), layers


def fill(store: KVStore, first: int = 0, count: int = ENOUGH, noise: float = 0.02) -> None:
    """Puts so many sequences, durably."""
    for number in range(first, first + count):
        tokens = tokens_of(number)
        store.put(tokens, kv_of(tokens, noise))
    store.flush()


def is_whole(store: KVStore, numbers: range, noise: float = 0.02) -> bool:
    """Whether all sequences come back, bit for bit."""
    return all(_comes_back(store, tokens_of(number), noise) for number in numbers)


def codecs_on_disk(store: KVStore) -> list[int]:
    """The codec of every record, by number."""
    disk = store._residency.disk
    assert disk is not None
    return [int(codec) for codec in disk.catalog.scan().entries["codec"]]


def _comes_back(store: KVStore, tokens: np.ndarray, noise: float) -> bool:
    return comes_back(store, tokens, kv_of(tokens, noise))


def comes_back(store: KVStore, tokens: np.ndarray, layers: Layers) -> bool:
    """Whether a sequence comes back, bit for bit."""
    hit = store.get(tokens)
    if hit is None or hit.tokens != len(tokens):
        return False
    pairs = zip(hit.layers, layers, strict=True)
    return all(torch.equal(_bits(a[0]), _bits(b)) for got, want in pairs for a, b in zip(got, want, strict=True))


def _rows(tensor: torch.Tensor) -> np.ndarray:
    """float32 `[tokens, C]`."""
    return tensor.transpose(0, 1).flatten(1).float().numpy()


def _tensor(rows: np.ndarray) -> torch.Tensor:
    """`[heads, tokens, dim]`."""
    return torch.from_numpy(rows.reshape(len(rows), HEADS, DIM)).transpose(0, 1).contiguous().bfloat16()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)
