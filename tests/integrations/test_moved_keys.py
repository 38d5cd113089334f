"""Keys of plain layers, of every model whose pairs are known: moved to where the model puts them, and recomputed."""

from __future__ import annotations

import json

import pytest
import torch
from movable_models import model_of, moved, prefilled, tokens_of

from kvstore.core.rope import IN_HALVES, IN_NEIGHBOURS, can_code_moved, can_move
from kvstore.integrations.transformers import layout_from_config
from kvstore.integrations.transformers.describe import HALVES
from kvstore.integrations.transformers.recompute import recompute

LISTED = IN_HALVES + IN_NEIGHBOURS
SHIFT, TOKENS = 9, 23


@pytest.mark.parametrize("name", LISTED + HALVES)
def test_keys_of_every_layer_are_moved_to_where_the_model_puts_them(name: str) -> None:
    model, token = model_of(name), tokens_of(1, 1)
    layout = layout_from_config(model.config, model.dtype)
    assert can_move(layout)
    assert can_code_moved(layout) is (name not in IN_NEIGHBOURS)
    here, there = prefilled(model, token), prefilled(model, token, SHIFT)  # a token alone sees the same everywhere
    for (k, v), (same, _), (want, same_v) in zip(moved(layout, here, SHIFT), here, there, strict=True):
        assert torch.equal(v, same_v)
        assert float((k - want).abs().max()) < 1e-6 * float(want.abs().max())
        assert float((same - want).abs().max()) > 0.1


@pytest.mark.parametrize("name", LISTED)
def test_layouts_say_what_they_said_before_keys_could_be_moved(name: str) -> None:
    """It is part of every key: with other words old stores would not open."""
    model = model_of(name)
    assert json.loads(layout_from_config(model.config, model.dtype).rope)["pairs"] == name


@pytest.mark.parametrize("name", LISTED)
def test_positions_that_are_computed_again_give_a_plain_prefill(name: str) -> None:
    model, tokens = model_of(name), tokens_of(TOKENS, 1)
    want = prefilled(model, tokens)
    layers = [(k.clone(), v.clone()) for k, v in want]
    for k, v in layers:
        k[:, :, 7:], v[:, :, 7:] = 1.0, 1.0
    cache, _, logits = recompute(model, layers, tokens, range(7, TOKENS))
    for layer, (k, v) in zip(cache.layers, want, strict=True):
        assert torch.allclose(layer.keys, k, rtol=1e-3, atol=2e-4 * float(k.abs().max()))
        assert torch.allclose(layer.values, v, rtol=1e-3, atol=2e-4 * float(v.abs().max()))
    with torch.no_grad():
        assert torch.allclose(logits, model(tokens[None]).logits[0, -1], rtol=1e-2, atol=1e-2)
