"""Finding 1: what is active and merged is part of a model's identity, and `generate` notices when it changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adaptercases import CONFIG, GREEDY, PROMPT, keys, weights
from lora_layers import LoraLinear, activate, with_adapters
from tiny_models import tiny

from kvstore import KVStore, ModelIdentity
from kvstore.errors import IdentityMismatch, UnsupportedModel
from kvstore.integrations.transformers import generate
from kvstore.integrations.transformers.watch import identity_now


@pytest.fixture
def adapted() -> tuple[Any, list[LoraLinear]]:
    model = tiny("llama")
    layers = with_adapters(model, a=10, b=20)
    activate(layers, "a")
    return model, layers


# ---- the identity ------------------------------------------------------------------------------------------------


def test_two_adapters_of_one_model_have_two_identities(adapted: tuple[Any, list[LoraLinear]]) -> None:
    model, layers = adapted
    first, its_keys = weights(model), keys(model)
    activate(layers, "b")
    assert not torch.equal(keys(model), its_keys)
    assert weights(model) != first
    activate(layers, "a")
    assert weights(model) == first
    activate(layers, "a", "b")
    both = weights(model)
    activate(layers, "b", "a")
    assert len({first, both, weights(model)}) == 3  # sums of another order differ in the last bit


def test_without_active_adapters_the_model_is_the_one_without_adapters(adapted: tuple[Any, list[LoraLinear]]) -> None:
    model, layers = adapted
    plain = tiny("llama")
    for change in (lambda: activate(layers), lambda: [setattr(x, "_disable_adapters", True) for x in layers]):
        activate(layers, "a")
        assert weights(model) != weights(plain)
        change()
        assert weights(model) == weights(plain)
        assert torch.equal(keys(model), keys(plain))


def test_names_of_adapters_and_adapters_that_are_only_loaded_do_not_count() -> None:
    model, other = tiny("llama"), tiny("llama")
    activate(with_adapters(model, a=10), "a")
    layers = with_adapters(other, b=20, same=10)
    activate(layers, "same")
    assert torch.equal(keys(model), keys(other))
    assert weights(model) == weights(other)


def test_the_scaling_of_one_layer_changes_the_identity(adapted: tuple[Any, list[LoraLinear]]) -> None:
    model, layers = adapted
    before = weights(model)
    layers[2].scaling["b"] = 2.0  # not active
    assert weights(model) == before
    layers[2].scaling["a"] = 2.0
    assert weights(model) != before


def test_merged_adapters_are_in_the_weights(adapted: tuple[Any, list[LoraLinear]]) -> None:
    model, layers = adapted
    active, plain = weights(model), weights(tiny("llama"))
    for layer in layers:
        layer.merge()
    merged = weights(model)
    assert len({active, plain, merged}) == 3
    unwrapped = tiny("llama")
    for to, layer in zip(with_adapters(unwrapped), layers, strict=True):
        to.base_layer.load_state_dict(layer.base_layer.state_dict())
    assert weights(unwrapped) == merged  # merged and unloaded
    for layer in layers:
        layer._disable_adapters = True
    assert weights(model) not in (merged, plain)  # the next pass takes them out again, not to the last bit


class Gate(torch.nn.Module):
    """What a library may do that has nothing in common with peft."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.strength, self.on = inner, 0.5, True
        self.shift = torch.tensor([1.0])  # no parameter and no buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.strength + self.shift if self.on else self.inner(x)


@pytest.mark.parametrize("change", [("strength", 0.25), ("on", False), ("shift", torch.tensor([2.0]))])
def test_numbers_of_modules_that_nobody_knows_are_part_of_the_identity(change: tuple[str, Any]) -> None:
    model = tiny("llama")
    plain = weights(model)
    gate = Gate(model.model.layers[0].self_attn.v_proj)
    model.model.layers[0].self_attn.v_proj = gate
    before = weights(model)
    assert before != plain
    setattr(gate, *change)
    assert weights(model) != before


@pytest.mark.parametrize(
    "config",
    [{"is_prompt_learning": True}, {"alora_invocation_tokens": [1, 2]}, {"peft_type": "XLORA"}],
    ids=["soft prompts", "activated", "mixture"],
)
def test_adapters_whose_caches_do_not_follow_from_token_ids_are_refused(config: dict[str, Any]) -> None:
    model = tiny("llama")
    model.peft_config = {"mine": SimpleNamespace(**config)}
    with pytest.raises(UnsupportedModel, match="adapter 'mine'"):
        ModelIdentity.from_transformers(model)


