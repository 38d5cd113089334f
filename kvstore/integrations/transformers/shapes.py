"""The layers of a model's cache, from its config: heads and widths, windows, latents, and layers that keep nothing.

As transformers itself builds the cache: which layers there are, and of which kind, its own classes say. A leaf, like
`describe`. `KVLayout.layers_of` compares every cache with what stands here, so a model whose config says something else
than its code does is refused at the first put.
"""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from kvstore.core.layout import LayerLayout
from kvstore.errors import UnsupportedModel

_FULL = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer")
_SLIDING = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_STATES = ("LinearAttentionLayer", _FULL[1], _SLIDING[1])
_INDEXED = "DynamicIndexedLayer"
_TAKEN = (*_FULL, *_SLIDING, *_STATES, _INDEXED, "DummyLayer")
_KINDS_OF = {_FULL[0]: ("full_attention",), _SLIDING[0]: ("sliding_attention", "chunked_attention")}
_NAMES = {_INDEXED: "indexed_attention"}


def layers_from_config(
    config: Any, name: str
) -> tuple[tuple[LayerLayout, ...], tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]:
    """Return the fields `layers`, `places`, `model_layers`, `states` and `indexed` of the `KVLayout` of a model.

    Args:
        config: of the text part.
        name: of the model, for errors.

    Raises:
        UnsupportedModel: names a kind of layers, or what the config lacks.

    Example:
        >>> from transformers import MistralConfig
        >>> config = MistralConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=8, sliding_window=32)
        >>> layers_from_config(config, "mistral")
        ((LayerLayout(heads=8, key_dim=8, value_dim=8, kind='sliding', window=32),), (), 0, (), ())
    """
    cached, words = _cached_layers(config)
    kinds = [type(layer).__name__ for layer in cached]
    refused = sorted({word for kind, word in zip(kinds, words, strict=True) if kind not in _TAKEN})
    if refused:
        raise UnsupportedModel(f"{name}: layers of type {', '.join(refused)} are not supported")
    configs = list(getattr(config, "per_layer_config", None) or [config] * len(cached))
    if len(configs) < len(cached):
        raise UnsupportedModel(f"{name}: the config has settings of {len(configs)} layers for {len(cached)}")
    used = getattr(config, "decoder_layers", None) or len(cached)  # the cache has as many as the encoder
    places = [i for i, kind in enumerate(kinds) if kind in (*_FULL, *_SLIDING, _INDEXED) and i < used]
    states = tuple(i for i, kind in enumerate(kinds) if kind in _STATES and i < used)
    if not places and not states:
        raise UnsupportedModel(f"{name}: no layer keeps keys and values")
    layers = tuple(_layer(configs[i], cached[i], words[i], name) for i in places)
    if len(places) == len(cached) and _INDEXED not in kinds and not states:
        return layers, (), 0, (), ()
    indexed = tuple(i for i in places if kinds[i] == _INDEXED and _has_indexer(config, i))
    layers += tuple(_index_keys(configs[i], name) for i in indexed)
    return layers, () if places == list(range(len(places))) else tuple(places), len(cached), states, indexed


def _has_indexer(config: Any, layer: int) -> bool:
    """Whether a layer has an indexer of its own; else it uses that of a layer before."""
    kinds = getattr(config, "indexer_types", None)
    return kinds is None or kinds[layer] != "shared"


def _index_keys(config: Any, name: str) -> LayerLayout:
    """The keys of an indexer, as `KVLayout.indexed` says."""
    dim = getattr(config, "index_head_dim", None)
    if not dim:
        raise UnsupportedModel(f"{name}: layers of type indexed_attention are not supported without index_head_dim")
    return LayerLayout(1, dim // 2, dim - dim // 2)


def _cached_layers(config: Any) -> tuple[list[Any], list[str]]:
    """The layers of an empty cache, and the config's words for them, or those of their classes."""
    try:
        layers = list(DynamicCache(config=config).layers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{config.model_type}: transformers makes no DynamicCache for it ({error!r})") from error
    given = getattr(config, "layer_types", None) or [None] * len(layers)
    if len(given) != len(layers):
        raise UnsupportedModel(
            f"{config.model_type}: layer_types names {len(given)} layers, the model has {len(layers)}"
        )
    words = []
    for layer, word in zip(layers, given, strict=True):
        kind = type(layer).__name__
        usual = _KINDS_OF.get(kind, (_NAMES.get(kind, kind),))
        # Some configs have words of their own for what is cached like one of these.
        words.append(str(word) if word is not None and (kind not in _KINDS_OF or word in usual) else usual[0])
    return layers, words


def _layer(config: Any, layer: Any, word: str, name: str) -> LayerLayout:
    heads, key_dim, value_dim = _widths(config, name)
    is_sliding = type(layer).__name__ in _SLIDING
    if name == "mimo_v2_flash" and word == "sliding_attention":
        heads *= 2  # the config does not say so
    if is_sliding and getattr(config, "swa_head_dim", None):
        heads, key_dim, value_dim = config.swa_num_key_value_heads, config.swa_head_dim, config.swa_head_dim
    if not is_sliding:
        return LayerLayout(heads, key_dim, value_dim)
    window = int(layer.sliding_window)
    if window < 2:
        raise UnsupportedModel(f"{name}: a window of {window} tokens is not supported; the least is 2")
    return LayerLayout(heads, key_dim, value_dim, "chunked" if word == "chunked_attention" else "sliding", window)


def _widths(config: Any, name: str) -> tuple[int, int, int]:
    """Heads, and the widths of K and of V."""
    if rank := getattr(config, "kv_lora_rank", None):
        if not config.qk_rope_head_dim:
            raise UnsupportedModel(f"{name}: latents without a rotated key (qk_rope_head_dim: 0) are not supported")
        return 1, int(rank), int(config.qk_rope_head_dim)  # the latent, and the rotated key that all heads share
    if of_decoder := getattr(config, "decoder_attention_heads", None):  # the other names mean the encoder's
        return int(of_decoder), config.hidden_size // of_decoder, config.hidden_size // of_decoder
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise UnsupportedModel(f"{name}: the config names no num_attention_heads; only attention caches can be stored")
    dim = getattr(config, "head_dim", None)
    if not dim:
        size = getattr(config, "hidden_size", None)
        if not (isinstance(heads, int) and isinstance(size, int)):
            raise UnsupportedModel(f"{name}: the config names no hidden_size and number of heads of all layers")
        dim = size // heads
    return int(_key_heads(config, heads)), int(dim), int(getattr(config, "v_head_dim", None) or dim)


def _key_heads(config: Any, heads: int) -> int:
    """Heads of keys and values."""
    if getattr(config, "new_decoder_architecture", False):
        return heads  # Falcon repeats its keys and values for all heads before it caches them
    if getattr(config, "multi_query", False):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or heads)
