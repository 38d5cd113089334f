"""Finding 2: no field of a config changes keys and values without changing the identity, for every causal model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import causal_models
import pytest
import torch
import transformers
from causal_models import build, keys_and_values, looked_at, quiet, tiny_config, turned
from length import FULL
from lora_layers import activate, with_adapters
from tiny_models import tiny

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.errors import IdentityMismatch, UnsupportedModel
from kvstore.integrations.transformers import layout_from_config, weights_fingerprint
from kvstore.integrations.transformers.config_facts import HARMLESS, IN_LAYOUT, config_facts

SPREAD = ("Bloom", "Dots1", "Falcon", "GPTNeoX", "Gemma3", "HYV3", "Llama")
ODD = ("Blt", "DeepseekV4", "Gemma3nText", "Rwkv", "xLSTM")  # whose configs lack what others have
CLASSES = causal_models.config_classes() if FULL else [getattr(transformers, f"{name}Config") for name in SPREAD]
FOUND = [
    ("Glm4Moe", "n_group"),
    ("Glm4Moe", "topk_group"),
    ("Dots1", "n_group"),
    ("Dots1", "topk_group"),
    ("HYV3", "router_scaling_factor"),
    ("GPTNeoX", "use_parallel_residual"),
    ("Bloom", "apply_residual_connection_post_layernorm"),
    ("Phimoe", "router_jitter_noise"),
]


pytestmark = pytest.mark.usefixtures("one_thread")


def identity(model: Any) -> ModelIdentity | None:
    try:
        return ModelIdentity.from_transformers(model)
    except UnsupportedModel:  # another field made it one that no store takes
        return None


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def variants(kind: Any, base: Any) -> Iterator[tuple[str, Any]]:
    """Models with the weights of `base`, in which one field has another value: built so, and changed later. Of models
    that have parts for images or sound, fields of the text part, too."""
    text = getattr(base.config, "text_config", None)
    for config, part in ((base.config, None), (text, "text_config")):
        for name, value in list(vars(config).items() if config is not None else ()):
            for other in turned(value):
                changes = {name: other}
                try:
                    changes = changes if part is None else {part: tiny_config(type(config), **changes)}
                    yield name, build(tiny_config(kind, **changes), like=base)
                except Exception:  # other shapes, or a value that no model has
                    continue
                with quiet():
                    try:
                        setattr(config, name, other)
                        yield name, base
                    finally:
                        setattr(config, name, value)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_no_field_changes_keys_and_values_without_the_identity(kind: Any) -> None:
    of_small = looked_at(kind, SPREAD, keys_and_values)
    if of_small is None:
        return
    base, kv = of_small
    before, changed, tried = identity(base), set(), 0
    assert identity(base) == before  # no pass changes it
    for name, model in variants(kind, base):
        try:
            found = keys_and_values(model)
        except Exception:
            continue
        tried += 1
        if not same(found, kv):
            changed.add(name)
            assert identity(model) != before, name
    assert tried >= 5
    assert not changed & HARMLESS


@pytest.mark.parametrize(("name", "field"), FOUND)
def test_fields_that_were_missed_change_both(name: str, field: str) -> None:
    kind = getattr(transformers, f"{name}Config")
    base = build(tiny_config(kind))
    kv, before, changed = keys_and_values(base), identity(base), 0
    for value in turned(getattr(base.config, field)):
        model = build(tiny_config(kind, **{field: value}), like=base)
        try:
            found = keys_and_values(model)
        except RuntimeError:  # experts that cannot be split so
            continue
        if not same(found, kv):
            changed += 1
            assert identity(model) != before
    assert changed, "no value changed the keys: the test cannot fail"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_field_that_is_not_known_to_be_harmless_is_part_of_the_identity(kind: Any) -> None:
    try:
        config = tiny_config(kind)
    except Exception:
        return
    before = config_facts(config, HARMLESS | IN_LAYOUT)
    for name, value in list(vars(config).items()):
        for other in turned(value):
            if other == value:
                continue
            changed = copy.deepcopy(config)
            vars(changed)[name] = other
            assert (config_facts(changed, HARMLESS | IN_LAYOUT) == before) == (name in HARMLESS | IN_LAYOUT), name


def test_what_no_store_takes_is_refused_by_type() -> None:
    for kind in {*CLASSES, *(getattr(transformers, f"{name}Config") for name in ODD)}:
        with quiet():
            try:
                config = kind()
            except Exception:
                continue
            with contextlib.suppress(UnsupportedModel):
                layout_from_config(config, torch.bfloat16)


def test_defaults_do_not_count() -> None:
    """So that a field that a newer transformers adds does not change the identity of an old model."""
    facts = config_facts(transformers.LlamaConfig(hidden_size=64, attention_bias=False))
    assert facts["hidden_size"] == 64
    assert "attention_bias" not in facts


def _filled() -> Any:
    """A model whose weights no generator of chance makes."""
    model = tiny("llama")
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_((torch.arange(value.numel()) % 251 / 251).view(value.shape))
    return model


def test_the_first_part_of_a_fingerprint_is_what_the_first_stores_have() -> None:
    first = "sampled-sha256:a3f0c2d0584f83ee0ff1db0dcb438192a9ef6d730013e7a642a0c737c3bd27b6"
    assert weights_fingerprint(_filled()).split(";")[0] == first


@pytest.mark.parametrize("parts", [1, 2])  # the weights alone, and with the config, but no rows
def test_a_store_of_earlier_fingerprints_opens_with_its_model_and_not_with_adapters(tmp_path: Path, parts: int) -> None:
    model = _filled()
    now = ModelIdentity.from_transformers(model)
    config = StoreConfig(host=TierConfig(1 << 20, "raw"), disk=TierConfig(16 << 20, "raw"), segment_bytes=1 << 20)
    ids = torch.arange(1, 20)[None]
    with KVStore(tmp_path, replace(now, weights=";".join(now.weights.split(";")[:parts])), config) as store:
        store.put(ids[0], model(ids).past_key_values)
    with KVStore(tmp_path, now, config) as store:
        hit = store.get(ids[0])
        assert hit is not None
        assert hit.tokens == 19
    activate(with_adapters(model, a=1), "a")
    with pytest.raises(IdentityMismatch, match="adapters: stored None"):
        KVStore(tmp_path, ModelIdentity.from_transformers(model), config)
    model = _filled()
    model.config.rms_norm_eps = 0.5
    with pytest.raises(IdentityMismatch, match="weights: stored" if parts == 1 else "config: stored"):
        KVStore(tmp_path, ModelIdentity.from_transformers(model), config)
