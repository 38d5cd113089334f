"""`StoreConfig.state_every`: places in the middle of a prompt from which a model with states goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_of_kind
from transformers import DynamicCache

from kvstore import KVStore, ModelIdentity, Reason, StoreConfig, TierConfig, attach
from kvstore.core.cache_argument import cache_name
from kvstore.errors import ConfigError
from kvstore.integrations.transformers import generate

CONFIG = StoreConfig(
    host=TierConfig(0), disk=TierConfig(256 << 20, "entropy"), segment_bytes=4 << 20, block_tokens=16, state_every=64
)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
KINDS = ("mamba2", "qwen3-next", "falcon-h1")


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def cut_like_the_store(model: Any, prompt: torch.Tensor, every: int) -> torch.Tensor:
    """What the model itself answers if the prompt is computed in pieces that end at every so many tokens."""
    cache = DynamicCache(config=model.config)
    argument = cache_name(model)
    with torch.no_grad():
        for begin in range(0, prompt.shape[1] - 1, every):
            end = min(begin + every, prompt.shape[1])
            logits = model(prompt[:, begin:end], **{argument: cache}, use_cache=True).logits
        for _ in range(4):
            prompt = torch.cat([prompt, logits[:, -1:].argmax(-1)], 1)
            logits = model(prompt[:, -1:], **{argument: cache}, use_cache=True).logits
    return prompt


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_that_shares_300_of_400_tokens_goes_on_from_the_last_place_below_300(
    name: str, tmp_path: Path
) -> None:
    model = tiny_of_kind(name)
    identity = ModelIdentity.from_transformers(model)
    first = tokens(400)
    other = torch.cat([first[:, :300], tokens(100, seed=1)], 1)
    with KVStore(tmp_path / "s", identity, CONFIG) as store:
        generate(model, first, store=store, **GREEDY)
    with KVStore(tmp_path / "s", identity, CONFIG) as store:
        assert store.contains(other[0].tolist()) == 256
        why = store.explain(other[0, :300].tolist())
        assert (why.tokens, why.reason) == (256, Reason.NO_STATE)
        hit = store.get(other[0, :300].tolist())
        assert hit is not None
        assert (hit.tokens, hit.reason) == (256, Reason.NO_STATE)
        answer = generate(model, other, store=store, **GREEDY)
        assert store.stats()["counters"]["get_hit_tokens_disk"] == 512
        assert [store.contains(other[0, :end].tolist()) for end in (319, 320, 400)] == [256, 320, 384]
    assert torch.equal(answer, cut_like_the_store(model, other, 64))


def test_without_the_setting_only_the_end_of_an_answer_is_a_place(tmp_path: Path) -> None:
    model = tiny_of_kind("qwen3-next")
    config = replace(CONFIG, state_every=0)
    first = tokens(200)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), config) as store:
        answer = generate(model, first, store=store, **GREEDY)
        assert store.contains(first[0].tolist()) == 0
        assert store.contains(answer[0].tolist()) == 203


def test_models_without_states_are_computed_as_before(tmp_path: Path) -> None:
    model = tiny_of_kind("mistral")
    first = tokens(200)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        answer = generate(model, first, store=store, **GREEDY)
        assert store.stats()["counters"]["put_tokens"] == 203
    assert torch.equal(answer, model.generate(first, attention_mask=torch.ones_like(first), **GREEDY))


def test_a_piece_is_cut_by_prefill_chunk_size_too(tmp_path: Path) -> None:
    model = tiny_of_kind("falcon-h1")
    first = tokens(100)
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append((args[0] if args else kwargs["input_ids"]).shape[1]), with_kwargs=True
    )
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        generate(model, first, store=store, prefill_chunk_size=48, **GREEDY)
    assert lengths[:3] == [48, 16, 36]


@pytest.mark.parametrize("every", [-1, 1.5, True, 1 << 31])
def test_the_setting_is_checked(every: Any) -> None:
    with pytest.raises(ConfigError, match="state_every"):
        StoreConfig(state_every=every)


@pytest.mark.parametrize("name", KINDS)
def test_an_attached_model_stores_its_places_too(name: str, tmp_path: Path) -> None:
    model = tiny_of_kind(name)
    first = tokens(150)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        with attach(model, None, store):
            answers = [model.generate(first, attention_mask=torch.ones_like(first), **GREEDY) for _ in range(2)]
            assert store.last_request is not None
            assert (store.last_request.served, store.last_request.reused_tokens) == (True, 128)
        assert torch.equal(answers[0], answers[1])
        assert [store.contains(first[0, :end].tolist()) for end in (63, 64, 127, 128, 149)] == [0, 64, 64, 128, 128]
