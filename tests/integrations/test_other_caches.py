"""Caches of other classes than DynamicCache: each is stored as what the model computed, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny, tiny_of_kind
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.errors import UnsupportedCache
from kvstore.integrations.transformers import cache_layers, generate
from kvstore.integrations.transformers.feeding import cache_name

CONFIG = StoreConfig(host=TierConfig(0), disk=TierConfig(256 << 20, "entropy"), segment_bytes=4 << 20, block_tokens=16)
STEPS, MORE = 4, 7


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def run(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **{cache_name(model): cache}, use_cache=True).logits
    return logits


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4", "deepseek-v3", "qwen3-next", "falcon-h1"])
@pytest.mark.parametrize("count", [9, 40])
def test_a_static_cache_is_stored_as_what_the_model_computed(name: str, count: int, tmp_path: Path) -> None:
    """What comes back is a dynamic cache, which goes on like one that was filled with the same keys and values."""
    model = tiny(name) if name == "llama" else tiny_of_kind(name)
    ids = tokens(count + MORE)
    static = StaticCache(config=model.config, max_cache_len=64)
    run(model, ids[:, :count], static)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        store.put(ids[0, :count].tolist(), static)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        hit = store.get(ids[0].tolist())
    assert hit is not None
    assert hit.tokens == count
    kept = [layer for layer in static.layers if getattr(layer, "keys", None) is not None]
    for layer, (keys, values) in zip(kept, hit.layers, strict=True):
        held, end = keys.shape[-2], min(count, layer.keys.shape[-2])
        assert torch.equal(keys, layer.keys[..., end - held : end, :])
        assert torch.equal(values, layer.values[..., end - held : end, :])
    for state in hit.states:
        of: Any = static.layers[state.place]
        for mine, its in ((state.conv, of.conv_states), (state.recurrent, of.recurrent_states)):
            assert mine is None or torch.equal(mine, its[state.number])
    dynamic = DynamicCache(config=model.config)
    run(model, ids[:, :count], dynamic)
    got, want = run(model, ids[:, count:], hit.cache()), run(model, ids[:, count:], dynamic)
    assert torch.allclose(got, want, atol=1e-4)


def test_quantised_caches_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny("llama")
    ids = tokens(20)
    cache = QuantizedCache("fp8", model.config)
    run(model, ids, cache)
    others = [DynamicCache(config=model.config) for _ in range(2)]
    for other, kind in zip(others, (QuantoQuantizedLayer, HQQQuantizedLayer), strict=True):  # need other packages
        other.layers = [kind.__new__(kind) for _ in other.layers]
        for layer in other.layers:
            layer.keys = layer.values = torch.zeros(1, 2, 20, 16)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        for refused, name in ((cache, "Fp8"), (others[0], "Quanto"), (others[1], "HQQ")):
            with pytest.raises(UnsupportedCache, match=f"{name}QuantizedLayer: it holds other keys and values"):
                store.put(ids[0].tolist(), refused)
        assert store.contains(ids[0].tolist()) == 0


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_offloaded_caches_are_refused_by_name(name: str, tmp_path: Path) -> None:
    model = tiny("llama") if name == "llama" else tiny_of_kind(name)
    ids = tokens(20)
    cache = DynamicCache(config=model.config)
    run(model, ids, cache)
    cache.offloading = True  # as it is made where there is a device
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        with pytest.raises(UnsupportedCache, match="offloads its layers"):
            store.put(ids[0].tolist(), cache)
        assert store.contains(ids[0].tolist()) == 0
    with pytest.raises(UnsupportedCache, match="offloads its layers"):
        cache_layers(cache)


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized", "offloaded_static"])
def test_generate_refuses_to_be_told_another_cache(kind: str, tmp_path: Path) -> None:
    model = tiny("llama")
    with (
        KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store,
        pytest.raises(ValueError, match="cache_implementation: a store does not support"),
    ):
        generate(model, tokens(9), store=store, cache_implementation=kind, max_new_tokens=2)
