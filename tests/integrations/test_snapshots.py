"""Places in a prompt from which a model with windows or states goes on: before its last token, and `state_every`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny, tiny_of_kind
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
WINDOWS = ("gemma3", "mistral", "gpt-oss", "llama4")


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def cut_like_the_store(model: Any, prompt: torch.Tensor, every: int) -> torch.Tensor:
    """What the model itself answers if the prompt is computed in pieces that end at every so many tokens (0: none), and
    before its last token."""
    cache = DynamicCache(config=model.config)
    argument = cache_name(model)
    with torch.no_grad():
        last = prompt.shape[1] - 1
        ends = [*(range(every, last, every) if every else ()), last, last + 1]
        for begin, end in pairwise([0, *ends]):
            logits = model(prompt[:, begin:end], **{argument: cache}, use_cache=True).logits
        for _ in range(4):
            prompt = torch.cat([prompt, logits[:, -1:].argmax(-1)], 1)
            logits = model(prompt[:, -1:], **{argument: cache}, use_cache=True).logits
    return prompt


@pytest.mark.parametrize("name", [*KINDS, *WINDOWS])
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
        reason = Reason.NO_STATE if name in KINDS else Reason.NO_WINDOW
        assert (why.tokens, why.reason) == (256, reason)
        hit = store.get(other[0, :300].tolist())
        assert hit is not None
        assert (hit.tokens, hit.reason) == (256, reason)
        answer = generate(model, other, store=store, **GREEDY)
        assert store.stats()["counters"]["get_hit_tokens_disk"] == 512
        assert [store.contains(other[0, :end].tolist()) for end in (319, 320, 399)] == [256, 320, 399]
    assert torch.equal(answer, cut_like_the_store(model, other, 64))


def test_without_the_setting_the_last_token_of_a_prompt_and_the_end_of_an_answer_are_places(tmp_path: Path) -> None:
    model = tiny_of_kind("qwen3-next")
    config = replace(CONFIG, state_every=0)
    first = tokens(200)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), config) as store:
        answer = generate(model, first, store=store, **GREEDY)
        assert [store.contains(first[0, :end].tolist()) for end in (198, 199, 200)] == [0, 199, 199]
        assert store.contains(answer[0].tolist()) == 203


def test_models_of_full_attention_are_computed_at_once(tmp_path: Path) -> None:
    model = tiny("llama")
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
    assert lengths[:4] == [48, 16, 35, 1]


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
            assert (store.last_request.served, store.last_request.reused_tokens) == (True, 149)
        assert torch.equal(answers[0], answers[1])
        assert [store.contains(first[0, :end].tolist()) for end in (63, 64, 127, 128, 150)] == [0, 64, 64, 128, 149]


@pytest.mark.parametrize("name", [*KINDS, *WINDOWS])
@pytest.mark.parametrize("is_attached", [True, False], ids=["attach", "generate"])
def test_the_same_prompt_again_computes_its_last_token_alone(name: str, is_attached: bool, tmp_path: Path) -> None:
    model = tiny_of_kind(name)
    prompt = tokens(200)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), replace(CONFIG, state_every=0)) as store:
        with attach(model, None, store) if is_attached else nullcontext():
            how = GREEDY if is_attached else {"store": store, **GREEDY}
            run = model.generate if is_attached else partial(generate, model)
            for reused in (0, 199, 199):
                answer = run(prompt, **how)
                assert store.last_request is not None
                assert store.last_request.reused_tokens == reused
                assert torch.equal(answer, cut_like_the_store(model, prompt, 0))
            turn = torch.cat([answer, tokens(9, seed=1)], 1)
            run(turn, **how)
            assert store.last_request.reused_tokens == answer.shape[1] - 1
        assert store.check(deep=True).ok


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_an_answer_that_is_broken_off_keeps_its_prompt(name: str, tmp_path: Path) -> None:
    model = tiny_of_kind(name)
    prompt = tokens(60)

    def broken(*_: Any) -> bool:
        raise KeyboardInterrupt

    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store, attach(model, None, store):
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompt, stopping_criteria=[broken], **GREEDY)
        assert store.contains(prompt[0].tolist()) == 59


@pytest.mark.parametrize("count", [1, 2, 20])
def test_prompts_that_are_shorter_than_a_window_are_served_again(count: int, tmp_path: Path) -> None:
    model = tiny_of_kind("gemma3")
    prompt = tokens(count)
    want = model.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        for reused in (0, count - 1):
            assert torch.equal(generate(model, prompt, store=store, **GREEDY), want)
            assert store.last_request is not None
            assert store.last_request.reused_tokens == reused


@pytest.mark.parametrize(("count", "pieces"), [(20, [20, 1]), (30, [29, 1])])
def test_a_prompt_is_computed_at_once_where_the_window_holds_its_answer_too(
    count: int, pieces: list[int], tmp_path: Path
) -> None:
    model, lengths = tiny_of_kind("gemma3"), list[int]()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append((args[0] if args else kwargs["input_ids"]).shape[1]), with_kwargs=True
    )
    with KVStore(tmp_path / "s", ModelIdentity.from_transformers(model), CONFIG) as store:
        generate(model, tokens(count), store=store, **GREEDY)
    assert lengths[:2] == pieces
