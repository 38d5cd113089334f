"""What a model's config says of the pass that makes its caches: everything that is not known to be harmless."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

import torch

# Fields that change no key and no value, and why. tests/integrations/test_config_fields.py holds it for every model.
HARMLESS = frozenset(
    {
        # names and notes
        *("_name_or_path", "_commit_hash", "architectures", "auto_map", "tokenizer_class", "transformers_version"),
        *("id2label", "label2id", "problem_type", "task_specific_params", "_auto_class", "_post_init_done"),
        # what a pass returns, and how it is computed, but not what
        *("use_cache", "return_dict", "output_hidden_states", "output_router_logits"),
        *("_attn_implementation_internal", "_experts_implementation_internal"),
        *("base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "base_model_fsdp_plan"),
        *("distributed_config", "ignore_keys_at_rope_validation"),
        # training: dropout and losses
        *("activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout"),
        *("embd_pdrop", "embedding_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop"),
        *("classifier_dropout", "layerdrop", "router_aux_loss_coef", "router_z_loss_coef"),
        # token ids that `generate` looks for
        *("bos_token_id", "eos_token_id"),
    }
)
_DEFAULTS = {"_output_attentions": False}
"""Of fields that no class declares. With this one on, Falcon attends to what follows a token, too."""
IN_LAYOUT = frozenset({"dtype", "layer_types", "rope_parameters"})
"""Fields that `layout_from_config` reads whole: the identity has them in its layout."""
_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def in_layout(config: Any) -> frozenset[str]:
    """Return the fields of a config that the layout has whole: `IN_LAYOUT`, without the types of the layers if there
    are others than attention. Of these the layout knows only what they keep.

    Example:
        >>> from transformers import LlamaConfig
        >>> in_layout(LlamaConfig()) == IN_LAYOUT
        True
    """
    words = set(getattr(config, "layer_types", None) or ())
    return IN_LAYOUT if words <= _KINDS else IN_LAYOUT - {"layer_types"}


def config_facts(config: Any, without: frozenset[str] = HARMLESS) -> dict[str, Any]:
    """Return the fields of a config that differ from the defaults of its class, JSON-able. Changes nothing.

    Defaults are left out so that a field that a newer transformers adds does not change the identity of an old model.

    Args:
        config: a transformers config.
        without: fields to leave out, here and in the configs inside.

    Example:
        >>> from transformers import LlamaConfig
        >>> config_facts(LlamaConfig(hidden_size=64, use_cache=False), HARMLESS | IN_LAYOUT)["hidden_size"]
        64
    """
    defaults = _defaults(config.__class__)
    facts = {"model_type": config.model_type}
    for name, value in vars(config).items():
        if name not in without and not (name in defaults and _same(defaults[name], value)):
            facts[name] = plain(value, lambda inner: _inside(inner, without))
    return facts


def plain(value: Any, other: Callable[[Any], Any] = lambda value: type(value).__name__) -> Any:
    """Return a value as JSON has it: numbers, flags and texts as they are; `other` says what stands for the rest.

    Example:
        >>> plain({1: (2.5, None, object())})
        {'1': [2.5, None, 'object']}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(one, other) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, other) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return other(value)


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    if not is_dataclass(kind):
        return dict(_DEFAULTS)
    return _DEFAULTS | {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(kind)
    }


def _same(default: Any, value: Any) -> bool:
    return default is value or (type(default) is type(value) and bool(default == value))


def _inside(value: Any, without: frozenset[str]) -> Any:
    if hasattr(value, "model_type"):
        return config_facts(value, without)
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "to_dict"):  # how the weights are quantised
        return plain(value.to_dict(), str)
    return type(value).__name__
