"""Whether a model computes the caches now that it computes by itself, in evaluation mode."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.integrations.transformers.adapters import bare


def check_mode(model: Any) -> None:
    """Refuse a model that computes other caches at the moment than it does by itself.

    Raises:
        ValueError: it, or a part of it that drops something, is in training mode; or torch.autocast, or soft prompts of
            peft, are around it.
    """
    model = bare(model)
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
