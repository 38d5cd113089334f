"""What transformers models call their cache: "past_key_values", "cache_params" of models that keep states alone, and
"cache" of all from transformers 5.24 on, which warns of the other names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(model: Any) -> str:
    """Return what a model calls the argument that is its cache; one without adapters around it."""
    return _name_in(inspect.signature(model.forward).parameters)


def pass_arguments(model: Any, cache: Any) -> dict[str, Any]:
    """Return what a pass over new tokens is called with beside them: the cache, by the name that the model wants; and
    no logits but the last, of models that can leave out the others. The model is one without adapters around it."""
    parameters = inspect.signature(model.forward).parameters
    given = {_name_in(parameters): cache, "use_cache": True}
    return given | {"logits_to_keep": 1} if "logits_to_keep" in parameters else given


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, under whichever name; None without one."""
    return next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)


def cache_of(output: Any) -> Any:
    """Return the cache that a model, or `model.generate`, returned; None without one."""
    found = (getattr(output, name, None) for name in NAMES)
    return next((cache for cache in found if cache is not None), None)


def keeps_states_alone(cache: Any) -> bool:
    """Return whether no layer of a cache keeps keys: it does not know its length then. Waits for no layer."""
    layers = getattr(cache, "layers", ())
    return bool(layers) and not any(hasattr(layer, "get_seq_length") for layer in layers)


def _name_in(parameters: Mapping[str, Any]) -> str:
    return next((name for name in NAMES if name in parameters), "past_key_values")
