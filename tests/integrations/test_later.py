"""Caches whose layers come while the model runs: the same answers, and no wrong token if a layer is lost on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attachcases import CONFIG, GREEDY, said, tokens
from tiny_models import tiny
from transformers.generation.streamers import BaseStreamer

import kvstore
from kvstore import KVStore, ModelIdentity
from kvstore.codecs.zstd import ZstdCodec
from kvstore.core.cache_argument import given_cache
from kvstore.integrations.transformers import generate, generation, later
from kvstore.integrations.transformers.lazy_layer import LazyLayer


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "pays", lambda *_: True)


@pytest.fixture
def spoilt(tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[KVStore, torch.Tensor]]:
    """A store with a prompt whose second block has a damaged last layer under right checksums; and the prompt."""
    prompt, encode = tokens(70), ZstdCodec.encode

    def damaging(codec: Any, info: Any, view: Any, out: memoryview) -> Any:
        sizes = encode(codec, info, view, out)
        if sizes is not None and info.start == CONFIG.block_tokens:
            end = sum(sizes)
            out[end - sizes[-1] : end] = b"\xff" * sizes[-1]
        return sizes

    identity = ModelIdentity.from_transformers(llama)
    with monkeypatch.context() as spoiling, KVStore(tmp_path / "store", identity, CONFIG) as store:
        spoiling.setattr(ZstdCodec, "encode", damaging)
        generate(llama, prompt, store=store, **GREEDY)
        store.flush()
    with KVStore(tmp_path / "store", identity, CONFIG) as store:
        yield store, prompt
    kvstore.detach(llama)


def test_the_first_pass_meets_layers_that_wait(tmp_path: Path, llama: Any) -> None:
    prompt, kinds = tokens(70), []
    with KVStore(tmp_path, ModelIdentity.from_transformers(llama), CONFIG) as store:
        want = generate(llama, prompt, store=store, **GREEDY)
        store.flush()

        def look(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            kinds.append({type(layer) for layer in given_cache(kwargs).layers})

        hook = llama.register_forward_pre_hook(look, with_kwargs=True)
        try:
            got = generate(llama, prompt, store=store, **GREEDY)
        finally:
            hook.remove()
    assert torch.equal(got, want)
    assert kinds[0] == {LazyLayer}
    assert all(LazyLayer not in each for each in kinds[1:])


def test_answers_are_those_of_layers_that_come_at_once(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, answers = tokens(70), []
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), CONFIG) as store:
        generate(model, prompt[:, :40], store=store, **GREEDY)
        for number, lazy in enumerate((True, False)):
            monkeypatch.setattr(generation, "pays", lambda *_, lazy=lazy: lazy)
            answers.append(generate(model, prompt, store=store, session=f"s{number}", **GREEDY))
    assert torch.equal(*answers)


@pytest.mark.parametrize("options", [{}, {"output_hidden_states": True, "return_dict_in_generate": True}])
def test_a_lost_layer_is_computed_and_no_token_is_wrong(
    spoilt: tuple[KVStore, torch.Tensor], llama: Any, options: dict[str, Any]
) -> None:
    store, prompt = spoilt
    want = llama.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY, **options)
    got = generate(llama, prompt, store=store, **GREEDY, **options)
    counters = store.stats()["counters"]
    assert (counters["fallback_layer_lost"], counters["damaged_codec"]) == (1, 1)
    if options:
        assert [len(each) for each in got.hidden_states] == [len(each) for each in want.hidden_states]
        assert got.hidden_states[0][0].shape[1] == 1
        want, got = want.sequences, got.sequences
    assert torch.equal(got, want)
    assert store.contains(got[0]) == got.shape[1] - 1  # stored anew
    assert torch.equal(generate(llama, prompt, store=store, **GREEDY), want)
    assert store.stats()["counters"]["fallback_layer_lost"] == 1
    assert store.check().problems == ()


def test_an_attached_model_says_what_was_reused_in_the_end(spoilt: tuple[KVStore, torch.Tensor], llama: Any) -> None:
    store, prompt = spoilt
    streamed: list[torch.Tensor] = []

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            streamed.append(value.flatten())

        def end(self) -> None: ...

    want = llama.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    with kvstore.attach(llama, None, store):
        got = llama.generate(prompt, streamer=Streamer(), **GREEDY)
        report = said(store)
    assert torch.equal(got, want)
    assert torch.equal(torch.cat(streamed), want[0])
    assert (report.reused_tokens, report.computed_tokens) == (CONFIG.block_tokens, 70 - CONFIG.block_tokens)


def test_a_layer_lost_after_the_store_was_closed_is_computed(spoilt: tuple[KVStore, torch.Tensor], llama: Any) -> None:
    store, prompt = spoilt
    want = llama.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)

    def close(*_: Any) -> None:
        store.close()

    hook = llama.register_forward_pre_hook(close)
    try:
        with kvstore.attach(llama, None, store):
            got = llama.generate(prompt, **GREEDY)
            assert said(store).reused_tokens == 0
    finally:
        hook.remove()
    assert torch.equal(got, want)


def test_layers_come_later_only_where_a_processor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), CONFIG) as store:
        enough = later.LEAST_BYTES // store.identity.layout.bytes_per_token + 1
        for processors, threads, wanted in ((3, 1, True), (2, 1, True), (2, 2, False), (8, 4, True), (1, 1, False)):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: set(range(count)))
            monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
            assert later.pays(model, store, enough) is wanted
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert not later.pays(model, store, enough // 2)
        assert not later.pays(torch.compile(model, backend="eager"), store, enough)
