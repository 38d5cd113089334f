"""A store behind `model.generate`: the same answers, what was reused, and no answer is lost because of the store."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attachcases import CONFIG, GREEDY, said, tokens
from threadruns import run_together
from tiny_models import tiny
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import kvstore
from kvstore import ConfigError, IdentityMismatch, KVStore, ModelIdentity, ReadOnlyStore
from kvstore.core.results import RequestReport
from kvstore.integrations.transformers import generate


@pytest.fixture
def store(tmp_path: Path, llama: Any) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama), CONFIG) as opened:
        yield opened
    kvstore.detach(llama)


def fork_of(prompt: torch.Tensor) -> torch.Tensor:
    return torch.cat([prompt[:, :-4], tokens(6, seed=9)], 1)


def test_generate_of_the_model_itself_reuses_and_stores(tmp_path: Path, model: Any) -> None:
    prompt = tokens(70)
    second = fork_of(prompt)
    want = [model.generate(ids, **GREEDY) for ids in (prompt, second)]
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), CONFIG) as store, kvstore.attach(model, None, store):
        got = [model.generate(ids, **GREEDY) for ids in (prompt, second)]
        report = said(store)
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
    assert (report.prompt_tokens, report.reused_tokens, report.computed_tokens) == (72, 66, 6)
    assert report.served
    assert sum(report.tiers.values()) == 66
    assert "another sequence goes on differently" in report.why


def test_every_way_to_name_the_prompt_is_served(store: KVStore, llama: Any) -> None:
    prompt, mask = tokens(20), torch.ones(1, 20, dtype=torch.int64)
    want = llama.generate(prompt, **GREEDY)
    with kvstore.attach(llama, None, store):
        for arguments, options in (
            ((prompt,), {}),
            ((), {"input_ids": prompt}),
            ((), {"inputs": prompt, "attention_mask": mask}),
            ((), {"input_ids": prompt, "attention_mask": mask, "assistant_model": None}),
        ):
            assert torch.equal(llama.generate(*arguments, **options, **GREEDY), want)
            assert said(store).served, said(store).why
        output = llama.generate(prompt, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(output.sequences, want)


def test_a_batch_is_served_row_by_row(store: KVStore, llama: Any) -> None:
    rows = torch.cat([tokens(30), tokens(30, seed=1)])
    mask = torch.ones_like(rows)
    mask[1, :7] = 0
    rows[1, :7] = 0
    want = llama.generate(rows, attention_mask=mask, **GREEDY)
    with kvstore.attach(llama, None, store):
        for reused in (0, 29 + 22):
            assert torch.equal(llama.generate(rows, attention_mask=mask, **GREEDY), want)
            assert said(store).reused_tokens == reused
            assert said(store).prompt_tokens == 30 + 23
        llama.generate(tokens(30), num_beams=2, **GREEDY)
        assert said(store).served
        assert said(store).reused_tokens == 29


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
        ({"use_cache": False}, "use_cache"),
        ({"past_key_values": "new"}, "past_key_values"),
        ({"position_ids": torch.arange(20)[None]}, "position_ids"),
        ({"inputs_embeds": torch.zeros(1, 20, 48)}, "not a tensor of token ids"),
    ],
)
def test_what_cannot_be_served_runs_as_before(options: dict[str, Any], why: str, store: KVStore, llama: Any) -> None:
    prompt: Any = {} if "inputs_embeds" in options else {"input_ids": tokens(20)}

    def given() -> dict[str, Any]:  # a cache is changed by the call
        made = {"past_key_values": DynamicCache(config=llama.config)} if "past_key_values" in options else options
        return {**prompt, **made, **GREEDY}

    want = llama.generate(**given())
    with kvstore.attach(llama, None, store):
        got = llama.generate(**given())
    assert torch.equal(want, got)
    assert not said(store).served
    assert why in said(store).why
    assert store.stats()["counters"]["fallback_not_served"] == 1
    assert len(store) == 0


def test_a_prompt_that_may_be_padded_runs_as_before(store: KVStore, tmp_path: Path) -> None:
    model = tiny("llama", pad_token_id=7, eos_token_id=3)
    prompt = torch.cat([torch.full((1, 4), 7), tokens(12)], 1)
    want = model.generate(prompt, **GREEDY)
    with KVStore(tmp_path / "other", ModelIdentity.from_transformers(model), CONFIG) as other:
        with kvstore.attach(model, None, other):
            assert torch.equal(model.generate(prompt, **GREEDY), want)
        assert "attention_mask" in said(other).why


def test_an_error_of_the_model_is_its_own_and_comes_once(store: KVStore, llama: Any) -> None:
    calls = []

    class Refuses(BaseStreamer):
        def put(self, value: Any) -> None:
            calls.append(value)
            raise ValueError("the reader is gone")

        def end(self) -> None: ...

    with kvstore.attach(llama, None, store), pytest.raises(ValueError, match="the reader is gone"):
        llama.generate(tokens(20), streamer=Refuses(), **GREEDY)
    assert len(calls) == 1
    assert "fallback_not_served" not in store.stats()["counters"]


def test_an_answer_that_is_broken_off_keeps_its_prompt(store: KVStore, llama: Any) -> None:
    prompt = tokens(40)

    class Stop(StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
            if ids.shape[1] > 42:
                raise KeyboardInterrupt
            return torch.zeros(len(ids), dtype=torch.bool)

    with kvstore.attach(llama, None, store):
        with pytest.raises(KeyboardInterrupt):
            llama.generate(prompt, stopping_criteria=StoppingCriteriaList([Stop()]), **GREEDY)
        assert prompt in store
        assert said(store).new_tokens == 40
        llama.generate(prompt, **GREEDY)
        assert said(store).reused_tokens == 39


def test_tokens_are_streamed_as_they_come(store: KVStore, llama: Any) -> None:
    class Collects(BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.reshape(-1).tolist()

        def end(self) -> None: ...

    prompt, streamer = tokens(20), Collects()
    with kvstore.attach(llama, None, store):
        for _ in range(2):
            streamer.seen = []
            answer = llama.generate(prompt, streamer=streamer, **GREEDY)
            assert streamer.seen == answer[0].tolist()


def test_a_store_that_is_closed_meanwhile_loses_no_answer(store: KVStore, llama: Any) -> None:
    prompt = tokens(20)
    want = llama.generate(prompt, **GREEDY)

    class Closes(StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
            store.close()
            return torch.zeros(len(ids), dtype=torch.bool)

    with kvstore.attach(llama, None, store):
        closing = llama.generate(prompt, stopping_criteria=StoppingCriteriaList([Closes()]), **GREEDY)
        assert torch.equal(closing, want)
        assert store.metrics.snapshot()["fallback_answer_not_stored"] == 1
        assert torch.equal(llama.generate(prompt, **GREEDY), want)


def test_namespace_session_ttl_and_pin_pass_through(store: KVStore, llama: Any) -> None:
    with kvstore.attach(llama, None, store, namespace=b"a", pin=True) as attached:
        llama.generate(tokens(20), **GREEDY)
        llama.generate(tokens(21, seed=1), session="alice", ttl=1e6, pin=False, **GREEDY)
        with attached.using(namespace=b"b", session="bob", pin=False):
            llama.generate(tokens(22, seed=2), **GREEDY)
        llama.generate(tokens(23, seed=3), **GREEDY)
    found = {each.tokens[0].item(): each for each in store.inventory().sequences}
    first = [int(tokens(n, seed=s)[0, 0]) for s, n in enumerate((20, 21, 22, 23))]
    assert [found[ids].pinned for ids in first] == [True, False, False, True]
    assert [found[ids].expires > 0 for ids in first] == [False, True, False, False]
    assert store.session("alice", namespace=b"a").exists
    assert len(store.session("bob", namespace=b"b").tokens) == 27


def test_threads_share_a_model_and_each_hears_of_its_own(store: KVStore, llama: Any) -> None:
    heard: dict[int, list[int]] = {}
    prompts = [tokens(30 + number, seed=number) for number in range(4)]
    want = [llama.generate(prompt, **GREEDY) for prompt in prompts]
    got: dict[int, Any] = {}

    def serve(number: int) -> None:
        for _ in range(2):
            got[number] = llama.generate(prompts[number], **GREEDY)

    def hear(report: RequestReport) -> None:
        heard.setdefault(report.prompt_tokens, []).append(report.reused_tokens)

    with kvstore.attach(llama, None, store, on_request=hear):
        run_together(*(partial(serve, number) for number in range(4)))
    assert all(torch.equal(got[number], want[number]) for number in range(4))
    # By the prompt: a thread that begins after another one ended may have its number.
    assert {count: sorted(reused) for count, reused in heard.items()} == {30 + n: [0, 29 + n] for n in range(4)}


@pytest.mark.parametrize("same", [True, False], ids=["same store", "another store"])
def test_generate_of_the_package_with_an_attached_model_reads_and_stores_once(
    same: bool, store: KVStore, tmp_path: Path, llama: Any
) -> None:
    prompt, heard = tokens(40), list[RequestReport]()
    want = llama.generate(prompt, **GREEDY)
    with KVStore(tmp_path / "other", store.identity, CONFIG) as other, kvstore.attach(llama, None, store):
        given = store if same else other
        for reused, new in ((0, 44), (39, 0)):
            assert torch.equal(generate(llama, prompt, store=given, **GREEDY), want)
            heard.append(said(given))
            assert (heard[-1].served, heard[-1].reused_tokens, heard[-1].new_tokens) == (True, reused, new)
        assert "fallback_not_served" not in store.stats()["counters"]
        assert given.stats()["counters"]["get_hits"] == 1
        if not same:
            assert store.last_request is None
            assert len(store) == 0
        llama.generate(prompt, **GREEDY)
        assert said(store).reused_tokens == (39 if same else 0)


def test_generate_of_the_package_inside_an_attached_call_is_a_request_of_its_own(
    store: KVStore, tmp_path: Path, llama: Any
) -> None:
    with KVStore(tmp_path / "other", store.identity, CONFIG) as other:

        class Asks(StoppingCriteria):
            def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
                if other.last_request is None:
                    generate(llama, tokens(30, seed=1), store=other, **GREEDY)
                return torch.zeros(len(ids), dtype=torch.bool)

        with kvstore.attach(llama, None, store):
            llama.generate(tokens(20), stopping_criteria=StoppingCriteriaList([Asks()]), **GREEDY)
        assert (said(other).prompt_tokens, said(other).new_tokens) == (30, 34)
    assert (said(store).served, said(store).prompt_tokens) == (True, 20)
    assert store.contains(tokens(20)[0]) == 20


def test_detach_gives_the_model_back(store: KVStore, llama: Any) -> None:
    attached = kvstore.attach(llama, None, store)
    with pytest.raises(ValueError, match="attached to it already"):
        kvstore.attach(llama, None, store)
    assert kvstore.detach(llama)
    assert not kvstore.detach(llama)
    attached.detach()
    assert "generate" not in vars(llama)
    assert not llama._forward_hooks
    llama.generate(tokens(20), **GREEDY)
    assert store.last_request is None


def test_what_is_said_last_is_of_the_outer_call(store: KVStore, llama: Any) -> None:
    """Assisted decoding calls the assistant's own `generate`, which here is the attached one."""
    said: list[Any] = []
    with kvstore.attach(llama, None, store, on_request=said.append):
        llama.generate(tokens(20), assistant_model=llama, **GREEDY)
    assert len(said) > 1
    assert store.last_request is said[-1]
    assert "assistant_model" in said[-1].why


