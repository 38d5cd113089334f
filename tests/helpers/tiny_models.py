"""Tiny random models of the architectures that the transformers tests run on: float32, two or three layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    FalconH1Config,
    Gemma3ForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
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
        "encoder-decoder": T5Config(),
        "heavily_compressed_attention": DeepseekV4Config(),
        "is_decoder is False": BertConfig(),
    }


def layouts_of_kinds() -> dict[str, Any]:
    """Configs whose caches are of other kinds than full attention, by kind."""
    return {
        "sliding": MistralConfig(sliding_window=64),
        "chunked": Llama4TextConfig(attention_chunk_size=64),
        "latent": DeepseekV3Config(),
        "shared": Gemma3nTextConfig(),
    }


_STATES_ALONE = ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id")
_WINDOW = {"sliding_window": 24}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def tiny_of_kind(name: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny model with windows or chunks of 24 tokens, with latents, or with states, in evaluation mode.

    changes: fields of the config.
    """
    torch.manual_seed(seed)
    config: Any
    if name == "mistral":
        config = MistralConfig(**_COMMON | _WINDOW | {"head_dim": 16})
    elif name == "gemma3":
        config = Gemma3TextConfig(**_COMMON | _WINDOW | {"layer_types": _KINDS, "head_dim": 16})
    elif name == "gpt-oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "layer_types": _KINDS}
        config = GptOssConfig(**_COMMON | _WINDOW | experts)
    elif name == "llama4":
        kinds = [kind.replace("sliding", "chunked") for kind in _KINDS]
        experts = {"num_local_experts": 2, "intermediate_size_mlp": 80, "layer_types": kinds, "head_dim": 16}
        config = Llama4TextConfig(**_COMMON | experts | {"attention_chunk_size": 24, "interleave_moe_layer_step": 2})
    elif name in ("deepseek-v3", "deepseek-v32"):
        widths = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "v_head_dim": 16}
        more = {"moe_intermediate_size": 16, "first_k_dense_replace": 2, "num_key_value_heads": 4}
        config = DeepseekV3Config(**_COMMON | widths | experts | more)
        if name == "deepseek-v32":
            index = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 12}
            config = DeepseekV32Config(**_COMMON | widths | experts | more | index)
    elif name == "qwen3-next":
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 16}
        dims = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "layer_types": kinds}
        config = Qwen3NextConfig(**_COMMON | heads | dims | sizes)
    elif name == "mamba2":
        states = {"num_heads": 8, "head_dim": 12, "expand": 2, "n_groups": 1, "state_size": 8, "chunk_size": 8}
        config = Mamba2Config(**{key: _COMMON[key] for key in _STATES_ALONE} | states)
    else:
        states = {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1}
        config = FalconH1Config(**_COMMON | states | {"head_dim": 16, "mamba_chunk_size": 8})
    for field, value in changes.items():
        setattr(config, field, value)
    return AutoModelForCausalLM.from_config(config).eval()
