"""Caches that AQUA-KV predicts well, as dumps to fit to and blocks to code."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import torch
from kvcases import random_kv

from kvstore import KVLayout
from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.core.rope import rotate

ROPE = json.dumps({"rope_theta": 10000.0, "rope_type": "default"})
LAYOUT = KVLayout.uniform(3, 2, 32, rope=ROPE)
LENGTH = 96
Layers = list[tuple[torch.Tensor, torch.Tensor]]
Rows = list[tuple[np.ndarray, np.ndarray]]


def smooth_rows(count: int, layout: KVLayout = LAYOUT, seed: int = 0) -> Rows:
    """Per layer keys, before their rotary embedding, and values, `[count, width]`: each layer a linear map of the one
    before and a little noise. The maps are the same for every seed."""
    maps, rng = np.random.default_rng(99), np.random.default_rng(seed)
    found: Rows = []
    for shape in layout.layers:
        pair = []
        for dim in (shape.key_dim, shape.value_dim):
            width = shape.heads * dim
            noise = rng.standard_normal((count, width))
            if found:
                inputs = found[-1][0] if not pair else np.concatenate([pair[0], found[-1][1]], axis=1)
                mix = maps.standard_normal((inputs.shape[1], width)) / inputs.shape[1] ** 0.5
                noise = 2.0 * (len(pair) + 1) + inputs @ mix + 0.1 * noise
            pair.append(noise.astype(np.float32))
        found.append((pair[0], pair[1]))
    return found


def cache_of(rows: Rows, layout: KVLayout = LAYOUT, start: int = 0) -> Layers:
    """As a model's cache: keys rotated, the layout's type."""
    found = []
    for shape, (k, v) in zip(layout.layers, rows, strict=True):
        positions = np.arange(start, start + len(k), dtype=np.int64)
        turned = rotate(k, shape.heads, positions, layout.rope, 1)
        found.append(
            tuple(
                torch.from_numpy(x).view(len(k), shape.heads, -1).transpose(0, 1).to(getattr(torch, layout.dtype))
                for x in (turned, v)
            )
        )
    return found


def dump_of(windows: int, layout: KVLayout = LAYOUT) -> SimpleNamespace:
    caches = [cache_of(smooth_rows(LENGTH, layout, seed), layout) for seed in range(windows)]

    def layer(number: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(t.float().transpose(0, 1).flatten(1) for t in caches[window][number])

    return SimpleNamespace(layout=layout, windows=windows, length=LENGTH, layer=layer)


def info_of(count: int, layout: KVLayout = LAYOUT, start: int = 0) -> BlockInfo:
    return BlockInfo(layout, np.arange(count, dtype=np.uint32), start)


def encode(codec: AquaCodec, info: BlockInfo, kv: Layers) -> tuple[bytes, tuple[int, ...]]:
    memory = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(info.layout, kv), memory)
    assert sizes is not None
    return bytes(memory[: sum(sizes)]), sizes


def decode(codec: AquaCodec, info: BlockInfo, payload: bytes, sizes, count: int | None = None) -> Layers:
    count = info.count if count is None else count
    out = random_kv(count, info.layout, seed=5)
    codec.decode(info, memoryview(payload), sizes, KVView.of_layers(info.layout, out))
    return out


def error(found: Layers, expected: Layers, begin: int = 4) -> float:
    """Squared error relative to the variance, of the tokens from `begin` on, all but the first layer."""
    squares = power = 0.0
    for pair, wanted in list(zip(found, expected, strict=True))[1:]:
        for f, e in zip(pair, wanted, strict=True):
            f, e = f[:, begin:].double(), e[:, begin:].double()
            squares += float((f - e).pow(2).sum())
            power += float((e - e.mean(1, keepdim=True)).pow(2).sum())
    return squares / power
