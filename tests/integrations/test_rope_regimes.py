"""Rotary types in `generate`, `put` and `get`: each is exact, and keys of one regime never stand in for the other's.

The tiny models were "first trained on" 64 tokens: from 65 on, longrope has other frequencies; dynamic may have from 64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.errors import ConfigError, IdentityMismatch, UnsupportedLength, UnsupportedModel
from kvstore.integrations.transformers import cache_layers, generate, put_batch
from kvstore.integrations.transformers.recompute import recompute

MIB, FIRST = 1 << 20, 64
CONFIG = StoreConfig(
    host=TierConfig(16 * MIB, "raw"), disk=TierConfig(16 * MIB, "zstd"), segment_bytes=MIB, block_tokens=16
)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": FIRST,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": FIRST,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": FIRST},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "longrope": _LONGROPE,
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def model_of(kind: str, **changes: Any) -> Any:
    most = FIRST if kind == "dynamic" else 512
    parameters = {"rope_theta": 10000.0} | ROPES[kind]
    return tiny("llama", rope_parameters=parameters, **{"max_position_embeddings": most} | changes)


def phi3() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "num_hidden_layers": 2}
    limits = {"max_position_embeddings": 512, "original_max_position_embeddings": FIRST, "num_key_value_heads": 3}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
    rope = {"rope_theta": 10000.0} | _LONGROPE
    return Phi3ForCausalLM(Phi3Config(vocab_size=VOCABULARY, rope_parameters=rope, **sizes, **limits, **ends)).eval()


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values


def same(left: Any, right: Any, rows: int | None = None) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a[..., :rows, :], b[..., :rows, :]) for x, y in pairs for a, b in zip(x, y, strict=True))


def opened(path: Path, model: Any, regime: str = "short") -> KVStore:
    return KVStore(path / regime, ModelIdentity.from_transformers(model, regime=regime), CONFIG)


@pytest.mark.parametrize("kind", ROPES)
def test_turns_of_every_type_equal_turns_with_the_cache_in_memory(tmp_path: Path, kind: str) -> None:
    model, ids, memory = model_of(kind), tokens_of(21), DynamicCache()
    for turn in range(3):
        given = {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, **GREEDY}
        want = model.generate(ids, past_key_values=memory, **given)
        with opened(tmp_path, model) as store:
            got = generate(model, ids, store=store, return_dict_in_generate=True, **GREEDY)
            assert store.stats()["counters"].get("get_hit_tokens_disk", 0) == (ids.shape[1] - 8 if turn else 0)
        assert torch.equal(got.sequences, want.sequences)
        assert same(cache_layers(got.past_key_values), cache_layers(want.past_key_values))
        memory, ids = want.past_key_values, torch.cat([want.sequences, tokens_of(7, turn + 1)], 1)


@pytest.mark.parametrize("make", [lambda: model_of("longrope"), phi3], ids=["llama", "phi3"])
@pytest.mark.parametrize("prompt", [FIRST + 1, 90])
def test_long_sequences_have_a_store_of_their_own(tmp_path: Path, make: Any, prompt: int) -> None:
    model, ids = make(), tokens_of(prompt)
    want = model.generate(ids, **GREEDY)
    with opened(tmp_path, model, "long") as store:
        assert torch.equal(generate(model, ids, store=store, **GREEDY), want)
        assert store.contains(want[0]) == prompt + 8
    ids = torch.cat([want, tokens_of(5, 1)], 1)
    want = model.generate(ids, **GREEDY)
    with opened(tmp_path, model, "long") as store:
        hit = store.get(ids[0])
        assert hit is not None
        assert hit.tokens == prompt + 8
        assert same(hit.layers, cache_layers(prefilled(model, ids[:, :prompt])), prompt)
        got = generate(model, ids, store=store, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(got.sequences, want)


@pytest.mark.parametrize("make", [lambda: model_of("longrope"), phi3], ids=["llama", "phi3"])
@pytest.mark.parametrize("prompt", [50, FIRST - 4, FIRST])
def test_of_an_answer_that_grows_beyond_only_short_keys_are_stored(tmp_path: Path, make: Any, prompt: int) -> None:
    model, ids = make(), tokens_of(prompt)
    want = model.generate(ids, **GREEDY | {"max_new_tokens": 30, "min_new_tokens": 30})
    with opened(tmp_path, model) as store:
        got = generate(model, ids, store=store, session="s", **GREEDY | {"max_new_tokens": 30, "min_new_tokens": 30})
        assert torch.equal(got, want)
        assert store.contains(got[0]) == len(store.session("s").tokens) == FIRST
        hit = store.get(got[0, :FIRST])
        assert hit is not None
        assert hit.tokens == FIRST
        assert same(hit.layers, cache_layers(prefilled(model, ids)), prompt)
        for call in (lambda: store.get(got[0]), lambda: generate(model, got, store=store)):
            with pytest.raises(UnsupportedLength, match="regime='long'"):
                call()
        # From a hit in the short store, what would be computed anyway.
        again = generate(model, ids, store=store, **GREEDY | {"max_new_tokens": 30, "min_new_tokens": 30})
        assert torch.equal(again, want)


def test_dynamic_stores_nothing_beyond_its_first_length(tmp_path: Path) -> None:
    model, ids = model_of("dynamic"), tokens_of(50)
    more = GREEDY | {"max_new_tokens": 30, "min_new_tokens": 30}
    want = model.generate(ids, **more)
    with opened(tmp_path, model) as store:
        assert torch.equal(generate(model, ids, store=store, **more), want)
        assert store.contains(want[0]) == FIRST - 1
        hit = store.get(want[0, : FIRST - 1])
        assert hit is not None
        assert same(hit.layers, cache_layers(prefilled(model, ids)), 50)
        assert torch.equal(generate(model, ids, store=store, **more), want)
        for count in (FIRST, 70):
            with pytest.raises(UnsupportedLength, match="dynamic"):
                store.get(want[0, :count])
            with pytest.raises(UnsupportedLength, match="dynamic"):
                store.put(want[0, :count], prefilled(model, want[:, :count]))
    with pytest.raises(UnsupportedModel, match="dynamic"):
        ModelIdentity.from_transformers(model, regime="long")


def test_caches_of_the_other_regime_are_refused_before_anything_changes(tmp_path: Path) -> None:
    model = model_of("longrope")
    short, long = tokens_of(FIRST), tokens_of(FIRST + 1)
    for regime, good, bad in (("short", short, long), ("long", long, short)):
        with opened(tmp_path, model, regime) as store:
            with pytest.raises(UnsupportedLength, match="longrope"):
                store.put(bad[0], prefilled(model, bad))
            with pytest.raises(UnsupportedLength, match="longrope"):
                store.session("s").save(bad[0], prefilled(model, bad))
            with pytest.raises(UnsupportedLength, match="longrope"):
                store.get(bad[0])
            assert store.contains(bad[0]) == 0
            assert store.put(good[0], prefilled(model, good)).tokens == good.shape[1]
            assert store.get(good[0]) is not None
    with pytest.raises(IdentityMismatch):
        KVStore(tmp_path / "short", ModelIdentity.from_transformers(model, regime="long"), CONFIG)


def test_the_length_that_counts_is_that_of_the_whole_prompt(tmp_path: Path) -> None:
    """One token more, and the prefix that is stored has other keys."""
    model, ids = model_of("longrope"), tokens_of(FIRST + 1)
    with opened(tmp_path, model) as store:
        store.put(ids[0, :FIRST], prefilled(model, ids[:, :FIRST]))
        with pytest.raises(UnsupportedLength):
            store.get(ids[0], max_tokens=FIRST)
        with pytest.raises(UnsupportedLength):
            generate(model, ids, store=store, **GREEDY)
    with opened(tmp_path, model, "long") as store:
        store.put(ids[0], prefilled(model, ids))
        hit = store.get(ids[0], max_tokens=FIRST)
        assert hit is not None
        assert hit.tokens == FIRST


def test_pieces_of_long_prompts_are_refused(tmp_path: Path) -> None:
    model = model_of("longrope")
    with opened(tmp_path, model, "long") as store, pytest.raises(ValueError, match="prefill_chunk_size"):
        generate(model, tokens_of(90), store=store, prefill_chunk_size=32, **GREEDY)


def test_single_positions_of_long_sequences_are_not_recomputed() -> None:
    model, ids = model_of("longrope"), tokens_of(FIRST + 1)
    with pytest.raises(UnsupportedLength):
        recompute(model, prefilled(model, ids), ids[0].tolist(), positions=[3])
    cache = prefilled(model, ids[:, :FIRST])
    assert recompute(model, cache, ids[0, :FIRST].tolist(), positions=[3]).deviation.errors.max() < 1e-9


def test_the_identity_is_the_same_whatever_length_a_model_computed_last() -> None:
    for kind in ("longrope", "dynamic"):
        model = model_of(kind)
        before = ModelIdentity.from_transformers(model)
        for count in (90, 20):
            prefilled(model, tokens_of(count))
            assert ModelIdentity.from_transformers(model) == before
        with torch.no_grad():  # what is not made anew in every pass counts
            model.model.rotary_emb.original_inv_freq.mul_(1.5)
        assert ModelIdentity.from_transformers(model) != before


def test_another_regime_is_an_error() -> None:
    with pytest.raises(ConfigError, match="regime"):
        ModelIdentity.from_transformers(model_of("longrope"), regime="medium")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_of_a_batch_that_grows_too_long_only_short_keys_are_stored(tmp_path: Path, kind: str) -> None:
    """The longest row decides by which angles all rows of a pass are rotated."""
    model, most = model_of(kind), FIRST - (kind == "dynamic")
    ids, mask = torch.cat([tokens_of(60), tokens_of(60, seed=1)]), torch.ones(2, 60, dtype=torch.int64)
    mask[1, :20] = 0
    with opened(tmp_path / "store", model) as store:
        out = generate(model, ids, store=store, attention_mask=mask, **GREEDY)
        for row, begin in ((0, 0), (1, 20)):
            tokens = out[row, begin:most]
            hit = store.get(tokens.tolist())
            assert hit is not None
            assert hit.tokens == store.contains(out[row, begin:].tolist()) == most - begin
            for pair, other in zip(hit.layers, cache_layers(prefilled(model, tokens[None])), strict=True):
                torch.testing.assert_close(pair, other, atol=2e-5, rtol=1e-4)


def test_batches_of_long_sequences_are_refused_by_name(tmp_path: Path) -> None:
    model = model_of("longrope")
    ids = torch.cat([tokens_of(80), tokens_of(80, seed=1)])
    with opened(tmp_path / "store", model, "long") as store:
        with pytest.raises(UnsupportedModel, match=r"^batches: keys of long sequences"):
            generate(model, ids, store=store, attention_mask=torch.ones_like(ids), **GREEDY)
        mask = torch.ones_like(ids)
        mask[1, :30] = 0
        with pytest.raises(UnsupportedLength):
            generate(model, ids, store=store, attention_mask=mask, **GREEDY)
        assert store.stats()["index"]["tokens"] == 0


def test_put_batch_stores_nothing_of_a_batch_whose_longest_row_is_too_long(tmp_path: Path) -> None:
    """The shorter row's keys were computed when the longest one had become too long, and nobody can see it."""
    model, ids = model_of("longrope"), torch.cat([tokens_of(FIRST + 1, seed=1), tokens_of(FIRST + 1)])
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    cache = prefilled(model, ids)
    with opened(tmp_path, model) as store:
        with pytest.raises(UnsupportedLength, match="longrope"):
            put_batch(store, ids, cache, attention_mask=mask)
        assert store.stats()["index"]["tokens"] == 0
