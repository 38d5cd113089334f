"""Layers with an indexer of sparse attention: its keys are stored beside the latents, as two halves of a layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_of_kind
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

from kvstore import KVLayout, KVStore, LayerLayout, ModelIdentity, StoreConfig, TierConfig
from kvstore.calibration.model_probe import layout_of
from kvstore.errors import ConfigError, UnsupportedCache, UnsupportedModel

CONFIG = StoreConfig(host=TierConfig(0), disk=TierConfig(1 << 26, "entropy"), segment_bytes=4 << 20, block_tokens=16)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_of_kind("deepseek-v32")


def filled(model: Any, count: int) -> tuple[list[int], Any]:
    ids = torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(count))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return ids[0].tolist(), cache


def test_the_layout_has_the_keys_of_the_indexers_behind_the_latents(model: Any) -> None:
    layout = ModelIdentity.from_transformers(model).layout
    assert layout.indexed == (0, 1, 2)
    assert layout.layers == (LayerLayout(1, 32, 8),) * 3 + (LayerLayout(1, 8, 8),) * 3
    assert KVLayout.from_canonical(layout.canonical()) == layout
    assert not layout.is_latent
    assert not layout.is_uniform


def test_the_keys_come_back_bit_for_bit(model: Any, tmp_path: Path) -> None:
    ids, cache = filled(model, 45)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        store.put(ids, cache)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        for count in (45, 31):
            hit = store.get(ids[:count])
            assert hit is not None
            assert hit.tokens == count
            for mine, its in zip(cache.layers, hit.cache().layers, strict=True):
                assert type(its) is DynamicIndexedLayer
                assert torch.equal(mine.keys[:, :, :count], its.keys)
                assert torch.equal(mine.values[:, :, :count], its.values)
                assert torch.equal(mine.indexer_keys[:, :count], its.indexer_keys)
        assert store.check(deep=True).ok


def test_caches_without_the_keys_and_caches_with_too_many_are_refused(model: Any, tmp_path: Path) -> None:
    identity = ModelIdentity.from_transformers(model)
    ids, cache = filled(model, 9)
    plain = replace(identity, layout=KVLayout(identity.layout.layers[:3], "float32", identity.layout.rope))
    with (
        KVStore(tmp_path / "plain", plain, CONFIG) as store,
        pytest.raises(UnsupportedCache, match="expected no keys of an indexer"),
    ):
        store.put(ids, cache)
    with KVStore(tmp_path / "s", identity, CONFIG) as store:
        cache.layers[1].indexer_position_ids = torch.zeros(1, 1, 9)
        with pytest.raises(UnsupportedCache, match="layer 1 of the cache keeps positions"):
            store.put(ids, cache)
        cache.layers[1].indexer_keys = None
        with pytest.raises(UnsupportedCache, match=r"layer 1 .* expected keys of its indexer"):
            store.put(ids, cache)
        assert store.contains(ids) == 0


def test_calibration_refuses_indexers_by_name(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="keys of an indexer"):
        layout_of(model, "short")


@pytest.mark.parametrize("indexed", [(1,), (0, 0), (-1,), [0], (0, 1)])
def test_indexed_of_a_layout_is_checked(indexed: Any) -> None:
    layers = (LayerLayout(1, 32, 8), LayerLayout(1, 8, 8))
    assert KVLayout(layers, "float32", model_layers=1, indexed=(0,)).place_of == (0,)
    with pytest.raises(ConfigError, match=r"KVLayout\.(indexed|model_layers|places)"):
        KVLayout(layers, "float32", model_layers=1, indexed=indexed)
