"""`StoreConfig.score_prompts`: the log-probabilities of prompts are the model's, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scorecases import handed_to, logprobs_of, some_tokens
from tiny_models import VOCABULARY, tiny, tiny_of_kind
from transformers import CohereConfig, CohereForCausalLM, DynamicCache, Gemma2Config, Gemma2ForCausalLM

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig, attach
from kvstore.errors import ConfigError
from kvstore.integrations.transformers import generate, get_or_prefill, head, warmup
from kvstore.integrations.transformers.logprobs import Scores, scores_of
from kvstore.trie import UNIFORM_LOGPROB

MIB = 1 << 20
CONFIG = StoreConfig(host=TierConfig(16 * MIB, "raw"), disk=TierConfig(0), block_tokens=16, score_prompts=True)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}


@pytest.fixture
def model(llama: Any) -> Any:
    return llama


def check(model: Any, tokens: list[int], found: np.ndarray, unknown: tuple[int, ...] = (0,)) -> None:
    """They are those of one pass over everything, but for the tokens that no pass scored."""
    ids = torch.tensor([tokens])
    want = np.full(len(tokens), UNIFORM_LOGPROB, np.float32)
    want[1:] = logprobs_of(model, ids)
    want[list(unknown)] = UNIFORM_LOGPROB
    assert found == pytest.approx(want, abs=2e-4)


def models() -> dict[str, Any]:
    """Those whose logits are made in different ways."""
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    bounded = Gemma2Config(**SMALL | heads | {"final_logit_softcapping": 0.5, "layer_types": ["full_attention"] * 2})
    scaled = CohereConfig(**SMALL | heads | {"logit_scale": 4.0})
    return {
        "llama": tiny("llama"),
        "gpt2": tiny("gpt2"),
        "softcap": Gemma2ForCausalLM(bounded).eval(),
        "scale": CohereForCausalLM(scaled).eval(),
        "windows": tiny_of_kind("mistral"),
        "states": tiny_of_kind("qwen3-next"),
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "softcap", "scale", "windows", "states"])
def test_the_whole_prompt_is_scored_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(head, "_LOGITS_BYTES", 7 * 4 * VOCABULARY)
    model = models()[name]
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(model), CONFIG) as store:
        handed = handed_to(store, monkeypatch)
        generate(model, some_tokens(40), store=store, **GREEDY)
        assert not store.stats()["counters"].get("fallback_prompt_not_scored")
    tokens, found = handed[-1]  # of windows and states, the place before the last token of the prompt is put first
    assert [len(tokens) for tokens, _ in handed] == ([39, 44] if name in ("windows", "states") else [44])
    check(model, tokens, found)
    hooks = [module for module in model.modules() if module._forward_hooks]
    assert not hooks


def test_behind_a_stored_prefix_only_the_first_token_is_not_scored(
    model: Any, store: KVStore, handed: list[tuple[list[int], Any]]
) -> None:
    first = generate(model, some_tokens(20), store=store, **GREEDY)
    generate(model, torch.cat([first, some_tokens(9, seed=1)], 1), store=store, prefill_chunk_size=4, **GREEDY)
    tokens, found = handed[-1]
    assert found[:25].tolist() == pytest.approx([UNIFORM_LOGPROB] * 25)
    check(model, tokens, found, unknown=tuple(range(25)))


def test_answers_and_caches_are_the_same_as_without(tmp_path: Path, model: Any) -> None:
    found = []
    for scored in (True, False):
        config = replace(CONFIG, score_prompts=scored)
        with KVStore(tmp_path / str(scored), ModelIdentity.from_transformers(model), config) as store:
            out = generate(model, some_tokens(40), store=store, **GREEDY)
            hit = store.get(out[0])
            assert hit is not None
            found.append((out, hit.layers))
    assert torch.equal(found[0][0], found[1][0])
    assert all(
        torch.equal(a, b) for x, y in zip(found[0][1], found[1][1], strict=True) for a, b in zip(x, y, strict=True)
    )


def test_batches_are_scored_row_by_row(model: Any, store: KVStore, handed: list[tuple[list[int], Any]]) -> None:
    generate(model, some_tokens(18, seed=3)[:, :12], store=store, **GREEDY)
    handed.clear()
    rows = [some_tokens(30, seed=2), some_tokens(18, seed=3), some_tokens(25, seed=4)]
    ids, mask = torch.zeros(3, 30, dtype=torch.int64), torch.zeros(3, 30, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, 30 - row.shape[1] :], mask[number, 30 - row.shape[1] :] = row[0], 1
    generate(model, ids, store=store, attention_mask=mask, **GREEDY)
    for row, (tokens, found) in zip(rows, handed, strict=True):
        known = 12 if row.shape[1] == 18 else 0  # stored tokens have no logits, nor has the first one behind them
        last = row.shape[1] - 1  # the logits for it are of a pass of another cache
        check(model, tokens, found, unknown=(*range(known + 1), last))


def test_an_attached_model_stores_the_prompt_with_them(
    model: Any, store: KVStore, handed: list[tuple[list[int], Any]]
) -> None:
    with attach(model, None, store):
        model.generate(some_tokens(20), **GREEDY)
    prompt, answer = handed
    assert (len(prompt[0]), len(answer[0])) == (20, 24)
    check(model, *prompt)
    check(model, *answer)


def test_prefills_and_warmups_score_too(model: Any, store: KVStore, handed: list[tuple[list[int], Any]]) -> None:
    get_or_prefill(store, some_tokens(33), model, chunk=10)
    check(model, *handed[0])
    handed.clear()
    shared = some_tokens(20, seed=6)[0].tolist()
    prompts = [shared + some_tokens(15, seed=seed)[0].tolist() for seed in (7, 8)]
    warmup(store, model, prompts)
    assert sorted(len(tokens) for tokens, _ in handed) == [20, 35, 35]
    for tokens, found in handed:
        check(model, tokens, found, unknown=tuple(range(21)) if len(tokens) == 35 else (0,))


def test_a_model_that_makes_its_logits_in_another_way_is_counted_and_not_scored(
    model: Any, store: KVStore, handed: list[tuple[list[int], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_finish", lambda config: lambda logits: logits.flip(-1))
    generate(model, some_tokens(20), store=store, **GREEDY)
    assert handed[0][1][:20].tolist() == pytest.approx([UNIFORM_LOGPROB] * 20)
    assert handed[0][1][20] > UNIFORM_LOGPROB
    assert store.stats()["counters"]["fallback_prompt_not_scored"] == 1


def test_a_pass_with_another_cache_leaves_nothing(model: Any, store: KVStore) -> None:
    cache, ids = DynamicCache(config=model.config), some_tokens(6)
    with torch.no_grad(), Scores(model, cache, store) as scores:
        assert scores_of(cache) is scores
        model(ids[:, :3], past_key_values=cache, logits_to_keep=1)
        model(some_tokens(9, seed=5), past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
        model(ids[:, 3:], past_key_values=cache, logits_to_keep=2)
    assert scores_of(cache) is None
    check(model, ids[0].tolist(), scores.logprobs(6))


def test_the_setting_is_true_or_false() -> None:
    assert StoreConfig.from_env({"KVSTORE_SCORE_PROMPTS": "1"}).score_prompts
    with pytest.raises(ConfigError, match="score_prompts"):
        StoreConfig(score_prompts=1)  # type: ignore[arg-type]
