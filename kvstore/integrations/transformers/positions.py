"""Whether a model heeds the positions that padding moves: some are given them, and count columns all the same."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig

from kvstore.core.cache_argument import cache_of
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.feeding import forget_positions

_TOKENS, _PADDING, _NEW = range(10, 14), 5, 3
_NEAR = 0.05  # how far keys may differ of what is computed in another shape, of the largest; others differ by about 1
_heeds: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_log = logging.getLogger(__name__)


def heeds_positions(model: Any) -> bool:
    """Return whether the keys of an answer behind padding are those without it: a short one is computed in both ways,
    once for each model.

    Args:
        model: in evaluation mode, with layers that keep all tokens.
    """
    plain = bare(model)
    found = _heeds.get(plain)
    if found is None:
        found = _heeds[plain] = _try(plain)
    return found


@torch.no_grad()
def _try(model: Any) -> bool:
    try:
        alone, behind = _keys(model, 0), _keys(model, _PADDING)
    except Exception as error:  # whatever a model may ask for; its own calls say so
        _log.info("whether the model heeds positions is not known: %r", error)
        return True
    end = min(alone[0].shape[-2], behind[0].shape[-2] - _PADDING)
    return all(
        float((a[..., :end, :] - b[..., _PADDING : _PADDING + end, :]).abs().max()) <= _NEAR * float(a.abs().max())
        for a, b in zip(alone, behind, strict=True)
    )


def _keys(model: Any, padding: int) -> list[torch.Tensor]:
    """The keys of a short prompt and the beginning of its answer, which is always the same."""
    ids = torch.nn.functional.pad(torch.tensor([list(_TOKENS)]), (padding, 0)).to(model.device)
    mask = torch.nn.functional.pad(torch.ones(1, len(_TOKENS), dtype=torch.long), (padding, 0)).to(model.device)
    first = len(_TOKENS) + padding

    def next_token(_: int, sequence: torch.Tensor) -> list[int]:
        return [_TOKENS[len(sequence) - first]]

    config: Any = GenerationConfig  # which has no types
    config = config(max_new_tokens=_NEW, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    forget_positions(model)
    # Not that of the object: a store may be attached to it.
    done = type(model).generate(
        model, ids, attention_mask=mask, generation_config=config, prefix_allowed_tokens_fn=next_token
    )
    forget_positions(model)
    return [layer.keys.float() for layer in cache_of(done).layers]
