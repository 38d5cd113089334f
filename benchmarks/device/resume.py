"""How soon the first token comes on a GPU: a cache from disk into the GPU's memory, against recomputing it.

The model is a Llama of a billion parameters (16 layers, 8 key/value heads of 128) with random weights, in bf16; only
times are read from it. Resume: open the store, the page cache dropped, `get(..., device=)`, a forward pass of one
token. Recompute: a forward pass of the whole prompt. The peer of the bytes a second is a copy of the raw bytes from
pinned memory. The restored cache must have every bit of the one that was put, and `logits_equal` says whether the token
after it has the same logits as after the cache in memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import MIB, Rows, drop_page_cache, scratch
from benchmarks.device.machine import Layers, Machine, WrongBits, check, nbytes
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig

CODECS = ("splitzip", "raw")


def measure(machine: Machine, rows: Rows) -> None:
    model = load(machine)
    for length in machine.choose((2048, 8192), (2048,), (96,)):
        for codec in CODECS:
            with scratch("gpu") as folder, torch.inference_mode():
                measure_length(machine, rows, model, length, codec, folder / "store")


def load(machine: Machine) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    wide = machine.choose((2048, 8192, 16, 32000), (2048, 8192, 16, 32000), (32, 64, 2, 100))
    hidden, inner, layers, vocabulary = wide
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        num_attention_heads=hidden // machine.dim,
        num_key_value_heads=machine.heads,
        head_dim=machine.dim,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    with torch.device(machine.device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def measure_length(machine: Machine, rows: Rows, model: Any, length: int, codec: str, folder: Path) -> None:
    from kvstore.integrations.transformers import layout_from_config

    prompt = torch.randint(model.config.vocab_size, (1, length + 1), device=machine.device)
    ids = prompt[0, :length].cpu().numpy().astype(np.uint32)
    cache = model(prompt[:, :length], use_cache=True, logits_to_keep=1).past_key_values
    want: Layers = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
    raw = nbytes(want)
    layout = layout_from_config(model.config, model.dtype)
    identity = ModelIdentity("random", "1", "weights", "tokenizer", layout)
    config = StoreConfig(host=TierConfig(0), disk=TierConfig(2 * raw + 256 * MIB, codec))
    with KVStore(folder, identity, config) as store:
        store.put(ids, cache)
        store.flush()
        stored = store.stats()["disk"]["bytes"]
    expected = last_logits(model, prompt, cache, length)
    parts: dict[str, list[float]] = {"open": [], "get": []}
    equal: list[bool] = []

    def resume() -> float:
        machine.wait()
        drop_page_cache(folder)
        begin = time.perf_counter()
        with KVStore(folder, identity, config) as store:
            opened = time.perf_counter()
            hit = store.get(ids, device=machine.device)
            restored = time.perf_counter()
            if hit is None or hit.tokens != length:
                raise WrongBits(f"resume/{codec}: expected {length} tokens, found {hit and hit.tokens}")
            logits = last_logits(model, prompt, hit.cache(), length)
            machine.wait()
            seconds = time.perf_counter() - begin
            check([(k[..., :length, :], v[..., :length, :]) for k, v in hit.layers], want, f"resume/{codec}")
            equal.append(torch.equal(logits, expected))
        parts["open"].append(opened - begin)
        parts["get"].append(restored - opened)
        return seconds

    flat, pinned = machine.empty(raw), machine.pinned(raw)
    functions: dict[str, Callable[[], object]] = {
        "resume": resume,
        "recompute": machine.by_clock(lambda: last_logits(model, prompt, None, 0)),
        "copy": machine.by_clock(lambda: flat.copy_(pinned, non_blocking=True)),
    }
    resume(), [samples.clear() for samples in parts.values()]
    found = machine.interleave(functions, machine.choose(5, 3, 1))
    case, got = f"resume/{codec}/{length}", statistics.median(parts["get"])
    rows.add(case, "ttft_s", found["resume"], "s, with open", "recompute", found["resume"] / found["recompute"])
    rows.add(f"recompute/{length}/{codec}", "ttft_s", found["recompute"], "s")
    rows.add(case, "open_s", statistics.median(parts["open"]), "s")
    rows.add(case, "get_GBps", raw / got / 1e9, "GB/s", "pinned copy", found["copy"] / got)
    rows.add(case, "ratio", raw / stored, "raw bytes / stored bytes")
    rows.add(case, "logits_equal", int(all(equal)), "1 = yes")
    rows.add(case, "bit_identical", 1, "1 = yes")


def last_logits(model: Any, prompt: torch.Tensor, cache: Any, known: int) -> torch.Tensor:
    """Those after the last token of `prompt`, whose first `known` tokens are in `cache`, which grows."""
    output = model(prompt[:, known:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].clone()
    return logits