# ---- generate ----------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path: Path, adapted: tuple[Any, list[LoraLinear]]) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(adapted[0]), CONFIG) as store:
        generate(adapted[0], PROMPT, store=store, **GREEDY)
        yield store


def _edit(model: Any, layers: list[LoraLinear]) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def _edit_unseen(model: Any, layers: list[LoraLinear]) -> None:
    """As peft merges, and as moving averages are swapped in: torch counts no version."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    before = weight._version
    weight.data.mul_(1.5)
    assert weight._version == before


def _load(model: Any, layers: list[LoraLinear]) -> None:
    other = tiny("llama", seed=5)
    activate(with_adapters(other, a=10, b=20), "a")
    model.load_state_dict(other.state_dict())


def _replace(model: Any, layers: list[LoraLinear]) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach() * 2)


def _swap_config(model: Any, layers: list[LoraLinear]) -> None:
    model.config = type(model.config)(**{**model.config.to_dict(), "rms_norm_eps": 0.5})


CHANGES: dict[str, tuple[Callable[[Any, list[LoraLinear]], Any], str]] = {
    "another adapter": (lambda model, layers: activate(layers, "b"), "adapters"),
    "adapters off": (lambda model, layers: [setattr(x, "_disable_adapters", True) for x in layers], "adapters"),
    "scaling": (lambda model, layers: layers[0].scaling.update(a=3.0), "adapters"),
    "merge": (lambda model, layers: [x.merge() for x in layers], "weights"),
    "in place": (_edit, "weights"),
    "through data": (_edit_unseen, "weights"),
    "load_state_dict": (_load, "weights"),
    "another parameter": (_replace, "weights"),
    "dtype": (lambda model, layers: model.to(torch.bfloat16), "layout"),
    "config field": (lambda model, layers: setattr(model.config, "rms_norm_eps", 0.5), "config"),
    "config": (_swap_config, "config"),
    "a layer": (lambda model, layers: setattr(model.model.layers[1].self_attn, "q_proj", layers[0]), "weights"),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_generate_notices_a_change_between_calls(
    opened: KVStore, adapted: tuple[Any, list[LoraLinear]], change: str
) -> None:
    function, named = CHANGES[change]
    before = opened.stats()["counters"].get("put_tokens", 0)
    function(*adapted)
    with pytest.raises(IdentityMismatch, match=f"other .*{named}|{named} is"):
        generate(adapted[0], PROMPT, store=opened, **GREEDY)
    assert opened.stats()["counters"].get("put_tokens", 0) == before


def test_a_model_that_is_set_back_finds_its_cache_again(opened: KVStore, adapted: tuple[Any, list[LoraLinear]]) -> None:
    model, layers = adapted
    activate(layers, "b")
    with pytest.raises(IdentityMismatch, match="other active adapters"):
        generate(model, PROMPT, store=opened, **GREEDY)
    activate(layers, "a")
    generate(model, PROMPT, store=opened, **GREEDY)
    assert opened.stats()["counters"]["get_hits"] == 1


def test_what_changes_nothing_is_no_change(opened: KVStore, adapted: tuple[Any, list[LoraLinear]]) -> None:
    model, _ = adapted
    with torch.no_grad():
        model.model.norm.weight.mul_(1.0)  # another version, the same values
    model.load_state_dict(model.state_dict())
    model.requires_grad_(False)
    model.config.use_cache = False
    model.config.use_cache = True
    with_adapters(model, c=30)  # loaded, not active
    generate(model, PROMPT, store=opened, **GREEDY)
    assert opened.stats()["counters"]["get_hits"] == 1


def test_a_model_that_changes_during_a_call_leaves_nothing_behind(
    opened: KVStore, adapted: tuple[Any, list[LoraLinear]]
) -> None:
    model, layers = adapted
    other = PROMPT.flip(1)

    def switch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        activate(layers, "b")
        return scores

    out = generate(model, other, store=opened, logits_processor=[switch], **GREEDY)
    assert out.shape == (1, 27)
    assert opened.contains(other[0]) == 0
    assert opened.stats()["counters"]["fallback_model_changed"] == 1


def test_looking_does_not_keep_weights_alive() -> None:
    model = tiny("llama")
    identity_now(model)
    weight = weakref.ref(model.model.norm.weight)
    whole = weakref.ref(model)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(48))
    assert weight() is None
    del model
    gc.collect()
    assert whole() is None
