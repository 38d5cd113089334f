"""Tiny GGUF models with random weights, for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from benchmodules import load

Llama: Any = load("workloads.llama").Llama
_LAYERS, _HEADS, _KV_HEADS, _DIM, _VOCAB = 3, 4, 2, 32, 320


def write_gguf(path: Path, seed: int = 0, architecture: str = "llama", **facts: Any) -> Path:
    """A model of 3 layers with two heads of keys and values each, 32 wide. `facts` replace and add metadata."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    width = _HEADS * _DIM
    numbers = {
        "block_count": _LAYERS,
        "context_length": 4096,
        "embedding_length": width,
        "feed_forward_length": 2 * width,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _KV_HEADS,
        "rope.dimension_count": _DIM,
        "vocab_size": _VOCAB,
    } | facts
    for key, value in numbers.items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"w{number}" for number in range(len(tokens), _VOCAB)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (_VOCAB - 259)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * _VOCAB)
    writer.add_token_types(kinds)
    sizes = {"attn_q": (width, width), "attn_output": (width, width), "ffn_gate": (2 * width, width)}
    sizes |= {"attn_k": (_KV_HEADS * _DIM, width), "attn_v": (_KV_HEADS * _DIM, width)}
    sizes |= {"ffn_up": (2 * width, width), "ffn_down": (width, 2 * width), "attn_norm": (width,), "ffn_norm": (width,)}
    named = {f"blk.{layer}.{name}": size for layer in range(_LAYERS) for name, size in sizes.items()}
    named |= {"token_embd": (_VOCAB, width), "output_norm": (width,), "output": (_VOCAB, width)}
    for name, size in named.items():
        values = random.standard_normal(size) * (0.3 if len(size) > 1 else 0.0) + (0.0 if len(size) > 1 else 1.0)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
