"""What adapters do to a model: which tensors take part in the next pass, and with which numbers.

By the attributes that peft's layers have (`adapter_layer_names`, `active_adapters`, `disable_adapters`,
`merged_adapters`), not by their classes: transformers' own adapters are made of the same layers, and other libraries
follow. What is loaded and not active does not count, so a model with all adapters disabled is the model without them,
and the names of adapters are labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.config_facts import plain

_WRAPPED = ("base_layer", "original_module")  # what an adapter's layer calls the module that it stands in for
_KNOWN = ("torch", "transformers", "transformers_modules")  # their modules follow from config and weights
_SILENT = frozenset({*vars(torch.nn.Module()), "_is_hf_initialized", "merged_adapters"})


def bare(model: Any) -> Any:
    """Return the transformers model that `torch.compile` or peft wrapped."""
    model = getattr(model, "_orig_mod", model)
    unwrap = getattr(model, "get_base_model", None)
    return bare(unwrap()) if callable(unwrap) else model


def check_adapters(model: Any) -> None:
    """Check that a model's caches follow from token ids alone, whatever adapters it has.

    Raises:
        UnsupportedModel: names the adapter and why its caches cannot be stored.
    """
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        kind = getattr(config, "peft_type", "")
        if getattr(config, "is_prompt_learning", False):
            why = "its soft prompts are in the cache, and token ids do not show them"
        elif getattr(config, "alora_invocation_tokens", None) or str(getattr(kind, "value", kind)) == "XLORA":
            why = "what it does to a token depends on tokens behind it"
        else:
            continue
        raise UnsupportedModel(f"adapter {name!r}: not supported; {why}")


class Adapters(NamedTuple):
    """The adapters of a model at one moment.

    Attributes:
        used: for each layer with adapters, by its path: the names of those that the next pass uses, in its order.
        containers: for each such layer: the names of what holds the adapters' tensors.
        facts: what else the next pass depends on: of each module, its path and its numbers, flags and texts.

    Example:
        >>> Adapters.of(torch.nn.Linear(2, 2), str).place("weight")
        ('weight', False)
    """

    used: dict[str, tuple[str, ...]]
    containers: dict[str, frozenset[str]]
    facts: list[tuple[str, Any]]

    @classmethod
    def of(cls, model: Any, tensor: Callable[[torch.Tensor], Any]) -> Adapters:
        """Look at all modules of `bare(model)`. Changes nothing.

        Args:
            model: a transformers model.
            tensor: says what stands in the facts for a tensor that is no parameter and no buffer.
        """
        found = cls({}, {}, [])
        foreign = [(path, module) for path, module in model.named_modules() if is_foreign(type(module))]
        for path, module in foreign:
            if has_adapters(module):
                found.used[path] = used_adapters(module)
                found.containers[path] = _containers(module)
        for path, module in foreign:
            where, _ = found.place(path)
            facts = facts_of(module, tensor)
            if where is not None and facts is not None:
                found.facts.append((where, facts))
        return found

    def place(self, path: str) -> tuple[str | None, bool]:
        """Return what a tensor or module is called without adapters, and whether it belongs to one.

        The name of an adapter becomes its place among those that are used. None if it takes no part in the next pass.
        """
        if not self.used:
            return path, False
        kept, owned, skip, parts = [], False, False, path.split(".")
        for at, part in enumerate(parts):
            here = ".".join(parts[:at])
            if skip:
                skip = False
            elif here in self.used and part in self.containers[here] and at + 1 < len(parts):
                if parts[at + 1] not in self.used[here]:
                    return None, True
                kept += [part, str(self.used[here].index(parts[at + 1]))]
                owned = skip = True
            elif here not in self.used or part not in _WRAPPED:
                kept.append(part)
        return ".".join(kept), owned


def is_foreign(kind: type) -> bool:
    """Whether neither torch nor transformers made a class of modules: its attributes may change what it computes."""
    return kind.__module__.partition(".")[0] not in _KNOWN


def has_adapters(module: Any) -> bool:
    """Whether a module is a layer with adapters, as peft has them."""
    return hasattr(type(module), "adapter_layer_names")


def used_adapters(module: Any) -> tuple[str, ...]:
    """Return the names of the adapters of a layer that the next pass uses, in its order."""
    if module.disable_adapters or module.merged_adapters:
        return ()  # merged: the weights themselves say it
    there = {key for name in module.adapter_layer_names for key in _keys(getattr(module, name, None))}
    return tuple(name for name in module.active_adapters if name in there)


def facts_of(module: Any, tensor: Callable[[torch.Tensor], Any]) -> Any:
    """Return the class of a foreign module and its numbers, flags and texts; None if it does nothing now.

    Of a layer with adapters, only what belongs to those that are used. `tensor` says what stands for a tensor.
    """

    def other(value: Any) -> Any:
        return tensor(value) if isinstance(value, torch.Tensor) else type(value).__name__

    own = {name: value for name, value in vars(module).items() if name not in _SILENT}
    if has_adapters(module):
        used = used_adapters(module)
        if not used:
            # A merged layer that is disabled takes its adapters out again in the next pass, not to the last bit.
            return "unmerges" if module.disable_adapters and module.merged_adapters else None
        every = {key for name in _containers(module) for key in _keys(getattr(module, name, None))}
        own = {name: _of_used(value, used, every) for name, value in own.items() if not name.startswith("_")}
    return [type(module).__name__, plain(own, other)]


def _containers(module: Any) -> frozenset[str]:
    return frozenset((*module.adapter_layer_names, *getattr(module, "other_param_names", ())))


def _keys(container: Any) -> list[str]:
    return list(container.keys()) if hasattr(container, "keys") else []


def _of_used(value: Any, used: tuple[str, ...], every: set[str]) -> Any:
    is_by_adapter = isinstance(value, dict) and bool(value) and every.issuperset(value)
    return [value.get(name) for name in used] if is_by_adapter else value
