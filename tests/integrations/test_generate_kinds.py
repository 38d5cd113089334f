"""`generate` around a store, of models whose layers keep windows, chunks, latents, states, or nothing of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_of_kind
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionLayer

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.core.cache_argument import cache_name
from kvstore.integrations.transformers import generate

MIB = 1 << 20
CONFIG = StoreConfig(
    host=TierConfig(16 * MIB, "raw"), disk=TierConfig(64 * MIB, "entropy"), segment_bytes=4 * MIB, block_tokens=16
)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True}
KINDS = ("mistral", "gemma3", "gpt-oss", "llama4", "deepseek-v3", "deepseek-v32", "qwen3-next", "mamba2", "falcon-h1")


def _tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def _turn(model: Any, ids: torch.Tensor, memory: Any, known: int) -> Any:
    """What the model answers from its cache in memory, which is of `known` tokens. Mutates the cache."""
    if {type(layer) for layer in memory.layers} != {LinearAttentionLayer}:
        return model.generate(ids, past_key_values=memory, attention_mask=torch.ones_like(ids), **GREEDY).sequences
    rest = ids[:, known:]
    given = {cache_name(model): memory, "attention_mask": torch.ones_like(rest)}
    answer = model.generate(rest, **given, **GREEDY).sequences
    return torch.cat([ids[:, :known], answer], 1)


@pytest.mark.parametrize("name", KINDS)
def test_six_turns_through_the_store_equal_turns_with_the_cache_in_memory(tmp_path: Path, name: str) -> None:
    """The store is closed and opened after each, so that every prefix comes from disk. The first prompts are shorter
    than the window (24 tokens), the others longer."""
    model = tiny_of_kind(name)
    identity = ModelIdentity.from_transformers(model)
    ids, memory, known = _tokens(7), DynamicCache(config=model.config), 0
    for turn in range(6):
        want = _turn(model, ids, memory, known)
        with KVStore(tmp_path / "store", identity, CONFIG) as store:
            got = generate(model, ids, store=store, session="s", **GREEDY)
            counters = store.stats()["counters"]
            assert store.contains(got.sequences[0, :-1].tolist()) == got.sequences.shape[1] - 1
        assert torch.equal(got.sequences, want)
        assert counters.get("get_hit_tokens_disk", 0) == known
        known = want.shape[1] - 1
        ids = torch.cat([want, _tokens(7 + 9 * (turn % 2), seed=turn + 1)], 1)
        assert counters.get("get_hits", 0) == (turn > 0)


@pytest.mark.parametrize("count", [9, 23, 24, 40])
def test_a_static_cache_is_stored_as_the_dynamic_one_would_be(tmp_path: Path, count: int) -> None:
    model = tiny_of_kind("gemma3")
    ids = _tokens(count)
    static = StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        model(ids, past_key_values=static, use_cache=True)
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(model), CONFIG) as store:
        store.put(ids[0].tolist(), static)
        hit = store.get(ids[0].tolist())
    assert hit is not None
    assert hit.tokens == count
    for layer, (keys, values) in zip(static.layers, hit.layers, strict=True):
        held = keys.shape[-2]
        end = min(count, layer.keys.shape[-2])
        assert torch.equal(keys, layer.keys[..., end - held : end, :])
        assert torch.equal(values, layer.values[..., end - held : end, :])