def test_another_models_store_is_refused(store: KVStore) -> None:
    with pytest.raises(IdentityMismatch, match="another identity"):
        kvstore.attach(tiny("llama", seed=5), None, store)
    with pytest.raises(ConfigError, match=r"store: expected an open KVStore or SharedKVStore, found 'path'; open one"):
        kvstore.attach(tiny("llama"), None, "path")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no generate"):
        kvstore.attach(object(), None, store)


def test_weights_that_change_while_attached_are_noticed(store: KVStore, llama: Any) -> None:
    prompt = tokens(20)
    with kvstore.attach(llama, None, store):
        llama.generate(prompt, **GREEDY)
        with torch.no_grad():
            llama.model.norm.weight.mul_(2.0)
        llama.generate(prompt, **GREEDY)
        assert not said(store).served
        assert "IdentityMismatch" in said(store).why


def test_a_closed_store_did_not_serve(store: KVStore, llama: Any) -> None:
    prompt = tokens(20)
    want = llama.generate(prompt, **GREEDY)
    with kvstore.attach(llama, None, store):
        llama.generate(prompt, **GREEDY)
        store.close()
        for ids in (prompt, prompt[:, :1], torch.cat([prompt, prompt])):
            mask = torch.ones_like(ids)
            assert torch.equal(llama.generate(ids, attention_mask=mask, **GREEDY)[0], want[0]) or ids.shape[1] == 1
            report = said(store)
            assert (report.served, report.why) == (False, "the store is closed; open it again")
            assert (report.prompt_tokens, report.computed_tokens) == (ids.numel(), ids.numel())
    assert store.metrics.snapshot()["fallback_not_served"] == 3


