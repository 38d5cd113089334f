"""DeepSeek-V3-style: multi-head latent attention; a layer keeps one latent of 256 and one rotated key of 64 a token.

All layers are dense (DeepSeek's first ones are, too): experts change what a cache costs to compute, not what it holds.
10.1 M parameters, 5,120 bytes of cache a token.
"""

from __future__ import annotations

from benchmarks.models.recipe import Recipe

LAYERS = 8
RECIPE = Recipe(
    "deepseek3",
    "deepseek_v3",
    {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": LAYERS,  # no layer has experts
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "num_mtp_layers": 0,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
    },
)
QUICK = RECIPE.quick({"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 2})
