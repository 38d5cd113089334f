"""Gemma-3-style: five sliding layers, then a full one; one KV head of 128, keys and queries normalised.

The window is 256 tokens (Gemma 3 has 512 or 1,024), so that it matters at 1,024. Sliding layers have the rotary base
10,000, full ones 1,000,000. 11.9 M parameters, 6,144 bytes of cache a token before windows.
"""

from __future__ import annotations

from benchmarks.models.recipe import Recipe

PATTERN = ["sliding_attention"] * 5 + ["full_attention"]
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
RECIPE = Recipe(
    "gemma3",
    "gemma3_text",
    {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "query_pre_attn_scalar": 128,
        "sliding_window": 256,
        "layer_types": PATTERN * 2,
        "max_position_embeddings": 8192,
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
    },
    steps=600,  # a step takes half as long again as one of the others
    short=450,
)
QUICK = RECIPE.quick(
    {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 32,
        "sliding_window": 32,
    }
)
