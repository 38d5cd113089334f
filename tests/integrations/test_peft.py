"""Finding 1 with peft itself, and with transformers' own adapters, which are peft's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adaptercases import CONFIG, GREEDY, PROMPT, keys, weights
from tiny_models import tiny

from kvstore import KVStore, ModelIdentity
from kvstore.errors import IdentityMismatch, UnsupportedModel
from kvstore.integrations.transformers import generate

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:`is_gradient_ch:FutureWarning")


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | changes)


def wrapped(**changes: Any) -> Any:
    """A model with the adapters "one", active, and "two"."""
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny("llama"), lora(**changes), adapter_name="one")
    torch.manual_seed(4)
    model.add_adapter("two", lora(**changes))
    return model.eval()


def states(model: Any) -> dict[str, tuple[str, torch.Tensor]]:
    """Identity and keys in every state that the calls of peft bring a model into."""
    found = {"a": (weights(model), keys(model))}
    model.set_adapter("two")
    found["b"] = weights(model), keys(model)
    with model.disable_adapter():
        found["off"] = weights(model), keys(model)
    model.set_adapter("one")
    found["a again"] = weights(model), keys(model)
    model.merge_adapter()
    found["merged"] = weights(model), keys(model)
    return found


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"use_rslora": True}, {"target_modules": ["k_proj"]}])
def test_keys_change_only_with_the_identity(changes: dict[str, Any]) -> None:
    found = states(wrapped(**changes))
    found["plain"] = weights(tiny("llama")), keys(tiny("llama"))
    for one, its_keys in found.values():
        for other, other_keys in found.values():
            assert one != other or torch.equal(its_keys, other_keys)
    assert found["a"][0] == found["a again"][0]
    assert found["off"][0] == found["plain"][0]
    assert len({one for one, _ in found.values()}) == 4


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "OFTConfig", "VeraConfig", "LNTuningConfig"])
def test_other_kinds_of_adapters_are_seen_too(kind: str) -> None:
    targets = {"target_modules": ["input_layernorm"] if kind == "LNTuningConfig" else ["k_proj", "v_proj"]}
    if kind == "IA3Config":
        targets["feedforward_modules"] = []
    if kind == "OFTConfig":
        targets |= {"oft_block_size": 4, "r": 0}  # type: ignore[dict-item]
    model = tiny("llama")
    plain, plain_keys = weights(model), keys(model)
    model = peft.get_peft_model(model, getattr(peft, kind)(**targets)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    assert not torch.equal(keys(model), plain_keys)
    assert weights(model) != plain
    with model.disable_adapter():
        assert torch.equal(keys(model), plain_keys)


def test_the_same_adapter_under_another_name_beside_others_is_the_same() -> None:
    torch.manual_seed(3)
    alone = peft.get_peft_model(tiny("llama"), lora(), adapter_name="mine").eval()
    model = wrapped()
    assert torch.equal(keys(model), keys(alone))
    assert weights(model) == weights(alone)


def test_modules_that_an_adapter_replaces_are_part_of_it() -> None:
    model = wrapped(modules_to_save=["norm", "k_proj"])
    before, its_keys = weights(model), keys(model)
    name = "base_model.model.model.layers.0.self_attn.k_proj.modules_to_save.one.weight"
    with torch.no_grad():
        dict(model.named_parameters())[name].mul_(2)
    assert not torch.equal(keys(model), its_keys)
    assert weights(model) != before


def test_the_scale_of_single_layers_is_part_of_the_identity() -> None:
    model = wrapped()
    before = weights(model)
    model.base_model.model.model.layers[1].self_attn.v_proj.scale_layer(0.5)
    assert weights(model) != before


def test_adapters_of_transformers_are_seen() -> None:
    model = tiny("llama")
    plain = weights(model)
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        model.add_adapter(lora(), adapter_name=name)
    found = []
    for name in ("one", "two"):
        model.set_adapter(name)
        found.append(weights(model))
    assert len({plain, *found}) == 3
    model.disable_adapters()
    assert weights(model) == plain
    model.enable_adapters()
    assert weights(model) == found[1]


def test_soft_prompts_are_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(tiny("llama"), config).eval()
    with pytest.raises(UnsupportedModel, match=r"adapter 'default': .*soft prompts"):
        ModelIdentity.from_transformers(model)


def test_generate_answers_no_adapter_from_the_cache_of_another(tmp_path: Path) -> None:
    model = wrapped()
    with KVStore(tmp_path / "a", ModelIdentity.from_transformers(model), CONFIG) as store:
        first = generate(model, PROMPT, store=store, **GREEDY)
        assert store.explain(PROMPT[0]).tokens == PROMPT.shape[1]
        model.set_adapter("two")
        with pytest.raises(IdentityMismatch, match="other active adapters"):
            generate(model, PROMPT, store=store, **GREEDY)
        with model.disable_adapter(), pytest.raises(IdentityMismatch, match="other active adapters"):
            generate(model, PROMPT, store=store, **GREEDY)
        model.set_adapter("one")
        assert torch.equal(generate(model, PROMPT, store=store, **GREEDY), first)
        assert store.stats()["counters"]["get_hits"] == 1
        model.merge_adapter()
        with pytest.raises(IdentityMismatch, match="other weights"):
            generate(model, PROMPT, store=store, **GREEDY)


def test_a_merged_adapter_that_is_switched_off_leaves_nothing_behind(tmp_path: Path) -> None:
    """The first pass takes it out of the weights again, in the middle of the call."""
    model = wrapped()
    model.merge_adapter()
    with model.disable_adapter(), KVStore(tmp_path, ModelIdentity.from_transformers(model), CONFIG) as store:
        generate(model, PROMPT, store=store, **GREEDY)
        assert store.stats()["counters"]["fallback_model_changed"] == 1
        assert store.contains(PROMPT[0]) == 0
