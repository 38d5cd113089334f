"""Tiny random models, by the name that their layouts have, and what moves the keys of their caches."""

from __future__ import annotations

from typing import Any

import causal_models
import torch
from transformers import CONFIG_MAPPING

from kvstore.codecs import KVView
from kvstore.codecs.donor.rotate import rotate_keys
from kvstore.core.layout import KVLayers, KVLayout

VOCABULARY = 96
_SIZES = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "moe_topk": 2,
}


def model_of(name: str, **changes: Any) -> Any:
    """A model of this `model_type`, float32, in evaluation mode. changes: fields of the config."""
    return causal_models.build(causal_models.tiny_config(CONFIG_MAPPING[name], _SIZES, **changes))


def tokens_of(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def prefilled(model: Any, tokens: torch.Tensor, begin: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(K, V) of every layer, `[1, heads, tokens, dim]`, of tokens at positions from `begin` on; with latents (latent,
    rotated key)."""
    positions = torch.arange(begin, begin + len(tokens))[None]
    with causal_models.quiet():
        cache = model(tokens[None], position_ids=positions, use_cache=True).past_key_values
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def moved(layout: KVLayout, layers: KVLayers, shift: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of the layers at positions higher by `shift`."""
    copies = [(k.clone(), v.clone()) for k, v in layers]
    rotate_keys(KVView.of_layers(layout, [(k[0], v[0]) for k, v in copies]), shift)
    return copies