def test_what_is_not_served_has_its_true_number_of_tokens(store: KVStore, llama: Any) -> None:
    ids = torch.cat([tokens(12), tokens(12, seed=1)])
    right = torch.ones_like(ids)
    right[1, 8:] = 0
    marked = tokens(12, seed=2)
    marked[0, :3] = 0
    with kvstore.attach(llama, None, store):
        for count, given, options in (
            (20, ids, {"attention_mask": right}),
            (12 - 3, marked, {"pad_token_id": 0}),
            (12, tokens(12), {"prompt_lookup_num_tokens": 2}),
            (24, ids, {}),  # a batch without a mask
        ):
            llama.generate(given, **GREEDY, **options)
            report = said(store)
            assert (report.served, report.prompt_tokens, report.computed_tokens) == (False, count, count), report.why


@pytest.mark.parametrize("session", [None, "alice"])
def test_a_store_that_is_only_read_serves_and_warns_of_nothing(
    store: KVStore, llama: Any, session: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, other = tokens(40), tokens(30, seed=5)
    with kvstore.attach(llama, None, store):
        want = llama.generate(prompt, **GREEDY)
    store.close()
    caplog.set_level("INFO")
    with KVStore(store.path, store.identity, CONFIG, read_only=True) as reader:
        with kvstore.attach(llama, None, reader, session=session):
            assert torch.equal(llama.generate(prompt, **GREEDY), want)
            assert (said(reader).served, said(reader).reused_tokens, said(reader).new_tokens) == (True, 39, 0)
            llama.generate(other, **GREEDY)
            assert (said(reader).served, said(reader).reused_tokens) == (True, 0)
        assert not [name for name in reader.metrics.snapshot() if name.startswith("fallback_")]
        with pytest.raises(ReadOnlyStore):  # who names the store hears of it
            generate(llama, other, store=reader, **GREEDY)
    (line,) = [each for each in caplog.records if each.name == "kvstore.attach"]
    assert (line.levelname, "the store is read only: answers are not stored" in line.getMessage()) == ("INFO", True)
