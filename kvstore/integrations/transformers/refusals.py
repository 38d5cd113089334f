"""Which calls of `model.generate` a store cannot serve, as far as the model and the arguments say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvstore.core.cache_argument import NAMES
from kvstore.integrations.transformers.answers import setting
from kvstore.integrations.transformers.mode import check_mode

# Arguments of `generate` that feed the model something the token ids do not show, bring a cache of their own,
# or leave tokens in the cache that are not in the text.
_REFUSED = (
    "adapter_names",
    "assistant_early_exit",
    "assistant_model",
    "cache",
    "cache_implementation",
    "cache_params",
    "custom_generate",
    "generation_mode",
    "past_key_values",
    "position_ids",
    "prompt_lookup_num_tokens",
    "token_type_ids",
)
# What transformers does itself: it takes "hybrid", which configs of Gemma 2 and 3 name, for nothing at all.
_USUAL = {"cache_implementation": "hybrid", "generation_mode": "text"}
_REFUSED_FLAGS = ("token_healing", "use_mtp")  # healing computes another prompt than the one that was given


def without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `model.generate` without those that say None of a cache, as if they were not given."""
    return {name: value for name, value in kwargs.items() if value is not None or name not in NAMES}


def check_call(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what a store cannot serve, whether the call says it, its config, or that of the model.

    Raises:
        ValueError: names it, and says what to do.
    """
    check_mode(model)
    if setting(model, kwargs, "use_cache") is False or not kwargs.get("use_cache", True):
        raise ValueError(
            "use_cache: False leaves nothing to store; remove this argument, or give True if the model's config says it"
        )
    for name in _REFUSED:
        value = setting(model, kwargs, name)
        if value is not None and value != _USUAL.get(name):
            raise ValueError(f"{name}: a store does not support this argument; remove it")
    for name in _REFUSED_FLAGS:
        if setting(model, kwargs, name):
            raise ValueError(f"{name}: a store does not support this argument; remove it")
    for name, value in kwargs.items():
        if name != "attention_mask" and _holds_tensors(value):
            raise ValueError(f"{name}: the store knows a cache by its token ids alone; remove this input")


def _holds_tensors(value: Any) -> bool:
    """Whether an argument is a tensor, or a container of some, such as the outputs of an encoder."""
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)
