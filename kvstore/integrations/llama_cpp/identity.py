"""Whose caches the states of a llama.cpp model are, read from its GGUF file."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from kvstore.core.fingerprints import MORE, SAMPLED
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.errors import ConfigError, UnsupportedModel
from kvstore.integrations.llama_cpp.form import StateForm
from kvstore.integrations.llama_cpp.gguf import GGUFHead, read_head
from kvstore.integrations.llama_cpp.types import dtype_of

# Architectures whose keys are rotated in pairs of neighbours, and in pairs half a head apart. Others are kept as they
# are, and are never moved to other positions.
_NEIGHBOURS = ("arcee", "command-r", "ernie4_5", "granite", "llama", "mistral3", "olmo", "smollm3")
_HALVES = (
    "gemma",
    "gptneox",
    "olmo2",
    "phi2",
    "phi3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "stablelm",
    "starcoder2",
)
# Metadata of models that keep something else than keys and values of all tokens in all layers.
_KEPT = {
    "attention.kv_lora_rank": "latents",
    "attention.sliding_window": "the last tokens alone in some layers",
    "nextn_": "layers for drafts",
    "rope.dimension_sections": "positions of several dimensions",
    "shortconv.": "states of convolutions",
    "ssm.": "recurrent states",
    "wkv": "recurrent states",
}
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def identity_from_gguf(
    path: str | os.PathLike[str],
    *,
    cache_type: str = "f16",
    flash_attention: bool = True,
    state_version: int = 4,
    computed_with: str = "",
) -> ModelIdentity:
    """Make the identity of a GGUF model in a llama.cpp context.

    The fingerprint is a SHA-256 over all metadata but labels, and over names, shapes, types and a sample of every
    tensor: another model never has the same one, an edit of single values may. Takes some 100 ms.

    Args:
        path: the GGUF file; of a model that is split the first of its files.
        cache_type: "f16", "bf16" or "f32": of K and of V in the context (`type_k`, `type_v`, `--cache-type-k`).
        flash_attention: whether the context attends so; "auto" does on CPUs. Where it does not, saving says so.
        state_version: of the library, 4 since October 2026, 3 before.
        computed_with: what else changes keys and values, in words of your own: overrides of the rotary embedding, LoRA
            adapters and their scales, control vectors. Other words, other caches.

    Raises:
        ConfigError: the file cannot be read, or an argument does not fit.
        UnsupportedModel: names what the model keeps that is not stored.

    Example:
        >>> identity_from_gguf("model.gguf", cache_type="q8_0")
        Traceback (most recent call last):
        kvstore.errors.ConfigError: cache_type: expected f16, bf16 or f32, found 'q8_0'; quantised caches are not stored
    """
    dtype = dtype_of(cache_type)
    if dtype is None:
        raise ConfigError(
            f"cache_type: expected f16, bf16 or f32, found {cache_type!r}; quantised caches are not stored"
        )
    if not isinstance(computed_with, str) or MORE in computed_with:
        raise ConfigError(f"computed_with: expected text without {MORE!r}, found {computed_with!r}")
    head = _read_all(os.fspath(path))
    architecture = head.metadata.get("general.architecture")
    facts = _Facts(head, architecture if isinstance(architecture, str) else "")
    layers = _layers(facts)
    if not layers:
        raise ConfigError(f"{os.fspath(path)}: the file names no layers; it is damaged, or holds no language model")
    paired = facts.rotated(layers[0].key_dim) if architecture in _NEIGHBOURS else 0
    parts = [SAMPLED + head.computes.hexdigest(), StateForm(state_version, bool(flash_attention), paired).text]
    if computed_with:
        parts.append(f"with:{computed_with}")
    return ModelIdentity(
        str(head.metadata.get("general.name") or os.path.basename(os.fspath(path))),
        "",
        MORE.join(parts),
        "gguf-sha256:" + head.words.hexdigest(),
        KVLayout(layers, dtype, _rope(facts, layers)),
    )


def _read_all(path: str) -> GGUFHead:
    head = read_head(path)
    count = head.metadata.get("split.count", 1)
    found = _SPLIT.search(path)
    if count in (0, 1):
        return head
    if not found or int(found[1]) != 1 or int(found[2]) != count:
        raise ConfigError(
            f"{path}: the model is split into {count} files; name the first, NAME-00001-of-{count:05}.gguf"
        )
    for number in range(2, count + 1):
        read_head(f"{path[: found.start()]}-{number:05}-of-{count:05}.gguf", head)
    return head


class _Facts:
    """The metadata of an architecture, by the ends of their keys."""

    def __init__(self, head: GGUFHead, name: str) -> None:
        self.head, self.name = head, name

    def get(self, key: str, default: Any = None) -> Any:
        return self.head.metadata.get(f"{self.name}.{key}", default)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise ConfigError(f"the GGUF file has no usable {self.name}.{key}: {value!r}")
        return value

    def rotated(self, dim: int) -> int:
        count = self.whole("rope.dimension_count", dim)
        return count if 0 < count <= dim and count % 2 == 0 else 0


def _layers(facts: _Facts) -> tuple[LayerLayout, ...]:
    for key, value in facts.head.metadata.items():
        for begin, what in _KEPT.items():
            if value and key.startswith(f"{facts.name}.{begin}"):
                raise UnsupportedModel(f"{facts.name}: it keeps {what} ({key}); such caches are not supported")
    if facts.get("attention.causal", True) is False:
        raise UnsupportedModel(f"{facts.name}: it is an encoder and keeps no cache")
    count, heads = facts.whole("block_count"), facts.get("attention.head_count")
    kv = facts.get("attention.head_count_kv", heads)
    each = kv if isinstance(kv, list) else [kv] * min(count, 4096)
    if len(each) != count or not all(isinstance(x, int) and x > 0 for x in each):
        raise UnsupportedModel(f"{facts.name}: not every layer has heads of keys and values ({kv!r:.80})")
    if facts.get("attention.key_length") is None and not isinstance(heads, int):
        raise UnsupportedModel(f"{facts.name}: its layers have different numbers of heads and no key_length")
    width = facts.whole("embedding_length") // heads if isinstance(heads, int) and heads else None
    key_dim, value_dim = facts.whole("attention.key_length", width), facts.whole("attention.value_length", width)
    return tuple(LayerLayout(x, key_dim, value_dim) for x in each)


def _rope(facts: _Facts, layers: tuple[LayerLayout, ...]) -> str:
    """The rotary embedding; with "pairs" where keys are not to be moved."""
    dim = layers[0].key_dim
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(facts.get("rope.freq_base", 10000.0))}
    rotated = facts.rotated(dim)
    if rotated and rotated != dim:
        rope["partial_rotary_factor"] = rotated / dim
    scaled = facts.get("rope.scaling.type", "none") != "none" or facts.get("rope.scale_linear", 1.0) != 1.0
    factors = [name for name in facts.head.tensors if name.startswith("rope_")]
    if scaled or factors or not rotated or facts.name not in _NEIGHBOURS + _HALVES:
        rope["pairs"] = f"llama.cpp {facts.name}"
    if any(name.startswith("rope_factors_long") for name in factors):
        raise UnsupportedModel(f"{facts.name}: with rope type longrope keys depend on the size of the context")
    return json.dumps(rope, sort_keys=True)
