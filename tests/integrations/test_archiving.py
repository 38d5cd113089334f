"""Archives of a model's sequences: bit for bit the same cache, or a miss that is counted; never other bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny, tiny_of_kind
from transformers import DynamicCache

from kvstore import KVStore, ModelIdentity
from kvstore.codecs.tokens.archive import Archive, Pass
from kvstore.errors import CodecError, IdentityMismatch, LayoutMismatch, UnsupportedModel
from kvstore.integrations.transformers import Passes, archive, generate, restore, restore_session

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}


def _tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def _answered(model: Any, count: int = 31) -> tuple[list[int], Any, tuple[Pass, ...]]:
    """Tokens, their cache and its passes, of a prompt and its answer."""
    ids = _tokens(count)
    with Passes(model) as passes:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **GREEDY)
    return out.sequences[0, :-1].tolist(), out.past_key_values, passes.found


def _same(left: Any, right: Any) -> bool:
    pairs = zip(left.layers, right.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


@pytest.mark.parametrize("by_model", [True, False])
def test_a_prompt_and_its_answer_come_back_bit_for_bit(model: Any, by_model: bool) -> None:
    tokens, cache, passes = _answered(model)
    found = restore(model, archive(model, tokens, cache, passes, by_model=by_model))
    assert found.tokens.tolist() == tokens
    assert _same(found.cache, cache)


def test_turns_through_a_store_are_archived_and_go_on_the_same(tmp_path: Path, llama: Any) -> None:
    ids, watch = _tokens(40), Passes(llama)
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama)) as store:
        for turn in range(2):
            with watch:
                out = generate(llama, ids, store=store, session="a", return_dict_in_generate=True, **GREEDY)
            ids = torch.cat([out.sequences, _tokens(6, turn + 1)], 1)
        assert [each.kept for each in watch.found if each.kept > 1] == [40, 7]
        data = archive(llama, out.sequences[0, :-1], out.past_key_values, watch.found)
    want = llama.generate(ids, past_key_values=out.past_key_values, attention_mask=torch.ones_like(ids), **GREEDY)
    with KVStore(tmp_path / "other", ModelIdentity.from_transformers(llama)) as store:
        assert restore_session(llama, store, "a", data) is not None
        assert store.session("a").tokens.tolist() == out.sequences[0, :-1].tolist()
        assert torch.equal(generate(llama, ids, store=store, session="a", **GREEDY), want)
        assert store.stats()["counters"]["archive_hits"] == 1


def test_rows_that_were_computed_again_are_in_the_later_pass(llama: Any) -> None:
    ids = _tokens(24)[0]
    with torch.no_grad(), Passes(llama) as passes:
        cache = llama(ids[None], use_cache=True).past_key_values
        cache.crop(-8)
        llama(ids[None, 16:], past_key_values=cache)
    assert passes.found == (Pass(16, 24), Pass(8, 8))
    assert _same(restore(llama, archive(llama, ids, cache, passes.found, by_model=False)).cache, cache)


def test_passes_of_several_rows_are_forgotten(llama: Any) -> None:
    with torch.no_grad(), Passes(llama) as passes:
        llama(_tokens(8).repeat(2, 1), use_cache=True)
    assert passes.found == ()


def test_a_cache_that_the_passes_do_not_give_is_not_archived(llama: Any) -> None:
    tokens, cache, _ = _answered(llama)
    with torch.no_grad():
        cache.layers[1].keys[0, 0, 3, 2] += 1
    with pytest.raises(CodecError, match="does not give this cache"):
        archive(llama, tokens, cache, by_model=False)
    with pytest.raises(LayoutMismatch):
        archive(llama, tokens[:-1], cache, by_model=False)
    with pytest.raises(ValueError, match="at least one"):
        archive(llama, [], cache)
    with pytest.raises(ValueError, match="vocabulary of 199"):
        archive(llama, [VOCABULARY] * len(tokens), cache)


@pytest.mark.parametrize("by_model", [True, False])
def test_one_weight_changed_is_a_counted_miss(tmp_path: Path, llama: Any, by_model: bool) -> None:
    """Of a matrix that the fingerprint of weights samples too thinly to see it."""
    tokens, cache, passes = _answered(llama)
    data = archive(llama, tokens, cache, passes, by_model=by_model)
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama)) as store:
        with torch.no_grad():
            llama.model.layers[1].self_attn.v_proj.weight[3, 5] += 1
        assert restore_session(llama, store, "a", data) is None
        assert store.stats()["counters"]["archive_misses"] == 1
        assert not store.session("a").exists
    with pytest.raises((CodecError, IdentityMismatch)):
        restore(llama, data)


def test_another_model_and_other_bytes_are_misses(tmp_path: Path, llama: Any) -> None:
    tokens, cache, passes = _answered(llama)
    data = archive(llama, tokens, cache, passes)
    with pytest.raises(IdentityMismatch):
        restore(tiny("llama", seed=1), data)
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama)) as store:
        for at in range(0, len(data), 5):
            damaged = bytearray(data)
            damaged[at] ^= 1
            assert restore_session(llama, store, "a", bytes(damaged)) is None
        assert store.stats()["counters"]["archive_misses"] == len(range(0, len(data), 5))


def test_wrong_passes_and_too_long_ones_are_told(llama: Any) -> None:
    tokens, cache, passes = _answered(llama)
    found = Archive.parse(archive(llama, tokens, cache, passes, by_model=False))
    for wrong in ((Pass(found.count, 1 << 20),), tuple([Pass(1, 1)] * 600)):
        changed = Archive(**vars(found) | {"passes": wrong})
        with pytest.raises(CodecError):
            restore(llama, changed.pack())


def test_layers_with_windows_and_training_are_refused(llama: Any) -> None:
    with pytest.raises(UnsupportedModel, match="windows"):
        archive(tiny_of_kind("gemma3"), [1], DynamicCache())
    with pytest.raises(ValueError, match="training"):
        archive(llama.train(), [1], DynamicCache())
