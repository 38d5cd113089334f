"""An attached model in the hands of programs that raise, close, detach and call again in the middle of an answer."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attachcases import CONFIG, GREEDY, said, tokens
from threadruns import run_together
from tiny_models import tiny
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import kvstore
from kvstore import KVStore, ModelIdentity
from kvstore.core.results import RequestReport


@pytest.fixture
def store(tmp_path: Path, llama: Any) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama), CONFIG) as opened:
        yield opened
    kvstore.detach(llama)


class Streamer(BaseStreamer):
    """Calls a function with every token, beginning with the prompt."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def put(self, value: Any) -> None:
        self._call()

    def end(self) -> None: ...


def test_an_error_of_on_request_is_logged_and_loses_no_answer(
    store: KVStore, llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    want = llama.generate(tokens(20), **GREEDY)

    def fail(_report: RequestReport) -> None:
        raise RuntimeError("the caller's own")

    with kvstore.attach(llama, None, store, on_request=fail), caplog.at_level(logging.ERROR, "kvstore"):
        assert torch.equal(llama.generate(tokens(20), **GREEDY), want)
    assert "on_request failed" in caplog.text
    assert "the caller's own" in caplog.text


def test_on_request_may_detach_and_close(store: KVStore, llama: Any) -> None:
    want = llama.generate(tokens(20), **GREEDY)
    kvstore.attach(llama, None, store, on_request=lambda _: (kvstore.detach(llama), store.close()))
    for _ in range(2):
        assert torch.equal(llama.generate(tokens(20), **GREEDY), want)
    assert "generate" not in vars(llama)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_answer_that_raises_keeps_its_prompt_and_the_next_one_is_served(
    error: type[BaseException], store: KVStore, llama: Any
) -> None:
    class Fails(StoppingCriteria):
        def __call__(self, *_args: Any, **_options: Any) -> Any:
            raise error("gone")

    with kvstore.attach(llama, None, store) as attached:
        with pytest.raises(error):
            llama.generate(tokens(20), stopping_criteria=StoppingCriteriaList([Fails()]), **GREEDY)
        assert store.contains(tokens(20)) == 20
        assert attached._thread.request is None
        llama.generate(tokens(20), **GREEDY)
        assert said(store).reused_tokens == 19


@pytest.mark.parametrize("does", ["close", "detach"])
def test_a_streamer_may_end_it_all(does: str, store: KVStore, llama: Any) -> None:
    want = llama.generate(tokens(20), **GREEDY)
    kvstore.attach(llama, None, store)
    end = {"close": store.close, "detach": lambda: kvstore.detach(llama)}[does]
    assert torch.equal(llama.generate(tokens(20), streamer=Streamer(end), **GREEDY), want)
    assert torch.equal(llama.generate(tokens(20), **GREEDY), want)


def test_a_call_from_inside_another_is_a_request_of_its_own(store: KVStore, llama: Any) -> None:
    """Options and all. The prompt of the outer one is stored although the inner one ends first."""
    inner, outer = tokens(16, seed=1), tokens(20)
    want = [llama.generate(ids, **GREEDY) for ids in (inner, outer)]
    heard, got, streams = [], [], []

    def again() -> None:
        if len(streams) < 2:
            streams.append(len(streams))
            got.append(llama.generate(inner, session="alice", **GREEDY))

    with kvstore.attach(llama, None, store, on_request=lambda report: heard.append(report)):
        got.append(llama.generate(outer, streamer=Streamer(again), **GREEDY))
    assert all(torch.equal(mine, its) for mine, its in zip(got, [want[0], want[0], want[1]], strict=True))
    assert [(report.prompt_tokens, report.reused_tokens) for report in heard] == [(16, 0), (16, 15), (20, 0)]
    assert store.session("alice").exists
    assert store.contains(outer) == 20
    assert store.check(deep=True).ok


def test_one_of_many_threads_attaches(store: KVStore, llama: Any) -> None:
    barrier, refused = threading.Barrier(6), []

    def attach() -> None:
        barrier.wait()
        try:
            kvstore.attach(llama, None, store)
        except ValueError as error:
            refused.append(str(error))

    run_together(*[attach] * 6)
    assert len(refused) == 5
    kvstore.detach(llama)
    assert not llama._forward_hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": -1}, "ttl: expected"),
        ({"ttl": "soon"}, "ttl: expected"),
        ({"namespace": 5}, "namespace: expected text or bytes"),
        ({"session": 7}, "session: expected text"),
        ({"session": ""}, "session: expected 1 to 400 bytes"),
    ],
)
def test_malformed_options_are_refused_before_anything_is_computed(
    options: dict[str, Any], message: str, store: KVStore, llama: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        kvstore.attach(llama, None, store, **options)
    with pytest.raises(ValueError, match="on_request: expected a function"):
        kvstore.attach(llama, None, store, on_request="me")  # type: ignore[arg-type]
    assert "generate" not in vars(llama)
    with kvstore.attach(llama, None, store) as attached:
        with pytest.raises(ValueError, match=message):
            llama.generate(tokens(20), **options, **GREEDY)
        with pytest.raises(ValueError, match=message), attached.using(**options):
            pass
        assert len(store) == 0


def test_an_attached_model_is_not_copied_and_is_freed_when_nobody_holds_it(tmp_path: Path) -> None:
    model = tiny("llama")
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), CONFIG) as store:
        kvstore.attach(model, None, store)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="detach"):
                copied(model)
        model.generate(tokens(20), **GREEDY)
        gone = weakref.ref(model)
        del model, copied
        gc.collect()
        assert gone() is None
