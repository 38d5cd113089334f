"""`generate` around a store: the same tokens and the same cache, bit for bit, as with the cache in memory.

"The same" is always against the same split of the computation: what is held by a cache, and what is computed at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny
from transformers import DeepseekV32Config, DynamicCache, StaticCache

from kvstore import AsyncKVStore, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.errors import ConfigError, IdentityMismatch, ReadOnlyStore, StoreClosed, UnsupportedCache
from kvstore.integrations.transformers import cache_layers, generate
from kvstore.integrations.transformers.cache import cache_from_layers

MIB = 1 << 20
CONFIG = StoreConfig(
    host=TierConfig(16 * MIB, "raw"), disk=TierConfig(16 * MIB, "zstd"), segment_bytes=MIB, block_tokens=16
)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}


def _open(path: Path, model: Any) -> KVStore:
    return KVStore(path, ModelIdentity.from_transformers(model), CONFIG)


def _tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def _same(left: Any, right: Any) -> bool:
    """Whether two sets of layers have the same bits."""
    flat = [[tensor.contiguous().view(torch.int32) for pair in layers for tensor in pair] for layers in (left, right)]
    return all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def _in_memory(model: Any, ids: torch.Tensor, cache: Any, **kwargs: Any) -> Any:
    mask = torch.ones_like(ids)
    return model.generate(
        ids, past_key_values=cache, attention_mask=mask, return_dict_in_generate=True, **GREEDY | kwargs
    )


def test_turns_through_the_store_equal_turns_with_the_cache_in_memory(tmp_path: Path, model: Any) -> None:
    """Three turns; the store is closed and opened after each, so that every prefix comes from disk."""
    ids, memory = _tokens(53), DynamicCache(config=model.config)
    for turn in range(3):
        want = _in_memory(model, ids, memory)
        with _open(tmp_path / "store", model) as store:
            got = generate(model, ids, store=store, session="s", return_dict_in_generate=True, **GREEDY)
            read = store.stats()["counters"].get("get_hit_tokens_disk", 0)
        assert torch.equal(got.sequences, want.sequences)
        assert _same(cache_layers(got.past_key_values), cache_layers(want.past_key_values))
        assert read == (0 if turn == 0 else ids.shape[1] - 8)
        memory = want.past_key_values
        ids = torch.cat([want.sequences, _tokens(7, seed=turn + 1)], 1)


def test_a_resumed_session_is_bit_identical_and_goes_on_the_same(tmp_path: Path, model: Any) -> None:
    with _open(tmp_path / "store", model) as store:
        first = generate(model, _tokens(70), store=store, session="s", return_dict_in_generate=True, **GREEDY)
    ids = torch.cat([first.sequences, _tokens(5, seed=1)], 1)
    with _open(tmp_path / "store", model) as store:
        hit = store.session("s").resume()
        assert hit is not None
        assert store.session("s").tokens.tolist() == first.sequences[0].tolist()  # the last one, too
    assert hit.tokens == first.sequences.shape[1] - 1
    assert _same(hit.layers, cache_layers(first.past_key_values))
    want = _in_memory(model, ids, cache_from_layers(cache_layers(first.past_key_values)))
    got = _in_memory(model, ids, hit.cache())
    assert torch.equal(got.sequences, want.sequences)
    assert _same(cache_layers(got.past_key_values), cache_layers(want.past_key_values))


def test_the_longest_shared_prefix_is_reused_and_at_least_one_token_is_computed(store: KVStore, llama: Any) -> None:
    ids = _tokens(40)
    generate(llama, ids, store=store, **GREEDY)
    before = store.stats()["counters"].get("get_hits", 0)
    again = generate(llama, ids, store=store, return_dict_in_generate=True, **GREEDY)
    split = llama(ids[:, :39], use_cache=True).past_key_values
    assert store.stats()["counters"]["get_hits"] == before + 1
    assert again.sequences.shape == (1, 49)
    assert torch.equal(again.sequences, _in_memory(llama, ids, split).sequences)
    branch = torch.cat([ids[:, :21], _tokens(10, seed=9)], 1)
    assert store.contains(branch[0].tolist()) == 21
    generate(llama, branch, store=store, **GREEDY)
    assert store.contains(branch[0].tolist()) == 31


def test_the_store_says_what_a_call_reused(store: KVStore, llama: Any) -> None:
    ids = _tokens(40)
    generate(llama, ids, store=store, **GREEDY)
    first = store.last_request
    generate(llama, torch.cat([ids[:, :21], _tokens(10, seed=9)], 1), store=store, **GREEDY)
    second = store.last_request
    assert first is not None
    assert second is not None
    assert (first.served, first.prompt_tokens, first.reused_tokens, first.new_tokens) == (True, 40, 0, 48)
    assert (second.served, second.reused_tokens, second.computed_tokens, second.new_tokens) == (True, 21, 10, 39 - 16)
    assert sum(second.tiers.values()) == 21
    assert "another sequence goes on differently" in second.why
    assert 0 < second.get_seconds < second.seconds


def test_a_call_that_is_refused_reports_nothing(store: KVStore, llama: Any) -> None:
    with pytest.raises(IdentityMismatch):
        generate(tiny("llama", seed=1), _tokens(4), store=store)
    assert store.last_request is None


def test_errors_of_the_store_are_raised(tmp_path: Path, llama: Any) -> None:
    _open(tmp_path / "store", llama).close()
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama), read_only=True) as reading:
        with pytest.raises(ReadOnlyStore):
            generate(llama, _tokens(20), store=reading, **GREEDY)
    with pytest.raises(StoreClosed):
        generate(llama, _tokens(20), store=reading, **GREEDY)


def test_a_prompt_of_one_token_works(store: KVStore, llama: Any) -> None:
    out = generate(llama, torch.tensor([[5]]), store=store, **GREEDY)
    assert out.shape == (1, 10)
    assert store.contains(out[0].tolist()) == 9


def test_namespaces_do_not_share_and_a_session_lives_in_its_own(store: KVStore, llama: Any) -> None:
    ids = _tokens(40)
    out = generate(llama, ids, store=store, namespace=b"a", session="s", **GREEDY)
    assert store.contains(out[0].tolist(), namespace=b"a") == 48
    assert store.contains(out[0].tolist(), namespace=b"b") == 0
    assert store.contains(out[0].tolist()) == 0
    assert store.session("s", namespace=b"a").tokens.tolist() == out[0].tolist()
    assert len(store.session("s").tokens) == 0


def test_sampling_with_a_seed_is_the_same_with_and_without_stored_prefix(store: KVStore, llama: Any) -> None:
    ids = _tokens(40)
    sampling: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "top_k": 50}
    split = llama(ids[:, :39], use_cache=True).past_key_values
    store.put(ids[0, :39].tolist(), split)
    torch.manual_seed(3)
    want = _in_memory(llama, ids, cache_from_layers(cache_layers(split)), **sampling).sequences
    torch.manual_seed(3)
    assert torch.equal(generate(llama, ids, store=store, **sampling), want)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"input_ids": torch.zeros(2, 4, dtype=torch.long)}, "attention_mask"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, "input_ids"),
        ({"input_ids": torch.zeros(1, 4)}, "input_ids"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids"),
        ({"input_ids": [[1, 2]]}, "input_ids"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_return_sequences": -2}, "num_return_sequences"),
        ({"num_return_sequences": 2, "session": "s"}, "session"),
        ({"session": ["s", "t"]}, "session"),
        ({"session": 7}, "session: expected a name of its own for each of 1 rows, found 7"),
        ({"session": [7]}, "session: expected a name"),
        ({"use_cache": False}, "use_cache"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "attention_mask: row 0 ends"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "attention_mask: row 0 has padding between"),
        ({"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "attention_mask: row 0 has no tokens"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 1]])}, "attention_mask: expected 0"),
        ({"attention_mask": torch.ones(1, 5)}, r"attention_mask: expected \[1, 4\]"),
        ({"attention_mask": [[1, 1, 1, 1]]}, r"attention_mask: expected \[1, 4\] as input_ids has, found list"),
        ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    store: KVStore, llama: Any, changes: dict[str, Any], named: str
) -> None:
    arguments = {"input_ids": torch.ones(1, 4, dtype=torch.long)} | changes
    with pytest.raises(ValueError, match=f"^{named}"):
        generate(llama, store=store, **arguments)
    assert store.stats()["index"]["tokens"] == 0


def test_a_path_is_neither_a_model_nor_a_store(store: KVStore, llama: Any) -> None:
    with pytest.raises(ConfigError, match="model: expected a loaded transformers model, found 'path'"):
        generate("path", _tokens(4), store=store)
    with pytest.raises(ConfigError, match="store: expected an open KVStore or SharedKVStore, found 'path'"):
        generate(llama, _tokens(4), store="path")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="found AsyncKVStore; give its `store`"):
        generate(llama, _tokens(4), store=AsyncKVStore(store))  # type: ignore[arg-type]


def test_a_model_in_training_mode_is_refused(store: KVStore, llama: Any) -> None:
    with pytest.raises(ValueError, match="training"):
        generate(llama.train(), _tokens(4), store=store)


def test_a_store_of_other_weights_or_another_layout_is_refused(store: KVStore) -> None:
    with pytest.raises(IdentityMismatch, match="weights"):
        generate(tiny("llama", seed=1), _tokens(4), store=store)
    with pytest.raises(IdentityMismatch, match="layout"):
        generate(tiny("qwen3"), _tokens(4), store=store)


def test_a_static_cache_is_cut_to_the_tokens_it_holds(store: KVStore, llama: Any) -> None:
    ids = _tokens(20)
    static = StaticCache(config=llama.config, max_cache_len=64)
    with torch.no_grad():
        llama(ids, past_key_values=static, use_cache=True)
    layers = cache_layers(static)
    assert layers[0][0].shape[-2] == 20
    store.put(ids[0].tolist(), layers)
    kept = [(k.clone(), v.clone()) for k, v in layers]
    for layer in static.layers:  # the caller goes on writing into its buffers
        layer.keys.zero_()
    hit = store.get(ids[0].tolist())
    assert hit is not None
    assert _same(hit.layers, kept)


def test_cache_layers_that_do_not_hold_everything_are_refused_by_name() -> None:
    indexed = DynamicCache(config=DeepseekV32Config())
    with pytest.raises(UnsupportedCache, match="DynamicIndexedLayer"):
        cache_layers(indexed)
    with pytest.raises(UnsupportedCache, match="empty DynamicLayer"):
        cache_layers(DynamicCache(config=tiny("llama").config))
    with pytest.raises(UnsupportedCache, match="no layers"):
        cache_layers(DynamicCache())


def test_a_cache_made_from_layers_shares_them_and_never_writes_into_them(llama: Any) -> None:
    ids = _tokens(12)
    layers = cache_layers(llama(ids, use_cache=True).past_key_values)
    kept = [(k.clone(), v.clone()) for k, v in layers]
    cache = cache_from_layers(layers)
    assert cache.layers[0].keys.data_ptr() == layers[0][0].data_ptr()
    assert cache.get_seq_length() == 12
    with torch.no_grad():
        llama(_tokens(3, seed=1), past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 15
    assert _same(layers, kept)


def test_a_model_of_which_some_tokens_were_trained_meanwhile_is_refused(tmp_path: Path) -> None:
    model, ids = tiny("llama"), _tokens(40)
    with _open(tmp_path, model) as store:
        generate(model, ids, store=store, **GREEDY)
        with torch.no_grad():
            model.get_input_embeddings().weight[5] += 0.5
        with pytest.raises(IdentityMismatch, match=r"computed with other .*rows of its embeddings.* \(\S+\);"):
            generate(model, ids, store=store, **GREEDY)
