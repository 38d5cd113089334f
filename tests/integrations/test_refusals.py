"""Calls that a store cannot serve: `generate` refuses them, an attached model answers as without a store. And models
that a store changed: by what an earlier call left, or by a prompt that is computed in two passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig, UnsupportedModel, attach
from kvstore.integrations.transformers import generate, warmup
from kvstore.integrations.transformers.archiving import archive, restore
from kvstore.integrations.transformers.predictor import Predictor
from kvstore.integrations.transformers.recompute import check_model, recompute

MIB = 1 << 20
CONFIG = StoreConfig(host=TierConfig(16 * MIB), disk=TierConfig(64 * MIB), segment_bytes=4 * MIB, block_tokens=16)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}


def _prompt(count: int, seed: int = 0, first: int = 1, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(first, vocabulary, (1, count), generator=torch.Generator().manual_seed(seed))


def _store(folder: Path, model: Any) -> KVStore:
    return KVStore(folder / "store", ModelIdentity.from_transformers(model), CONFIG)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("token_healing", True),
        ("use_mtp", True),
        ("assistant_early_exit", 1),
        ("use_cache", None),
        ("use_cache", False),
    ],
)
def test_arguments_are_refused(tmp_path: Path, argument: str, value: Any) -> None:
    model = tiny("llama")
    with _store(tmp_path, model) as store, pytest.raises(ValueError, match=rf"^{argument}: "):
        generate(model, _prompt(20), store=store, **GREEDY, **{argument: value})


@pytest.mark.parametrize("inputs", [{"last_hidden_state": torch.zeros(1, 2, 48)}, [(torch.zeros(1),)]])
def test_inputs_in_containers_are_refused(tmp_path: Path, inputs: Any) -> None:
    model = tiny("llama")
    with _store(tmp_path, model) as store, pytest.raises(ValueError, match=r"^mm_encoder_outputs: "):
        generate(model, _prompt(20), store=store, mm_encoder_outputs=inputs, **GREEDY)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("use_cache", False),
        ("prompt_lookup_num_tokens", 3),
        ("token_healing", True),
        ("cache_implementation", "static"),
    ],
)
def test_so_are_settings_of_the_model_that_a_config_of_the_call_leaves_open(
    tmp_path: Path, argument: str, value: Any
) -> None:
    model = tiny("llama")
    setattr(model.generation_config, argument, value)
    given = GenerationConfig(do_sample=False, max_new_tokens=8)
    setattr(given, argument, None)
    with _store(tmp_path, model) as store, pytest.raises(ValueError, match=rf"^{argument}: "):
        generate(model, _prompt(20), store=store, generation_config=given)


def test_a_cache_of_none_is_no_cache(tmp_path: Path) -> None:
    model = tiny("llama")
    with _store(tmp_path, model) as store:
        assert generate(model, _prompt(20), store=store, past_key_values=None, **GREEDY).shape == (1, 28)


def test_a_mask_of_none_is_one_of_ones(tmp_path: Path) -> None:
    """transformers would make one that leaves out the tokens that pad other prompts."""
    model, ids = tiny("llama"), _prompt(40)
    ids[0, 3:6] = 0
    model.generation_config.eos_token_id = 7
    want = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    with _store(tmp_path, model) as store:
        for _ in range(2):
            assert torch.equal(generate(model, ids, store=store, attention_mask=None, **GREEDY), want)


def _autocast(model: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _trains_within(model: Any) -> Any:
    model.model.layers[1].self_attn.attention_dropout = 0.2
    model.model.layers[1].train()
    return torch.no_grad()


def _soft_prompts(model: Any) -> Any:
    plain = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: plain(*args, **kwargs)
    return torch.no_grad()


@pytest.mark.parametrize("change", [_autocast, _trains_within, _soft_prompts], ids=lambda change: change.__name__[1:])
def test_a_model_that_computes_something_else_for_now_is_not_served(tmp_path: Path, change: Any) -> None:
    model, ids = tiny("llama"), _prompt(40)
    with _store(tmp_path, model) as store:
        generate(model, ids, store=store, **GREEDY)
        before = store.stats()["counters"]["put_new_tokens"]
        with change(model), pytest.raises(ValueError, match=r"^model: "):
            generate(model, ids, store=store, **GREEDY)
        with attach(model, None, store), change(model):
            model.generate(ids, **GREEDY)
        report = store.last_request
        assert report is not None
        assert not report.served
        assert store.stats()["counters"]["put_new_tokens"] == before


@pytest.mark.parametrize("change", [_autocast, _trains_within, _soft_prompts], ids=lambda change: change.__name__[1:])
def test_nor_is_it_warmed_archived_recomputed_or_a_predictor(tmp_path: Path, change: Any) -> None:
    model, ids = tiny("llama"), _prompt(40)[0]
    with torch.no_grad():
        cache = model(ids[None]).past_key_values
    archived = archive(model, ids, cache)
    with _store(tmp_path, model) as store, change(model):
        for call in (
            lambda: warmup(store, model, [ids]),
            lambda: archive(model, ids, cache),
            lambda: restore(model, archived),
            lambda: recompute(model, cache, ids, [1]),
            lambda: Predictor(model),
        ):
            with pytest.raises(ValueError, match=r"^model: "):
                call()
        assert "put_tokens" not in store.stats()["counters"]


def test_a_part_in_training_mode_that_drops_nothing_is_served(tmp_path: Path) -> None:
    """As peft makes its layers."""
    model = tiny("llama")
    model.model.layers[1].train()
    with _store(tmp_path, model) as store:
        assert generate(model, _prompt(20), store=store, **GREEDY).shape == (1, 28)


def test_its_own_method_put_back_is_no_change(tmp_path: Path) -> None:
    """As peft leaves it behind."""
    model = tiny("llama")
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation
    with _store(tmp_path, model) as store:
        assert generate(model, _prompt(20), store=store, **GREEDY).shape == (1, 28)


def _reads_images() -> Any:
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
        "rope_parameters": rotary,
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    torch.manual_seed(0)
    tokens = {"image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)).eval()


@pytest.mark.parametrize("stale", [torch.tensor([[-12]]), torch.tensor([[-3], [0], [0]])], ids=["image", "batch"])
def test_positions_of_an_earlier_call_are_forgotten(tmp_path: Path, stale: torch.Tensor) -> None:
    model, ids = _reads_images(), _prompt(40, vocabulary=190)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # so that positions matter to the answer
    want = model.generate(ids, **GREEDY)
    with _store(tmp_path, model) as store:
        for _ in range(2):
            model.model.rope_deltas = stale.clone()
            assert torch.equal(generate(model, ids, store=store, **GREEDY), want)
        assert store.last_request is not None
        assert store.last_request.reused_tokens == 39


def test_the_first_mamba_takes_what_follows_a_state_token_by_token(tmp_path: Path) -> None:
    """transformers begins with no state where a pass has several tokens."""
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(**small, bos_token_id=0, eos_token_id=None, pad_token_id=0)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "A_log" not in name:
                weight.copy_(torch.randn(weight.shape) / 4)
            elif "A_log" in name:
                weight.fill_(-5.0)  # a long memory
    asked: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    for every in (0, 16):
        config = StoreConfig(**{**vars(CONFIG), "state_every": every})
        logits = []
        with KVStore(tmp_path / str(every), ModelIdentity.from_transformers(model), config) as store:
            for seed in (1, 2):
                first = _prompt(40, seed)
                generate(model, first, store=store, **GREEDY | {"max_new_tokens": 1})
                ids = torch.cat([first, _prompt(13, 5)], 1)
                found = generate(model, ids, store=store, **asked)
                whole = model.generate(ids, **asked)
                torch.testing.assert_close(found.logits[0], whole.logits[0], rtol=1e-4, atol=1e-4)
                logits.append(found.logits[0])
        assert (logits[0] - logits[1]).abs().max() > 0.01


def test_falcon_with_heads_that_share_keys(tmp_path: Path) -> None:
    """It repeats the keys for all heads before it caches them."""
    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "alibi": False}
    heads = {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True}
    model = FalconForCausalLM(FalconConfig(**small, **heads, bos_token_id=0, eos_token_id=None, pad_token_id=0)).eval()
    ids = _prompt(30)
    want = model.generate(ids, **GREEDY)
    with _store(tmp_path, model) as store:
        for _ in range(2):
            assert torch.equal(generate(model, ids, store=store, **GREEDY), want)
        assert store.last_request is not None
        assert store.last_request.reused_tokens == 29


def test_single_positions_are_not_recomputed_where_attention_goes_by_distance() -> None:
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "alibi": True}
    model = FalconForCausalLM(FalconConfig(**small, num_attention_heads=4)).eval()
    with pytest.raises(UnsupportedModel, match=r"falcon: attention by distance \(alibi\)"):
        check_model(model)
