"""The sizes of tiny causal models: what every class of configs gets, and what single classes need besides."""

from __future__ import annotations

from typing import Any

VOCABULARY = 96
SMALL: dict[str, int] = {
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
    **dict.fromkeys(("depth", "encoder_layers"), 4),
    **dict.fromkeys(("image_size", "out_hidden_size", "output_dim"), 32),
}
MEDIA = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
"""Fields of ids that stand for images or sound: the last ones of the vocabulary."""
TEXT = VOCABULARY - len(MEDIA)
"""Ids below this one are text."""


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}
_SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_GEMMA4 = {
    **_SHARED,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
}
_KIMI = {
    **_LINEAR,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "qk_head_dim": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
OF_CLASS: dict[str, dict[str, Any]] = {
    "BailingHybridConfig": _KIMI,
    "BambaConfig": {**_MAMBA, "attn_layer_indices": [1]},
    "BlenderbotConfig": {"encoder_layers": 3},
    "BltConfig": {"encoder_hash_byte_group_vocab": 500},
    "CohereCompassTextConfig": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE["rope_parameters"]),
    },
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV2Config": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_routed_experts": 4},
    "Dots1Config": {
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    "Dots3NoteTextConfig": {
        "head_dim": 24,
        **{f"swa_{name}": size for name, size in (("num_attention_heads", 4), ("num_key_value_heads", 4))},
        **{f"swa_{name}": size for name, size in (("q_lora_rank", 16), ("kv_lora_rank", 16), ("head_dim", 24))},
        **{f"swa_{name}": size for name, size in (("qk_nope_head_dim", 16), ("v_head_dim", 12))},
    },
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
    "GPTNeoConfig": {"attention_types": [[["global"], 3]]},
    "Gemma3nTextConfig": {
        **_SHARED,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": 48,
        "laurel_rank": 4,
    },
    "Gemma4TextConfig": _GEMMA4,
    "Gemma4UnifiedTextConfig": _GEMMA4,
    "GraniteMoeHybridConfig": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"]},
    "HunYuanDenseV1Config": {"head_dim": 8, **_ROPE},
    "HunYuanMoEV1Config": {"head_dim": 8, **_ROPE},
    **{
        f"{name}Config": {"layer_types": ["hybrid_sliding", "hybrid", "hybrid"]}
        for name in ("Inkling2Text", "InklingText")
    },
    "JambaConfig": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
    },
    "KimiLinearConfig": _KIMI,
    "Lfm2Config": {"layer_types": ["conv", "full_attention", "conv"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "LongcatFlashConfig": {"expert_ffn_hidden_size": 32, "zero_expert_num": 4, "qk_head_dim": 24, "head_dim": 8},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 8},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"num_key_value_heads": 4, "head_dim": 8},
    "NemotronHConfig": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    "ReformerConfig": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16)},
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "attention_head_dim": 16,
        "mamba_d_state": 8,
        "chunk_size": 16,
        "adapter_rank": 8,
    },
    "ZambaConfig": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "mamba_d_state": 8,
    },
    "ZayaConfig": {
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "num_experts_per_tok": 1,
        "sliding_window": 16,
        "router_hidden_size": 16,
    },
    **{f"{name}Config": _LINEAR for name in ("MiniMax", "Qwen3Next", "Qwen3_5MoeText", "Qwen3_5Text", "Qwen4ExpText")},
}
"""What a tiny model of a class needs besides, so that it has one layer of each kind at least."""
