"""Notices between two calls that a model is not what it was: cheap enough to be asked before every answer.

Looked at are the modules, where each tensor lies and how often torch changed it in place, four elements of each, the
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
from kvstore.integrations.transformers.samples import Samples


@dataclass(frozen=True)
class Look:
    """What a model looks like now. Keeps no tensor of the model alive.

    Attributes:
        marks: of every module and tensor, in order.
        facts: of the config, and of the modules that neither torch nor transformers made.
        samples: of the tensors.
        where: they were read.

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

    marks: list[Any]
    facts: list[Any]
    samples: list[torch.Tensor]
    where: Samples

    @classmethod
    def at(cls, model: Any, before: Look | None = None) -> Look:
        """Look at a model; a device is waited for once. before: the last look at it, which makes this one faster."""
        model = bare(model)
        marks, facts, tensors = list[Any](), list[Any](), list[torch.Tensor]()
        stack, foreign = [model], dict[type, bool]()
        while stack:
            module = stack.pop()
            if module is None:
                continue
            state = module.__dict__
            marks.append(id(module))
            if parameters := state["_parameters"]:
                tensors += parameters.values()
            if buffers := state["_buffers"]:
                tensors += [tensor for name, tensor in buffers.items() if not follows_length(module, name)]
            if modules := state["_modules"]:
                stack += modules.values()
            kind = type(module)
            if kind not in foreign:
                foreign[kind] = is_foreign(kind)
            if foreign[kind]:
                facts.append((facts_of(module, _mark), used_adapters(module) if has_adapters(module) else ()))
        facts.append(config_facts(model.config))
        tensors = [tensor for tensor in tensors if tensor is not None]
        marks += map(_mark, tensors)
        if before is None or before.marks != marks:
            where = Samples(tensors)
        else:
            marks, where = before.marks, before.where
        return cls(marks, facts, where.read(tensors), where)

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
    seen = _seen.get(model)
    look = Look.at(model, None if seen is None else seen[0])
    if seen is None or not seen[0].is_like(look):
        seen = _seen[model] = look, ModelIdentity.from_transformers(model)
    if regime == SHORT:
        return seen[1]
    return replace(seen[1], layout=layout_from_config(bare(model).config, bare(model).dtype, regime))


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes with a tensor, its place or its shape, and where torch writes into it."""
    version = -1 if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()
