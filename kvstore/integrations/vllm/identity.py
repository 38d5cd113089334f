"""Whose caches a vLLM server keeps: its model, as vLLM loaded it, and vLLM itself. What cannot be kept is refused.

Knows vLLM's configs by their attributes only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from kvstore.core.fingerprints import MORE
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.core.rope_types import LENGTH_DEPENDENT
from kvstore.errors import ConfigError, UnsupportedModel
from kvstore.integrations.transformers.config_facts import HARMLESS, config_facts
from kvstore.integrations.transformers.describe import layout_from_config
from kvstore.integrations.vllm.checkpoint import FORMATS, checkpoint_fingerprint, checkpoint_folder

_PART = 32  # hexadecimal digits, as in other parts of fingerprints


def check_supported(config: Any, groups: Sequence[Any]) -> None:
    """Refuse what the store cannot keep.

    Args:
        config: a VllmConfig.
        groups: the KV cache groups of vLLM's KVCacheConfig.

    Raises:
        ConfigError: names the setting of vLLM.
        UnsupportedModel: names what the model keeps.
    """
    parallel = config.parallel_config
    for name in ("world_size", "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"vLLM's {name} is {getattr(parallel, name)}: the store serves one worker; run one a GPU")
    if config.speculative_config is not None:
        raise ConfigError("vLLM's speculative_config: layers of draft models are not stored; run without it")
    if config.kv_transfer_config.kv_role != "kv_both":
        raise ConfigError(
            f"kv_role is {config.kv_transfer_config.kv_role!r}: set it to 'kv_both', which loads and saves"
        )
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_load_failure_policy: set it to 'recompute': a block that left the store is computed again, and is no "
            "reason to fail a request"
        )
    if config.load_config.load_format not in FORMATS:
        raise ConfigError(
            f"vLLM's load_format is {config.load_config.load_format!r}: the store knows a model by its safetensors "
            f"files; use one of {', '.join(FORMATS)}"
        )
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise UnsupportedModel(f"vLLM keeps {len(groups)} groups of caches ({kinds}): only models with one are stored")
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec":
        raise UnsupportedModel(f"vLLM keeps a {type(spec).__name__}: only keys and values of attention are stored")
    packed = int(spec.kv_quant_mode) or spec.num_head_slots or spec.state_content_bytes or spec.tokens_per_state != 1
    if packed or spec.head_size != spec.head_size_v or getattr(spec, "non_causal", False):
        raise UnsupportedModel(f"vLLM keeps its caches in a form that is not stored: {spec}")


def layer_names(group: Any) -> list[str]:
    """Return the names of the layers of a group, in the order of the numbers in them.

    Raises:
        UnsupportedModel: a name has no number, or two have the same.
    """
    numbers = {name: re.findall(r"(?<=\.)\d+(?=\.)", name) for name in group.layer_names}
    if not all(len(found) == 1 for found in numbers.values()) or len({x[0] for x in numbers.values()}) < len(numbers):
        raise UnsupportedModel(f"layers are not numbered one by one: {', '.join(list(numbers)[:4])} ...")
    return sorted(numbers, key=lambda name: int(numbers[name][0]))


def layout_of(config: Any, group: Any) -> KVLayout:
    """Return the layout of a group of caches: all layers keep all tokens, as vLLM keeps them in one group.

    Raises:
        UnsupportedModel: the model keeps something that cannot be stored.
    """
    spec, hf_config = group.kv_cache_spec, config.model_config.hf_config
    told = layout_from_config(hf_config, spec.dtype)
    for kind in LENGTH_DEPENDENT:
        if f'"{kind}"' in told.rope:
            raise UnsupportedModel(
                f"rope type {kind}: vLLM chooses the angles by the longest sequence that it may serve"
            )
    # Layers of different kinds may be rotated by different angles, and are one kind here.
    rope = told.rope if len({layer.kind for layer in told.layers}) == 1 else "none"
    layer = LayerLayout(spec.num_kv_heads, spec.head_size, spec.head_size_v)
    return KVLayout((layer,) * len(group.layer_names), str(spec.dtype).removeprefix("torch."), rope, media=told.media)


def identity_of(config: Any, group: Any, version: str, backend: str) -> ModelIdentity:
    """Return the identity of the model that vLLM loaded.

    Its `weights` have three parts: a fingerprint of the checkpoint's files, "config:", a hash over every field of the
    model's config that is not known to be harmless, and "engine:", vLLM with its version, device, attention backend and
    quantisation. Other engines compute other last bits, and so may the next version: their caches never mix.

    Args:
        config: a VllmConfig.
        group: its only group of caches.
        version: of vLLM.
        backend: name of the attention backend.

    Raises:
        UnsupportedModel: see `layout_of`, `checkpoint_folder`, `checkpoint_fingerprint`.
    """
    model = config.model_config
    folder = checkpoint_folder(model.model, model.revision, config.load_config.download_dir)
    facts = json.dumps(config_facts(model.hf_config, HARMLESS), sort_keys=True)
    device = str(getattr(config.device_config, "device_type", None) or config.device_config.device)
    engine = f"vllm {version} {device} {backend} {model.quantization or 'unquantised'}"
    return ModelIdentity(
        model=os.path.basename(os.path.abspath(model.model)) if os.path.isdir(model.model) else model.model,
        revision=str(model.revision or ""),
        weights=MORE.join(
            [
                checkpoint_fingerprint(folder),
                "config:" + hashlib.sha256(facts.encode()).hexdigest()[:_PART],
                "engine:" + engine,
            ]
        ),
        tokenizer="",
        layout=layout_of(config, group),
    )
