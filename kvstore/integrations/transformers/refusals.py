"""Which calls of `model.generate` a store cannot serve, as far as the model and the arguments say it."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.core.cache_argument import NAMES
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.answers import setting

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
    "past_key_values",
    "position_ids",
    "prompt_lookup_num_tokens",
    "token_type_ids",
)
_REFUSED_FLAGS = ("token_healing", "use_mtp")  # healing computes another prompt than the one that was given


def without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `model.generate` without those that say None of a cache, as if they were not given."""
    return {name: value for name, value in kwargs.items() if value is not None or name not in NAMES}


def check_call(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what a store cannot serve, whether the call says it, its config, or that of the model.

    Raises:
        ValueError: names it, and says what to do.
    """
    _check_model(bare(model))
    if setting(model, kwargs, "use_cache") is False or not kwargs.get("use_cache", True):
        raise ValueError("use_cache: False leaves nothing to store; remove this argument")
    for name in _REFUSED:
        if setting(model, kwargs, name) is not None:
            raise ValueError(f"{name}: a store does not support this argument; remove it")
    for name in _REFUSED_FLAGS:
        if setting(model, kwargs, name):
            raise ValueError(f"{name}: a store does not support this argument; remove it")
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name != "attention_mask":
            raise ValueError(f"{name}: the store knows a cache by its token ids alone; remove this input")


def _check_model(model: Any) -> None:
    """Refuse a model that computes other caches at the moment than it does by itself."""
    if model.training:
        raise ValueError("model: the model is in training mode, where dropout changes the cache; call model.eval()")
    if drops := [name for name, module in model.named_modules() if module.training and _is_random(module)]:
        raise ValueError(f"model: {drops[0]} is in training mode, where it changes the cache; call model.eval()")
    device = getattr(model, "device", torch.device("cpu"))
    if torch.is_autocast_enabled(device.type):
        raise ValueError(
            "model: under torch.autocast it computes in another dtype than its own, which is part of every key; leave "
            "autocast, or load the model in that dtype"
        )
    prepares = vars(model).get("prepare_inputs_for_generation")
    if prepares is not None and getattr(prepares, "__self__", None) is not model:
        raise ValueError(
            "model: something around it gives it other inputs than its tokens, as soft prompts of peft do; run it "
            "without a store"
        )


def _is_random(module: Any) -> bool:
    """Whether a module computes something else in training mode. A layer that peft adds is in that mode, and does not
    where it drops nothing."""
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return True
    is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
    names = ("p",) if is_dropout else [name for name in vars(module) if "drop" in name]
    values = [getattr(module, name) for name in names]
    return any(isinstance(value, float | int) and value > 0 for value in values)
