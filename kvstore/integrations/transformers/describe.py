"""What a transformers model says about its caches: their layout, and who computes them.

Caches that hold keys and values of tokens, all of them or the last in a window, can be put together again from blocks,
and states at the end of a put. Everything else is refused by name. For transformers 5.17 to 5.24.

A leaf: it knows the layout and the errors and nothing of the store, so `ModelIdentity.from_transformers` may call it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from kvstore.core.layout import KVLayout
from kvstore.core.rope_types import LENGTH_DEPENDENT, REGIMES, SHORT, TYPES
from kvstore.errors import ConfigError, UnsupportedModel
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.fingerprint import tokenizer_fingerprint, weights_fingerprint
from kvstore.integrations.transformers.shapes import layers_from_config

# Models that turn, in every layer, each value of the first half of a head with the one half a head behind it.
HALVES = ("gemma", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3")
# Decoders whose configs have the field is_decoder, and leave it False.
_DECODERS = ("gpt_neox", "gpt_neox_japanese")

# Models that keep something else than the layers of a cache, and what.
_REFUSED = {
    "blt": "it keeps caches of bytes and of patches in one",
    "cpmant": "its cache holds the positions of a learned prompt before the tokens",
    "gemma4_assistant": "it drafts from the cache of another model and keeps none",
    "gemma4_unified_assistant": "it drafts from the cache of another model and keeps none",
    "minimax": "it keeps states in a MiniMaxCache",
    "openai-gpt": "it keeps no cache",
    "paligemma": "the tokens of a prompt attend to those behind them, which are then in their keys",
    "prophetnet": "it goes on from a cache by one token at a time only",
    "recurrent_gemma": "it keeps states in its modules",
    "reformer": "it keeps buckets and hidden states in a ReformerDynamicCache",
    "rwkv": "it keeps states in a list of tensors",
    "xlm": "it keeps no keys and values in a cache",
    "xlnet": "it keeps hidden states instead of keys and values",
    "xlstm": "it keeps states in an xLSTMCache",
}
_PARTS = (
    *("vision_config", "audio_config", "vq_config", "speech_config"),
    *("encoder_config", "audio_encoder_config", "codec_config", "thinker_config"),
)
_MEDIA = (
    *("image_token_id", "image_token_index", "video_token_id", "video_token_index"),
    *("audio_token_id", "audio_token_index"),
)
_BEFORE_TEXT = ("git",)  # images stand before the first token, so a cache of one is longer than its tokens


def layout_from_config(config: Any, dtype: torch.dtype | str, regime: str = SHORT) -> KVLayout:
    """Return the layout of the caches of a model with this config.

    Args:
        config: a transformers config.
        dtype: what the cache is held in, "bfloat16" or a torch.dtype.
        regime: "short" or "long", which counts where keys depend on the length of the sequence; see
            `ModelIdentity.from_transformers`.

    Raises:
        ConfigError: another `regime`.
        UnsupportedModel: names what cannot be stored: an encoder-decoder, or layers of a kind that keeps something
            else than keys and values.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
        >>> layout_from_config(config, "bfloat16").layers[0].key_dim
        16
    """
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported (cross-attention cache)")
    if getattr(config, "is_decoder", True) is False and name not in _DECODERS:
        raise UnsupportedModel(f"{name}: is_decoder is False, so the model is an encoder and keeps no cache")
    if name in _REFUSED:
        raise UnsupportedModel(f"{name}: {_REFUSED[name]}; such caches are not supported")
    media, whole = _media(config, name), config
    config = config.get_text_config(decoder=True)
    if any(_looks_ahead(part) for part in (whole, config)):
        raise UnsupportedModel(
            f"{name}: it attends both ways, so the keys of a token hold what comes behind it; such caches are not "
            "supported"
        )
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise UnsupportedModel(
            f"{name}: the config names no num_hidden_layers; only plain stacks of layers are supported"
        )
    layers, places, model_layers, states, indexed = layers_from_config(config, name)
    rope = _rope(config, name, regime)
    return KVLayout(layers, str(dtype).removeprefix("torch."), rope, places, model_layers, states, media, indexed)


def _looks_ahead(config: Any) -> bool:
    """Whether tokens of text attend to what comes behind them. "vision": only those of one image, to each other."""
    both_ways = getattr(config, "use_bidirectional_attention", None)
    return both_ways not in (None, False, "vision") or getattr(config, "is_causal", True) is False


def _media(config: Any, name: str) -> tuple[tuple[str, int], ...]:
    """The tokens that stand for images or sound, of a model that has parts for them."""
    parts = [part for part in (getattr(config, field, None) for field in _PARTS) if part is not None]
    named = {field: vars(part)[field] for field in _MEDIA for part in (*parts, config) if field in vars(part)}
    media = tuple(sorted((field, token) for field, token in named.items() if isinstance(token, int) and token >= 0))
    if parts and not media and name not in _BEFORE_TEXT:
        raise UnsupportedModel(
            f"{name}: it takes images or sound, but its config names no token for them, so their prompts could not be "
            "told from text"
        )
    return media


def _rope(config: Any, name: str, regime: str) -> str:
    """Canonical JSON of the rotary parameters; "none" for learned or absolute positions."""
    if regime not in REGIMES:
        raise ConfigError(f"regime: expected one of {', '.join(REGIMES)}, found {regime!r}")
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return "none"
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    kinds = {part.get("rope_type", "default") for part in nested or [parameters]}
    for kind in sorted(kinds - set(TYPES)):
        raise UnsupportedModel(f"{name}: rope type {kind} is not known")
    kind = parameters.get("rope_type", "default")
    for other in sorted(kinds & set(LENGTH_DEPENDENT)):
        if nested or (other == "dynamic" and regime != SHORT):
            raise UnsupportedModel(f"{name}: with rope type {other} keys depend on the whole length")
    facts = {key: value for key, value in parameters.items() if value is not None}
    if name == "phimoe" and kind not in ("default", "longrope"):
        raise UnsupportedModel(f"{name}: with rope type {kind} keys depend on the whole length")
    if name not in HALVES:
        # Nobody moves such keys to other positions: which pairs are turned, and in which layers, is not known.
        facts["pairs"] = name
    if kind != "default":
        facts["max_position_embeddings"] = getattr(config, "max_position_embeddings", None)
    if kind in LENGTH_DEPENDENT:
        facts["regime"] = regime
    return json.dumps(facts, sort_keys=True)


def check_loaded(model: Any) -> None:
    """Check that an argument is a loaded model of transformers, by its config.

    Raises:
        ConfigError: it is something else, such as a path.
    """
    if getattr(bare(model), "config", None) is None:
        found = repr(model) if isinstance(model, str | os.PathLike) else f"a {type(model).__name__}"
        raise ConfigError(
            f"model: expected a loaded transformers model, found {found}; load one with "
            "AutoModelForCausalLM.from_pretrained(path)"
        )


def identity_fields(model: Any, tokenizer: Any = None, revision: str = "", regime: str = SHORT) -> dict[str, Any]:
    """What `ModelIdentity` is made of, for a loaded model as it is now, with the adapters that are active.

    Reads a sample of every tensor, not all of it: an edit of single values may go unnoticed, another checkpoint never
    does.

    Args:
        model: a loaded transformers model; one wrapped by `torch.compile` or peft is fine.
        tokenizer: its tokenizer; None where tokens are made elsewhere.
        revision: the name of the checkpoint's version; "" takes the commit that the model was loaded from.
        regime: see `layout_from_config`.

    Returns:
        The arguments `model`, `revision`, `weights`, `tokenizer` and `layout` of `ModelIdentity`.

    Raises:
        ConfigError: model or tokenizer are none.
        UnsupportedModel: see `layout_from_config`, `weights_fingerprint`.
    """
    check_loaded(model)
    weights = weights_fingerprint(model)
    model = bare(model)
    config = model.config
    name = str(getattr(config, "_name_or_path", "") or type(model).__name__)
    if os.path.isdir(name):  # where a checkpoint lies does not change it
        name = os.path.basename(os.path.abspath(name))
    return {
        "model": name,
        "revision": revision or str(getattr(config, "_commit_hash", None) or ""),
        "weights": weights,
        "tokenizer": "" if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "layout": layout_from_config(config, model.dtype, regime),
    }
