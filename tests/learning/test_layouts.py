"""A store learns from caches of one key head and from latents as it does from others: what it reads is the blocks."""

from __future__ import annotations

from pathlib import Path

import learncases
import numpy as np
import pytest
import small_stores
import torch

from kvstore import KVLayout, KVStore, LayerLayout, ModelIdentity

LATENT_ROPE = '{"pairs": "deepseek_v3", "rope_theta": 10000.0, "rope_type": "default"}'
LAYOUTS = {
    "one head": KVLayout((LayerLayout(1, 32, 32),) * 4, "bfloat16", learncases.ROPE),
    "latents": KVLayout((LayerLayout(1, 24, 8),) * 4, "bfloat16", LATENT_ROPE),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return LAYOUTS[request.param]


def open_store(path: Path, layout: KVLayout) -> KVStore:
    return KVStore(path, ModelIdentity("learned", "1", "00", "", layout), learncases.config())


def kv_of(tokens: np.ndarray, layout: KVLayout) -> learncases.Layers:
    """A cache whose layers are nearly linear functions of the one before, without a rotation."""
    rng, weights = np.random.default_rng(tokens.astype(np.int64)), np.random.default_rng(1)
    shape = layout.layers[0]
    width = shape.key_dim + shape.value_dim
    x = np.random.default_rng(2).normal(size=(learncases.VOCABULARY, width))[tokens]
    layers = []
    for _ in layout.layers:
        k, v = np.split(x.astype(np.float32), [shape.key_dim], 1)
        layers.append((torch.from_numpy(k[None]).bfloat16(), torch.from_numpy(v[None]).bfloat16()))
        x = 0.98 * x @ weights.normal(size=(width, width)) / np.sqrt(width) + 0.02 * rng.normal(size=x.shape)
    return layers


def fill(store: KVStore, layout: KVLayout) -> list[np.ndarray]:
    sequences = [learncases.tokens_of(number) for number in range(learncases.ENOUGH)]
    for tokens in sequences:
        store.put(tokens, kv_of(tokens, layout))
    store.flush()
    return sequences


def test_what_is_learned_is_adopted(tmp_path: Path, layout: KVLayout) -> None:
    with open_store(tmp_path / "store", layout) as store:
        sequences = fill(store, layout)
        status = store.learn()
        assert status.state == "adopted", status
        assert status.after > 1.15 * status.before
        for tokens in sequences:
            assert learncases.comes_back(store, tokens, kv_of(tokens, layout))
        small_stores.all_is_well(store, deep=True)


def test_what_was_read_stays_when_memory_is_used_again(tmp_path: Path, layout: KVLayout) -> None:
    with open_store(tmp_path / "store", layout) as store:
        tokens = fill(store, layout)[0]
        learner = store._engine.learner
        assert learner is not None
        reader = learner._reader
        words = reader.group(0)(1)
        assert words is not None
        layers = words.layers()
        for _ in range(4):  # nobody has the block any more
            reader.pool.take(words.words.nbytes).array()[:] = 255
        block = slice(words.start, words.start + len(words.tokens))
        want = [[x[0, block].view(torch.int16).numpy() for x in pair] for pair in kv_of(tokens, layout)]
        for found in (layers, words.layers()):
            assert all(
                np.array_equal(a.view(np.int16), b)
                for pair, other in zip(found, want, strict=True)
                for a, b in zip(pair, other, strict=True)
            )
