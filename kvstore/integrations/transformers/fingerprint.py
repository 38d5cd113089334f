"""Fingerprints of what a model computes with, and of its tokenizer: another one makes other caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from kvstore.core.fingerprints import MORE, SAMPLED
from kvstore.core.rope_types import LENGTH_DEPENDENT
from kvstore.errors import ConfigError, UnsupportedModel
from kvstore.integrations.transformers.adapters import Adapters, bare, check_adapters
from kvstore.integrations.transformers.config_facts import HARMLESS, config_facts, in_layout
from kvstore.integrations.transformers.packed import unpack

SAMPLES = 256  # elements of every tensor that the fingerprint reads
_OF_A_ROW = 4  # elements
_PART = 32  # hexadecimal digits of the parts behind the first
# Fields of the config in the first part of the fingerprint, which the first stores had alone. Never changed, so that
# they still open; the part "config" has every field.
_IN_WEIGHTS = (
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
    """Return the fingerprint of what a model computes with. Changes nothing. Thread-safe, for it shares no state.

    Up to four parts, each a SHA-256 behind its name:

    - the weights: name, shape, dtype and 256 evenly spread elements (first and last included) of every parameter and
      persistent buffer;
    - "config": every field of the config that is not known to be harmless (`HARMLESS`) and not in the layout, and
      the buffers that are not saved with the weights;
    - "rows": four elements of every row of every embedding, for some tokens may be all that was trained; which names
      stand for the same tensor, for layers may be used again; and packed tensors, as quantised layers have them;
    - "adapters", where adapters are active: their tensors, scalings and other numbers, layer by layer. Those that are
      merged are in the weights; those that are disabled or not active do not count.

    Attributes of modules that neither torch nor transformers defines count as adapters. What hooks do is not seen, nor
    what is changed in the modules of torch and transformers besides tensors: their attributes, methods and activations.

    Args:
        model: a loaded transformers model; one wrapped by `torch.compile` or peft is fine.

    Raises:
        UnsupportedModel: names a tensor that is not loaded, a state of which nothing is known, or an adapter whose
            caches do not follow from token ids.
    """
    check_adapters(model)
    model = bare(model)
    text = model.config.get_text_config(decoder=True)
    numbers = {key: getattr(text, key, None) for key in _IN_WEIGHTS}
    adapters = Adapters.of(model, lambda tensor: sampled_digest([("", tensor)]))
    saved, added = list[tuple[str, torch.Tensor]](), list[tuple[str, torch.Tensor]]()
    state = model.state_dict(keep_vars=True)
    for path, tensor in _tensors(state):
        name, owned = adapters.place(path)
        if name is not None:
            (added if owned else saved).append((name, tensor))
    weights = sampled_digest(saved, _json({k: v for k, v in numbers.items() if v is not None}))
    facts = config_facts(model.config, HARMLESS | in_layout(text))
    config = sampled_digest([], _json([facts, _derived(model, adapters, state)]))
    parts = [SAMPLED + weights, "config:" + config[:_PART], "rows:" + _rows_digest(model, adapters, state)[:_PART]]
    if added or adapters.facts:
        parts.append("adapters:" + sampled_digest(added, _json(adapters.facts))[:_PART])
    return MORE.join(parts)


def sampled_digest(tensors: list[tuple[str, torch.Tensor]], text: str = "") -> str:
    """Return SHA-256 over a text, and over name, shape, dtype and a sample of each tensor, as hexadecimal digits.

    Raises:
        UnsupportedModel: names a tensor that is not loaded.
    """
    hasher = hashlib.sha256(text.encode())
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in tensors:
        if tensor.is_meta:
            raise UnsupportedModel(f"{name}: not loaded (it is on the meta device); load the weights first")
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.numel():
            samples.setdefault(tensor.device, []).append(_sample(tensor))
    for parts in samples.values():  # one transfer per device, not one per tensor
        hasher.update(torch.cat(parts).cpu().numpy().tobytes())
    return hasher.hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name; tied tensors once."""
    seen: set[int] = set()
    for name, value in sorted(state.items()):
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, value.detach()


