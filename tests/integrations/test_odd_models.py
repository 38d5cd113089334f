"""Models that do something else than others with what a store gives them, and what is done about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import causal_models
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tiny_models import tiny

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig, UnsupportedModel, attach
from kvstore.integrations.transformers import generate
from kvstore.integrations.transformers.describe import layout_from_config

CONFIG = StoreConfig(
    host=TierConfig(1 << 22, "raw"), disk=TierConfig(1 << 27, "raw"), segment_bytes=1 << 22, block_tokens=8
)
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
TEXT = 90  # ids below are of text


def _config(name: str, **changes: Any) -> Any:
    return causal_models.tiny_config(
        getattr(transformers, f"{name}Config"), {"max_position_embeddings": 128}, **changes
    )


def _model(name: str) -> Any:
    """One whose answers follow from all that they see."""
    with causal_models.quiet():
        model = getattr(transformers, f"{name}ForCausalLM")(_config(name)).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for part, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) * 0.4 + (1.0 if "norm" in part.lower() else 0.0))
    return model


def _prompt(count: int, seed: int) -> torch.Tensor:
    return torch.randint(4, TEXT, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Gemma", {"use_bidirectional_attention": True}),
        ("Gemma3Text", {"use_bidirectional_attention": True}),
        ("Llama", {"is_causal": False}),
        ("PaliGemma", {}),
    ],
)
def test_a_model_that_attends_to_what_comes_behind_is_refused(name: str, changes: dict[str, Any]) -> None:
    config = getattr(transformers, f"{name}Config")()
    if not changes:
        config.text_config.use_bidirectional_attention = False  # its own prompts do, whatever this says
    else:
        assert layout_from_config(config, "float32").layers
    for field, value in changes.items():
        setattr(config, field, value)
    with pytest.raises(UnsupportedModel, match=r"both ways|those behind them"):
        layout_from_config(config, "float32")


def test_tokens_of_one_image_may_attend_to_each_other() -> None:
    config = transformers.Gemma4TextConfig(use_bidirectional_attention="vision")
    assert layout_from_config(config, "float32").layers


def test_sound_is_told_from_text() -> None:
    for config in (transformers.GraniteSpeechConfig(), transformers.Qwen2_5OmniThinkerConfig()):
        assert dict(layout_from_config(config, "float32").media)["audio_token_index"] == config.audio_token_index
    with pytest.raises(UnsupportedModel, match="names no token for them"):
        layout_from_config(transformers.MoshiConfig(), "float32")


def test_a_hybrid_cache_of_the_models_own_config_is_none(tmp_path: Path) -> None:
    """As in the configs of Gemma 2 and 3: transformers takes it for nothing."""
    model, ids = tiny("gemma3"), _prompt(40, 1)
    model.generation_config.cache_implementation = "hybrid"
    want = model.generate(ids, **GREEDY)
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), CONFIG) as store:
        assert torch.equal(generate(model, ids, store=store, **GREEDY), want)
        with attach(model, None, store):
            model.generate(torch.cat([want, _prompt(9, 2)], 1), **GREEDY)
        assert store.last_request is not None
        assert store.last_request.reused_tokens > 0
        with pytest.raises(ValueError, match="cache_implementation"):
            generate(model, ids, store=store, **GREEDY, cache_implementation="static")
        with pytest.raises(ValueError, match="generation_mode"):
            generate(model, ids, store=store, **GREEDY, generation_mode="image")


def test_zamba_takes_what_follows_a_state_token_by_token(tmp_path: Path) -> None:
    model, first = _model("Zamba"), _prompt(30, 1)
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), CONFIG) as store, causal_models.quiet():
        ids = torch.cat([generate(model, first, store=store, **GREEDY), _prompt(9, 2)], 1)
        asked: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
        found = generate(model, ids, store=store, **asked)
        assert store.last_request is not None
        assert store.last_request.reused_tokens > 0
        whole = model.generate(ids, **asked)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(whole.logits), rtol=1e-3, atol=1e-3)


def test_padding_is_refused_where_answers_count_columns(tmp_path: Path) -> None:
    """GIT takes position_ids, and gives its own steps none."""
    model = _model("Git")
    ids, mask = torch.cat([_prompt(20, 1), _prompt(20, 2)]), torch.ones(2, 20, dtype=torch.long)
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), CONFIG) as store, causal_models.quiet():
        want = model.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(generate(model, ids, store=store, attention_mask=mask, **GREEDY), want)
        mask[1, :7], ids[1, :7] = 0, 0
        with pytest.raises(UnsupportedModel, match="heeds no position_ids"):
            generate(model, ids, store=store, attention_mask=mask, **GREEDY)


def test_every_config_of_transformers_is_served_or_refused_by_name() -> None:
    refused, served = [], []
    for name, kind in transformers.CONFIG_MAPPING.items():
        with causal_models.quiet():
            try:
                config = kind()
            except (TypeError, ValueError, StrictDataclassError):  # made of others alone
                continue
            try:
                layout_from_config(config, "bfloat16")
                served.append(name)
            except UnsupportedModel:
                refused.append(name)
    assert {"glm5_next", "segformer", "swin"} <= set(refused)
    assert {"llama", "gemma3_text", "qwen3"} <= set(served)
