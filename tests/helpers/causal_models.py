"""A tiny model of every causal class of transformers that a store takes, and each field of its config turned."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers import layout_from_config

Found = TypeVar("Found")
VOCABULARY, MOST_PARAMETERS = 96, 2_000_000
TOKENS = torch.randint(4, VOCABULARY, (1, 21), generator=torch.Generator().manual_seed(7))
_SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dim_ff", "dff", "d_inner", "n_inner"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "input_embedding_size", "output_embedding_size", "block_ff_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "block_size", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k"), 3),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_dim"), 32),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "num_expert_groups"), 4),
    **dict.fromkeys(("topk_group", "num_limited_groups"), 2),
    **dict.fromkeys(("vocab_size", "n_tokens", "n_words", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "dim_head", "qk_head_dim"), 8),
    "num_key_value_heads": 2,
    "rotary_dim": 4,
    "type_vocab_size": 2,
    "first_k_dense_replace": 1,
}


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


def tiny_config(kind: Any, **changes: Any) -> Any:
    """The config of a class, of which `_SMALL` makes the sizes small."""
    with quiet():
        given = vars(kind())
        small = {name: _SMALL[name] for name, value in given.items() if name in _SMALL and isinstance(value, int)}
        if given.get("num_key_value_heads", 0) == given.get("num_attention_heads"):
            small["num_key_value_heads"] = 4
        ends = {x: i for i, x in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")) if x in given}
        decoder = {"is_decoder": True} if "is_decoder" in given else {}
        return kind(**small | ends | decoder | _OF_CLASS.get(kind.__name__, {}) | changes)


_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_OF_CLASS: dict[str, dict[str, Any]] = {
    "Dots1Config": {
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    "GPTNeoConfig": {"attention_types": [[["global"], 3]]},
    "HunYuanDenseV1Config": {"head_dim": 8, **_ROPE},
    "HunYuanMoEV1Config": {"head_dim": 8, **_ROPE},
    "NemotronConfig": {"head_dim": 8},
    "XmodConfig": {"default_language": "en_XX"},
}


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