def _rows_digest(model: Any, adapters: Adapters, state: Mapping[str, Any]) -> str:
    """SHA-256 over what a few elements of every tensor do not show: see `weights_fingerprint`."""
    owners, packed = dict[int, set[str]](), list[tuple[str, torch.Tensor]]()
    facts: list[Any] = []
    for path, value in state.items():
        name, _ = adapters.place(path)
        if name is None:
            continue
        if isinstance(value, torch.Tensor):
            owners.setdefault(id(value), set()).add(name)
        else:
            facts.append([name, unpack(name, value, packed)])
    shared = sorted(sorted(names) for names in owners.values() if len(names) > 1)
    rows = dict[str, torch.Tensor]()
    for path, module in model.named_modules():
        name, _ = adapters.place(f"{path}.weight")
        if isinstance(module, torch.nn.Embedding) and name is not None:
            rows[name] = module.weight.detach()[:, :: max(1, module.weight.shape[1] // _OF_A_ROW)]
    hasher = hashlib.sha256(_json([shared, sorted(facts)]).encode())
    hasher.update(sampled_digest(sorted(packed, key=lambda pair: pair[0])).encode())
    for name, columns in sorted(rows.items()):
        hasher.update(f"{name} {tuple(columns.shape)}\n".encode())
        hasher.update(columns.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _derived(model: Any, adapters: Adapters, state: Mapping[str, Any]) -> list[Any]:
    """Buffers that are not saved, as those of rotary positions: name, shape, dtype, and values to three digits, which
    are the same on every machine. Not those that `follows_length` names."""
    found, seen = list[Any](), set[int]()
    for path, buffer in model.named_buffers(remove_duplicate=False):
        name, _ = adapters.place(path)
        holder, _, own = path.rpartition(".")
        if id(buffer) in seen or follows_length(model.get_submodule(holder), own):
            continue  # the original may be the same tensor as what follows the length
        seen.add(id(buffer))
        if path in state or name is None:
            continue
        if buffer.is_meta:
            raise UnsupportedModel(f"{path}: not loaded (it is on the meta device); load the weights first")
        values = [f"{value:.2e}" for value in _spread(buffer.detach()).flatten().tolist()] if buffer.numel() else []
        found.append([name, list(buffer.shape), str(buffer.dtype), values])
    return sorted(found)


def follows_length(module: Any, name: str) -> bool:
    """Whether a buffer is overwritten in every pass by what suits the length of the sequence; the layout tells which.

    Example:
        >>> follows_length(torch.nn.Linear(1, 1), "inv_freq")
        False
    """
    if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
        return False
    kinds = module.__dict__.get("rope_type")
    return any(kind in LENGTH_DEPENDENT for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 `[bytes]`: evenly spread elements of `tensor`."""
    return _spread(tensor).view(torch.uint8)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """`[elements]`: evenly spread elements of `tensor`, without copying all of it even where it is strided."""
    places = _places(tensor.numel(), tensor.device)
    if tensor.is_contiguous():
        return tensor.view(-1)[places]
    return tensor[torch.unravel_index(places, tensor.shape)]


@lru_cache(maxsize=4096)
def _places(count: int, device: torch.device) -> torch.Tensor:
    steps = torch.arange(min(SAMPLES, count), dtype=torch.int64)
    return (steps * (count - 1) // max(1, len(steps) - 1)).to(device)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the fingerprint of what maps text to token ids.

    SHA-256 of the whole fast tokenizer except its truncation and padding, which callers switch; of a slow one, of its
    vocabulary and special tokens.

    Raises:
        ConfigError: it is no tokenizer.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise ConfigError(
            f"tokenizer: expected a loaded tokenizer, found {tokenizer!r}; load one with "
            "AutoTokenizer.from_pretrained(path), or leave it out if tokens are made elsewhere"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = backend.to_str()  # {"version", "truncation", "padding", "added_tokens", ...} in this order
        text = text[text.index('"added_tokens"') :]
    else:
        text = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
