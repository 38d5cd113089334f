"""The integrations tell the gate what passes of a model take, and go on right where it lets less through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from warmupcases import CONFIG

from kvstore import KVStore, ModelIdentity, attach
from kvstore.integrations.transformers import generate, get_or_prefill, warmup

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]])
ANSWER: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
SLOW = [(4096, 1e9), (65536, 1e9)]


def passes(store: KVStore) -> list[tuple[int, int]]:
    """(tokens, tokens before them) of each pass of 8 tokens and more that the gate was told of."""
    cost = store.gate._prefill.get("cpu")
    seen = [] if cost is None else cost.curve.observations()
    return [(int(n), int(pairs / n - n / 2)) for (_, n, pairs), _ in seen]


def test_generate_tells_what_the_rest_of_the_prompt_takes(store: KVStore, llama: Any) -> None:
    answer = generate(llama, PROMPT, store=store, **ANSWER)
    assert passes(store) == [(12, 0)]
    assert len(store.gate._prefill["cpu"].short) == 1  # the answer's second token, for all of them
    generate(llama, torch.cat([answer, PROMPT], dim=1), store=store, **ANSWER)
    assert passes(store) == [(12, 0), (13, 15)]  # the answer's last token was not stored


def test_an_attached_model_tells_it_too(store: KVStore, llama: Any) -> None:
    with attach(llama, None, store):
        llama.generate(PROMPT, **ANSWER)
    assert passes(store) == [(12, 0)]
    llama.generate(PROMPT, **ANSWER)  # no hook is left
    assert passes(store) == [(12, 0)]


def test_warmup_and_get_or_prefill_tell_it(store: KVStore, llama: Any) -> None:
    tokens = PROMPT[0].tolist()
    warmup(store, llama, [tokens[:8]])
    get_or_prefill(store, tokens * 2, llama)
    get_or_prefill(store, tokens * 2, llama)  # nothing is computed
    assert passes(store) == [(8, 0), (16, 8)]


def test_a_batch_tells_nothing_for_it_is_no_single_sequence(store: KVStore, llama: Any) -> None:
    batch = PROMPT.repeat(2, 1) + torch.tensor([[0], [1]])
    generate(llama, batch, store=store, attention_mask=torch.ones_like(batch), **ANSWER)
    assert passes(store) == []


def test_what_is_not_worth_loading_is_computed_with_the_same_answer(tmp_path: Path, llama: Any) -> None:
    plain = llama.generate(PROMPT, **ANSWER)
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama), CONFIG) as store:
        generate(llama, PROMPT, store=store, **ANSWER)
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama), CONFIG) as store:
        store.gate.observe_prefill(1000, 10.0)
        store.gate.check("disk", SLOW)
        with attach(llama, None, store):
            assert torch.equal(llama.generate(PROMPT, **ANSWER), plain)
        report = store.last_request
        assert report is not None
        assert (report.served, report.reused_tokens) == (True, 0)
        assert "expected to take longer than computing it" in report.why
        assert store.stats()["counters"]["short_not_worth"] == 1
