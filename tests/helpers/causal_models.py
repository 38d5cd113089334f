"""A tiny model of every causal class of transformers that a store takes, and each field of its config turned."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from causal_sizes import MEDIA, OF_CLASS, SMALL, TEXT
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers import layout_from_config

Found = TypeVar("Found")
MOST_PARAMETERS = 2_000_000
TOKENS = torch.randint(4, TEXT, (1, 21), generator=torch.Generator().manual_seed(7))


def config_classes() -> list[Any]:
    """The config classes of all causal models, each once, by name."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING.keys()), key=lambda kind: str(kind.__name__))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers warns of what a tiny model lacks."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def tiny_config(kind: Any, sizes: dict[str, int] | None = None, **changes: Any) -> Any:
    """The config of a class, of which `SMALL` makes the sizes small, and those of the configs inside.

    Args:
        kind: the class.
        sizes: more fields to make small, wherever they are set.
        changes: fields of the config itself.
    """
    with quiet():
        given = vars(kind())
        small = {name: SMALL[name] for name, value in given.items() if name in SMALL and isinstance(value, int)}
        if given.get("num_key_value_heads", 0) == given.get("num_attention_heads"):
            small["num_key_value_heads"] = 4
        small |= {name: size for name, size in (sizes or {}).items() if _is_set(given, name)}
        small |= {name: place for place, name in enumerate(MEDIA, TEXT) if given.get(name)}
        ends = {x: i for i, x in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")) if x in given}
        decoder = {"is_decoder": True} if "is_decoder" in given else {}
        parts = {x: tiny_config(type(value), sizes) for x, value in given.items() if hasattr(value, "model_type")}
        return kind(**small | ends | decoder | parts | OF_CLASS.get(kind.__name__, {}) | changes)


def _is_set(given: dict[str, Any], name: str) -> bool:
    return name in given and (given[name] is not None or name == "sliding_window")


def build(config: Any, like: Any = None) -> Any:
    """A model of a config, in evaluation mode; with the weights of `like`, or with chance ones that are not small."""
    with quiet():
        if like is None:
            with torch.device("meta"):  # which classes shrink only in part, this says without their memory
                size = sum(x.numel() for x in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
            if size > MOST_PARAMETERS:
                raise MemoryError(f"{type(config).__name__}: a tiny model has {size} parameters")
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    if like is not None:
        model.load_state_dict(like.state_dict())
        return model
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) * 0.4 + (1.0 if "norm" in name.lower() else 0.0))
    return model


def keys_and_values(model: Any) -> list[torch.Tensor]:
    with quiet(), torch.no_grad():
        cache = model(TOKENS, use_cache=True).past_key_values
    pairs = [(layer.keys, layer.values) for layer in cache.layers if layer.keys is not None]
    return [tensor for pair in pairs for tensor in pair]


def turned(value: Any) -> list[Any]:
    """Other values of a number or a flag."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value // 2]
    if isinstance(value, float):
        return [value / 2 + 0.25]
    return []


def is_supported(config: Any) -> bool:
    try:
        layout_from_config(config, torch.float32)
    except UnsupportedModel:
        return False
    return True


def looked_at(kind: Any, needed: Iterable[str], look: Callable[[Any], Found]) -> tuple[Any, Found] | None:
    """A tiny model of a class, and what `look` finds of it. None for a class that no store takes, and for one that
    needs more than small numbers, unless `needed` has its name: then what was wrong is raised."""
    try:
        config = tiny_config(kind)
        if not is_supported(config):
            return None
        model = build(config)
        return model, look(model)
    except Exception:
        if kind.__name__.removesuffix("Config") in needed:
            raise
        return None
