"""A store behind a compiled model: about as many graphs as without it, unbroken, and equal answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from attachcases import CONFIG, said, tokens
from tiny_models import tiny
from torch._dynamo.utils import counters

import kvstore
from kvstore import KVStore, ModelIdentity
from kvstore.integrations.transformers import generate
from kvstore.integrations.transformers.around import around, is_compiled

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
# What computing takes is not known of a pass that compiles, so the gate may choose anything.
STORE = replace(CONFIG, gate="off")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts what it compiles."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.count += 1
        forward: Callable[..., Any] = graph.forward
        return forward


def small() -> Any:
    return tiny("llama", num_hidden_layers=1)


def compiled(way: str, graphs: Graphs) -> Any:
    model = small()
    if way == "compile":
        model.compile(backend=graphs)
    else:
        model.forward = torch.compile(model.forward, backend=graphs)
    return model


@pytest.mark.parametrize("way", ["compile", "forward"])
def test_a_store_adds_one_graph_for_several_tokens_behind_a_prefix(way: str, tmp_path: Path) -> None:
    prompts = tokens(50), tokens(50, seed=2)
    fork = torch.cat([prompts[0][:, :30], tokens(9, seed=1)], 1)
    first, second, forked = (small().generate(ids, **GREEDY) for ids in (*prompts, fork))
    alone = Graphs()
    assert torch.equal(compiled(way, alone).generate(prompts[0], **GREEDY), first)
    torch._dynamo.reset()
    graphs = Graphs()
    model = compiled(way, graphs)
    call = vars(model).get("_compiled_call_impl")
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), STORE) as store:
        with kvstore.attach(model, None, store):
            for reused in (0, 49, 49):
                assert torch.equal(model.generate(prompts[0], **GREEDY), first)
                assert said(store).reused_tokens == reused
        for reused in (0, 49):
            assert torch.equal(generate(model, prompts[1], store=store, **GREEDY), second)
            assert said(store).reused_tokens == reused
        assert graphs.count == alone.count
        assert torch.equal(generate(model, fork, store=store, **GREEDY), forked)
        assert said(store).reused_tokens == 30
        assert graphs.count == alone.count + 1
        assert not [name for name, count in store.stats()["counters"].items() if name.startswith("fallback") and count]
    assert not counters["graph_break"]
    assert vars(model).get("_compiled_call_impl") is call


def test_prompts_are_not_scored_and_that_is_counted(tmp_path: Path) -> None:
    graphs = Graphs()
    model = compiled("compile", graphs)
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), replace(STORE, score_prompts=True)) as store:
        generate(model, tokens(20), store=store, **GREEDY)
        assert store.stats()["counters"]["fallback_prompt_not_scored"] == 1
    assert not counters["graph_break"]


def test_a_restored_cache_in_a_compiled_call_grows_unbroken(tmp_path: Path) -> None:
    graphs = Graphs()
    model, prompt = small(), tokens(20)
    want = model.generate(prompt, **GREEDY)
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), STORE) as store:
        generate(model, prompt, store=store, **GREEDY)
        hit = store.get(prompt[0].tolist(), max_tokens=19)
        assert hit is not None
        model.compile(backend=graphs)
        assert torch.equal(model.generate(prompt, past_key_values=hit.cache(), **GREEDY), want)
    assert graphs.count
    assert not counters["graph_break"]


def test_functions_around_a_compiled_call_come_in_order_and_leave() -> None:
    model, seen = torch.nn.Linear(2, 1), list[str]()
    model.compile(backend=Graphs())

    def doubled(_: Any, args: Any, kwargs: Any) -> Any:
        return (args[0] * 2,), kwargs

    def note(name: str) -> Callable[..., None]:
        return lambda _model, _args, _kwargs, _output: seen.append(name)

    given = torch.ones(1, 2)
    want = torch.nn.functional.linear(given * 2, model.weight, model.bias)
    first = around(model, after=note("0"), first=True)
    with around(model, doubled, note("one")), around(model, after=note("two")), first:
        assert torch.allclose(model(given), want)
    assert seen == ["0", "one", "two"]
    model(given)
    assert len(seen) == 3


def test_a_model_that_is_compiled_anew_meanwhile_keeps_its_new_call() -> None:
    model, graphs = torch.nn.Linear(2, 1), Graphs()
    model.compile(backend=Graphs())
    with around(model, after=lambda *_: None):
        model.compile(backend=graphs)
        call = vars(model)["_compiled_call_impl"]
    assert vars(model)["_compiled_call_impl"] is call


def test_any_way_of_compiling_is_noticed() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(2, 1))
    assert not is_compiled(plain)
    assert is_compiled(torch.compile(plain, backend="eager"))
    assert is_compiled(torch.nn.Sequential(torch.compile(plain, backend="eager")))
    plain[0].compile(backend="eager")
    assert is_compiled(plain)
    assert is_compiled(compiled("forward", Graphs()))
