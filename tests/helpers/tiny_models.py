"""Tiny random models of the architectures that the transformers tests run on: float32, two or three layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    T5Config,
)

VOCABULARY = 199
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny(name: str, seed: int = 0, **changes: Any) -> Any:
    """One of "llama", "qwen3", "gpt2", "gpt_neox", "gemma3", "gemma3-full" (no sliding layer), in evaluation mode."""
    torch.manual_seed(seed)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**_COMMON | {"head_dim": 16} | changes)).eval()
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_COMMON | {"head_dim": 24} | changes)).eval()
    if name == "gpt2":
        small = {"vocab_size": VOCABULARY, "n_positions": 512, "n_embd": 48, "n_layer": 2, "n_head": 3}
        ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**small | ends | changes)).eval()
    if name == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**_COMMON | {"num_key_value_heads": None} | changes)).eval()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    if name == "gemma3-full":
        kinds = ["full_attention"] * 3
    layers = {"layer_types": kinds, "head_dim": 16, "sliding_window": 32}
    return Gemma3ForCausalLM(Gemma3TextConfig(**_COMMON | layers | changes)).eval()


def refused_configs() -> dict[str, Any]:
    """Configs that cannot be stored, by the word that the error must name."""
    return {
        "sliding_attention": MistralConfig(sliding_window=64),
        "linear_attention": MambaConfig(),
        "multi-head latent attention": DeepseekV3Config(),
        "encoder-decoder": T5Config(),
        "linear_attention, hybrid": Qwen3NextConfig(),
    }
