"""Latents: their rotated keys are moved to where the model would put them, and their rows are recomputed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from movable_models import model_of, moved, prefilled, tokens_of
from tiny_models import tiny_of_kind
from transformers import CONFIG_MAPPING

from kvstore.core.layout import KVLayout
from kvstore.core.rope import LATENTS_IN_HALVES, LATENTS_IN_NEIGHBOURS, can_code_moved, can_move
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers import layout_from_config
from kvstore.integrations.transformers.recompute import check_model, recompute

NAMES = LATENTS_IN_HALVES + LATENTS_IN_NEIGHBOURS
TOKENS = 41
SHIFT = 9
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def of_first_layer(layout: KVLayout) -> KVLayout:
    return KVLayout(layout.layers[:1], layout.dtype, layout.rope)


def errors_of_moved(model: Any, shift: int = SHIFT) -> tuple[float, float]:
    """How far rotated keys of layer 0 are from those that the model computes `SHIFT` positions further, and how far
    latents are. In this layer both follow from the token and its position alone."""
    layout = of_first_layer(layout_from_config(model.config, model.dtype))
    tokens, before = tokens_of(TOKENS, 1), tokens_of(SHIFT, 2)
    (latents, keys), *_ = moved(layout, prefilled(model, tokens)[:1], shift)
    wanted = prefilled(model, torch.cat([before, tokens]))[0]
    found = [x - y[:, :, SHIFT:] for x, y in zip((keys, latents), (wanted[1], wanted[0]), strict=True)]
    return float(found[0].abs().max() / wanted[1].abs().max()), float(found[1].abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_moved_to_where_the_model_puts_them(name: str) -> None:
    model = model_of(name)
    assert can_move(layout_from_config(model.config, model.dtype))
    keys, latents = errors_of_moved(model)
    assert keys < 1e-6
    assert latents == 0
    assert errors_of_moved(model, shift=0)[0] > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_keys_in_bfloat16_are_moved_but_for_rounding(name: str) -> None:
    keys, latents = errors_of_moved(model_of(name).to(torch.bfloat16))
    assert keys < 2**-7
    assert latents == 0


@pytest.mark.parametrize("changes", [{"rope_interleave": False}, {"rope_parameters": YARN}])
def test_settings_of_the_rotary_embedding_are_followed(changes: dict[str, Any]) -> None:
    model = model_of("deepseek_v3", **changes)
    assert errors_of_moved(model)[0] < 1e-6
    assert errors_of_moved(model, shift=0)[0] > 0.1


@pytest.mark.parametrize("name", ["mistral4", "deepseek_v32", "glm_moe_dsa", "bailing_hybrid"])
def test_keys_of_models_that_nobody_vouched_for_are_not_moved(name: str) -> None:
    assert not can_move(layout_from_config(CONFIG_MAPPING[name](), torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
def test_layouts_say_what_they_said_before_keys_could_be_moved(name: str) -> None:
    """It is part of every key: with other words old stores would not open."""
    assert json.loads(layout_from_config(CONFIG_MAPPING[name](), torch.bfloat16).rope)["pairs"] == name


def test_donors_of_latents_are_coded_at_their_own_positions_alone() -> None:
    for name in NAMES:
        assert not can_code_moved(layout_from_config(CONFIG_MAPPING[name](), torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("begin", [0, 17])
def test_all_positions_from_one_on_give_a_plain_prefill(name: str, begin: int) -> None:
    model, tokens = model_of(name), tokens_of(TOKENS, 1)
    exact = prefilled(model, tokens)
    wrong = spoilt(exact, slice(begin, None))
    assert not close(wrong, exact)
    cache, deviation, logits = recompute(model, wrong, tokens, range(begin, TOKENS))
    assert close([(layer.keys, layer.values) for layer in cache.layers], exact)
    assert deviation.positions.tolist() == list(range(begin, TOKENS))
    with torch.no_grad():
        assert torch.allclose(logits, model(tokens[None]).logits[0, -1], rtol=1e-3, atol=1e-3)


def test_rows_that_were_not_asked_for_stay_bit_for_bit() -> None:
    model, tokens, positions = model_of("deepseek_v3"), tokens_of(TOKENS, 1), [12, 13, 25]
    wrong = spoilt(prefilled(model, tokens), slice(10, None))
    mended = [(k.clone(), v.clone()) for k, v in wrong]
    recompute(model, mended, tokens, positions)
    others = [x for x in range(TOKENS) if x not in positions]
    for a, b in zip(mended, wrong, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x[:, :, others], y[:, :, others])
            assert not torch.equal(x[:, :, positions], y[:, :, positions])


def test_tokens_behind_the_cache_are_computed_in_the_same_pass() -> None:
    model, tokens = model_of("deepseek_v3"), tokens_of(TOKENS + 6, 1)
    exact = prefilled(model, tokens)
    held = spoilt([(k[:, :, :TOKENS], v[:, :, :TOKENS]) for k, v in exact], slice(20, 23))
    cache, _, logits = recompute(model, held, tokens, [20, 21, 22])
    assert close([(layer.keys, layer.values) for layer in cache.layers], exact)
    with torch.no_grad():
        assert torch.allclose(logits, model(tokens[None]).logits[0, -1], rtol=1e-3, atol=1e-3)


def test_the_deviation_is_that_of_the_latents() -> None:
    model, tokens = model_of("deepseek_v3"), tokens_of(TOKENS, 1)
    exact = prefilled(model, tokens)
    for part, error in ((0, 0.01), (1, 0.0)):
        wrong = [(k.clone(), v.clone()) for k, v in exact]
        for layer in wrong:
            layer[part][:, :, 30] *= 1.1
        errors = recompute(model, wrong, tokens, [12, 30]).deviation.errors
        assert errors[0] < 1e-8
        assert errors[1] == pytest.approx(error, rel=0.05, abs=1e-8)


def test_models_with_windows_states_or_indexers_are_refused_with_the_reason() -> None:
    reasons = {
        "gemma3": "layers with windows hold no rows of the middle of a sequence",
        "falcon-h1": "states are of one position alone",
        "deepseek-v32": "indexer",
    }
    for name, reason in reasons.items():
        with pytest.raises(UnsupportedModel, match=reason):
            check_model(tiny_of_kind(name))


def spoilt(layers: Layers, rows: slice) -> Layers:
    copies, generator = [(k.clone(), v.clone()) for k, v in layers], torch.Generator().manual_seed(7)
    for pair in copies:
        for x in pair:
            x[:, :, rows] = torch.randn(x[:, :, rows].shape, generator=generator)
    return copies


def close(found: Layers, want: Layers) -> bool:
    pairs = [(a, b) for x, y in zip(found, want, strict=True) for a, b in zip(x, y, strict=True)]
    return all(float((a - b).abs().max()) < 2e-4 * float(b.abs().max()) for a, b in pairs)
