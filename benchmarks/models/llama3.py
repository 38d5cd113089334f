"""Llama-3-style: grouped-query attention with 4 KV heads of 64, every layer full, rotary type llama3.

Llama 3.1's own numbers in small: rotary base 500,000 and factor 8; "original" positions are those that it is trained
on, so that the low frequencies are stretched as they are there. 10.0 M parameters, 8,192 bytes of cache a token.
"""

from __future__ import annotations

from benchmarks.models.recipe import Recipe

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
RECIPE = Recipe(
    "llama3",
    "llama",
    {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
    },
)
QUICK = RECIPE.quick({"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2})
