"""Notices between two calls that a model is not what it was: cheap enough to be asked before every answer.

Looked at are the modules, where each tensor lies and how often torch changed it in place, eight elements of each, the
numbers of layers with adapters, and the config. What is missed: writes through `tensor.data` to other elements only,
and what hooks do.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvstore.core.identity import ModelIdentity
from kvstore.core.rope_types import SHORT
from kvstore.integrations.transformers.adapters import bare, facts_of, has_adapters, is_foreign, used_adapters
from kvstore.integrations.transformers.config_facts import config_facts
from kvstore.integrations.transformers.describe import layout_from_config
from kvstore.integrations.transformers.fingerprint import follows_length

_SAMPLES = 8


@dataclass(frozen=True)
class Look:
    """What a model looks like now. Keeps no tensor of the model alive.

    Attributes:
        marks: of every module and tensor, in order.
        facts: of the config, and of the modules that neither torch nor transformers made.
        samples: of the tensors, for each device and dtype, on the CPU.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> before = Look.at(model)
        >>> before.is_like(Look.at(model)), before.is_like(Look.at(model.bfloat16()))
        (True, False)
    """

    marks: list[int]
    facts: list[Any]
    samples: list[torch.Tensor]

    @classmethod
    def at(cls, model: Any) -> Look:
        """Look at a model; a device is waited for once."""
        model = bare(model)
        marks, facts, tensors = list[int](), list[Any](), list[torch.Tensor]()
        stack = [model]
        while stack:
            module = stack.pop()
            state = module.__dict__
            marks.append(id(module))
            tensors += state["_parameters"].values()
            tensors += [tensor for name, tensor in state["_buffers"].items() if not follows_length(module, name)]
            stack += [child for child in state["_modules"].values() if child is not None]
            if is_foreign(type(module)):
                facts.append((facts_of(module, _mark), used_adapters(module) if has_adapters(module) else ()))
        facts.append(config_facts(model.config))
        tensors = [tensor for tensor in tensors if tensor is not None]
        for tensor in tensors:
            marks += _mark(tensor)
        return cls(marks, facts, _sampled(tensors))

    def is_like(self, other: Look) -> bool:
        """Whether nothing is known to have changed."""
        return (
            self.marks == other.marks
            and self.facts == other.facts
            and len(self.samples) == len(other.samples)
            and all(torch.equal(*pair) for pair in zip(self.samples, other.samples, strict=True))
        )


_seen: weakref.WeakKeyDictionary[Any, tuple[Look, ModelIdentity]] = weakref.WeakKeyDictionary()


def identity_now(model: Any, regime: str = SHORT) -> ModelIdentity:
    """Return the identity of a model, made anew only if it looks other than at the last call.

    Thread-safe, as long as nobody changes the model meanwhile.

    Args:
        model: a loaded transformers model.
        regime: see `ModelIdentity.from_transformers`.

    Raises:
        UnsupportedModel: see `ModelIdentity.from_transformers`.
    """
    look = Look.at(model)
    seen = _seen.get(model)
    if seen is None or not seen[0].is_like(look):
        seen = _seen[model] = look, ModelIdentity.from_transformers(model)
    if regime == SHORT:
        return seen[1]
    return replace(seen[1], layout=layout_from_config(bare(model).config, bare(model).dtype, regime))


def _mark(tensor: torch.Tensor) -> tuple[int, int, int]:
    version = -1 if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.data_ptr()


@torch.no_grad()
def _sampled(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """uint8 per device and dtype: elements of all tensors, evenly spread."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        count = tensor.numel()
        if count:
            few = min(_SAMPLES, count) if tensor.is_contiguous() else 1
            part = tensor.as_strided((few,), (max(1, (count - 1) // max(1, few - 1)),))
            groups.setdefault((tensor.device, tensor.dtype), []).append(part)
    return [torch.cat(parts).view(torch.uint8).cpu() for parts in groups.values()]
