"""The log-probabilities that `generate` hands to the store are the model's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scorecases import logprobs_of, some_tokens
from tiny_models import VOCABULARY, tiny
from transformers import DynamicCache

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.core.keys import namespace_digest
from kvstore.integrations.transformers import generate
from kvstore.integrations.transformers import logprobs as logprobs_module
from kvstore.integrations.transformers.logprobs import Scores
from kvstore.trie import UNIFORM_LOGPROB

MIB = 1 << 20
CONFIG = StoreConfig(host=TierConfig(16 * MIB, "raw"), disk=TierConfig(0), block_tokens=16)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}


@pytest.fixture
def model(llama: Any) -> Any:
    return llama


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-full"])
def test_the_answer_is_scored_and_the_prompt_is_not(tmp_path: Path, name: str) -> None:
    model = tiny(name)
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(model), CONFIG) as store:
        out = generate(model, some_tokens(20), store=store, **GREEDY)
        want = logprobs_of(model, out)[:-1]  # the last token is not in the cache
        match = store._residency.index.match(namespace_digest(b""), out[0, :-1].numpy().astype(np.uint32))
    assert match.depth == 28
    assert match.bits == pytest.approx(20 * 16 - want[19:].sum() / np.log(2), rel=1e-4)


def test_each_token_has_its_own(model: Any, store: KVStore, handed: list[tuple[list[int], Any]]) -> None:
    out = generate(model, some_tokens(20), store=store, **GREEDY)
    assert handed[0][1].dtype == np.float32
    assert handed[0][1][:20].tolist() == pytest.approx([UNIFORM_LOGPROB] * 20)
    assert handed[0][1][20:] == pytest.approx(logprobs_of(model, out)[19:-1], abs=1e-4)
    assert len(set(handed[0][1][20:].tolist())) > 4


def test_after_a_hit_and_in_a_session_the_places_are_right(
    model: Any, store: KVStore, handed: list[tuple[list[int], Any]]
) -> None:
    first = generate(model, some_tokens(20), store=store, session="s", **GREEDY)
    ids = torch.cat([first, some_tokens(7, seed=1)], 1)
    out = generate(model, ids, store=store, session="s", **GREEDY)
    n = ids.shape[1]
    assert len(handed[1][1]) == out.shape[1] - 1
    assert handed[1][1][:n].tolist() == pytest.approx([UNIFORM_LOGPROB] * n)
    assert handed[1][1][n:] == pytest.approx(logprobs_of(model, out)[n - 1 : -1], abs=1e-4)


@pytest.mark.parametrize("size", [1, 3 * 4 * VOCABULARY, 1 << 20])
def test_where_the_model_computes_the_logits_of_the_prompt_that_is_scored_too(
    model: Any, store: KVStore, handed: list[tuple[list[int], Any]], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(logprobs_module, "CPU_BYTES", size)
    monkeypatch.setattr(model, "_supports_logits_to_keep", lambda: False)
    out = generate(model, some_tokens(20), store=store, **GREEDY)
    assert handed[0][1][0] == pytest.approx(UNIFORM_LOGPROB)
    assert handed[0][1][1:] == pytest.approx(logprobs_of(model, out)[:-1], abs=1e-4)


def test_passes_with_other_caches_are_not_looked_at_and_the_hook_goes(model: Any) -> None:
    cache, ids = DynamicCache(config=model.config), some_tokens(6)
    with torch.no_grad(), Scores(model, cache) as scores:
        model(ids[:, :3], past_key_values=cache)
        model(some_tokens(9, seed=5), past_key_values=DynamicCache(config=model.config))
        model(ids[:, 3:], past_key_values=cache)
    assert scores.logprobs(6)[1:] == pytest.approx(logprobs_of(model, ids), abs=1e-4)
    assert not model._forward_hooks


def test_what_no_pass_scored_or_came_out_as_no_number_is_uniform() -> None:
    class Stub(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, past_key_values: Any) -> Any:
            past_key_values.length += input_ids.shape[1]
            logits = torch.zeros(1, input_ids.shape[1], 4)
            logits[0, 1] = float("nan")
            logits[0, 2, 0] = -float("inf")
            return SimpleNamespace(logits=logits)

    class Counted:
        length = 0

        def get_seq_length(self) -> int:
            return self.length

    cache, model = Counted(), Stub()
    with Scores(model, cache) as scores:
        assert scores.logprobs(2).tolist() == pytest.approx([UNIFORM_LOGPROB] * 2)
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64), past_key_values=cache)
    found = scores.logprobs(4)
    assert found.tolist() == pytest.approx([UNIFORM_LOGPROB, np.log(0.25), UNIFORM_LOGPROB, -np.inf])
    assert scores.logprobs(2).tolist() == found[:2].tolist()
