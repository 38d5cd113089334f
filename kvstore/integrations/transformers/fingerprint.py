"""Fingerprints of a model's weights and of its tokenizer: other weights make other caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from kvstore.errors import UnsupportedModel

SAMPLES = 256  # elements of every tensor that the fingerprint reads
SAMPLED = "sampled-sha256:"  # marks fingerprints made here; others are a caller's own and are not compared
# Numbers of a config that the forward pass uses and that neither the weights nor the layout show. A list, not
# the whole config: new fields of newer versions must not change the identity of an old model.
COMPUTED_WITH = (
    "activation_function",
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "hidden_act",
    "hidden_activation",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "model_type",
    "norm_eps",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts_per_tok",
    "query_pre_attn_scalar",
    "reorder_and_upcast_attn",
    "residual_multiplier",
    "rms_norm_eps",
    "routed_scaling_factor",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
)


def weights_fingerprint(model: Any) -> str:
    """Return the fingerprint of a model's weights. Changes nothing. Thread-safe, for it shares no state.

    SHA-256 over name, shape, dtype and 256 evenly spread elements (first and last included) of every parameter and
    persistent buffer, and over the numbers in `COMPUTED_WITH`.

    Args:
        model: a loaded transformers model.

    Raises:
        UnsupportedModel: names a tensor that is not loaded.
    """
    hasher = hashlib.sha256()
    config = model.config.get_text_config(decoder=True)
    numbers = {key: getattr(config, key, None) for key in COMPUTED_WITH}
    hasher.update(json.dumps({k: v for k, v in numbers.items() if v is not None}, sort_keys=True).encode())
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in _tensors(model):
        if tensor.is_meta:
            raise UnsupportedModel(f"{name}: not loaded (it is on the meta device); load the weights first")
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.numel():
            samples.setdefault(tensor.device, []).append(_sample(tensor))
    for parts in samples.values():  # one transfer per device, not one per tensor
        hasher.update(torch.cat(parts).cpu().numpy().tobytes())
    return SAMPLED + hasher.hexdigest()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name; tied tensors once. Non-persistent buffers are derived
    values."""
    seen: set[int] = set()
    for name, value in sorted(model.state_dict(keep_vars=True).items()):
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, value.detach()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 `[bytes]`: evenly spread elements of `tensor`, without copying all of it even where it is
    strided."""
    places = _places(tensor.numel(), tensor.device)
    flat = tensor.is_contiguous()
    values = tensor.view(-1)[places] if flat else tensor[torch.unravel_index(places, tensor.shape)]
    return values.view(torch.uint8)


@lru_cache(maxsize=4096)
def _places(count: int, device: torch.device) -> torch.Tensor:
    steps = torch.arange(min(SAMPLES, count), dtype=torch.int64)
    return (steps * (count - 1) // max(1, len(steps) - 1)).to(device)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the fingerprint of what maps text to token ids.

    SHA-256 of the whole fast tokenizer except its truncation and padding, which callers switch; of a slow one, of its
    vocabulary and special tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = backend.to_str()  # {"version", "truncation", "padding", "added_tokens", ...} in this order
        text = text[text.index('"added_tokens"') :]
    else:
        text = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
