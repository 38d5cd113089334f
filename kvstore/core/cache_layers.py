"""A cache taken apart: which tensors of each layer hold keys and values. By the names of classes: nothing is imported.

Thread-safe: nothing here has a state.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvstore.core.states import State
from kvstore.errors import LayoutMismatch, UnsupportedCache

_HYBRID = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_STATIC = (
    *("StaticLayer", "StaticSlidingWindowLayer"),
    *("LinearAttentionAndStaticFullAttentionLayer", "LinearAttentionAndStaticSlidingWindowAttentionLayer"),
)
_TAKEN = ("DynamicLayer", "DynamicSlidingWindowLayer", *_STATIC, *_HYBRID)
_STATES = ("LinearAttentionLayer", *_HYBRID, *_STATIC[2:])
_INDEXED = "DynamicIndexedLayer"
_REPLACE = ("DynamicLayer", "DynamicSlidingWindowLayer", "GrowingLayer", "LazyLayer", _INDEXED, *_HYBRID)


def items_of(
    kv: Any, places: tuple[int, ...] | None, tokens: int, indexed: tuple[int, ...] = ()
) -> tuple[list[Any], bool]:
    """Return (K, V) of each layer, and whether only the cache itself writes into them.

    Args:
        kv: a transformers cache, or a sequence of (K, V).
        places: the numbers of the layers that keep something; None: all do.
        tokens: how many the cache has to hold; layers with windows say how many they have seen.
        indexed: the numbers of the layers that keep keys of an indexer; these follow as pairs of halves.

    Raises:
        LayoutMismatch: `kv` is neither, or holds another number of tokens.
        UnsupportedCache: names a layer whose tensors are not its keys and values.

    Example:
        >>> items_of([("k", "v")], None, 1)
        ([('k', 'v')], False)
    """
    layers = getattr(kv, "layers", None)
    try:
        if layers is None:
            return list(kv), False
        layers = list(layers)
    except TypeError as error:
        raise LayoutMismatch(f"kv: expected a cache or a sequence of (K, V), found {type(kv).__name__}") from error
    check_at_rest(kv)
    chosen = range(len(layers)) if places is None else places
    for number, layer in enumerate(layers):
        if number not in chosen and getattr(layer, "keys", None) is not None:
            raise LayoutMismatch(f"layer {number} of the cache has keys, but none are expected of it")
        if getattr(layer, "is_sliding", False) and int(layer.get_seq_length()) != tokens:
            seen = int(layer.get_seq_length())
            raise LayoutMismatch(f"layer {number} of the cache has seen {seen} tokens, expected {tokens}")
    kept = [(number, layer) for number, layer in enumerate(layers) if number in chosen]
    kinds: set[Any] = {type(layer) for _, layer in kept}
    owned = all(map(_never_overwrites, kinds))
    pairs = [_pair(number, layer, number in indexed) for number, layer in kept]
    pairs += [_halves(layer.indexer_keys) for number, layer in kept if number in indexed] if indexed else []
    return pairs, owned


def states_in(kv: Any, places: tuple[int, ...]) -> tuple[State, ...]:
    """Return the states of a transformers cache, without copying them.

    Args:
        kv: the cache.
        places: the numbers of the layers that keep states.

    Raises:
        UnsupportedCache: names the layer whose states are not those at the end of its tokens.
    """
    check_at_rest(kv)
    layers = list(getattr(kv, "layers", ()))
    found = []
    for place in places:
        layer: Any = layers[place] if place < len(layers) else None
        kind = type(layer).__name__
        if kind not in _STATES or getattr(layer, "record_past", False):
            raise UnsupportedCache(
                f"layer {place} of the cache is a {kind}; expected one with states, and no record of past ones"
            )
        for number, has in layer.has_previous_state.items():
            conv, recurrent = layer.conv_states[number], layer.recurrent_states[number]
            if conv is None and recurrent is None:
                raise UnsupportedCache(f"layer {place} of the cache has no states yet; run the model first")
            found.append(State(place, int(number), bool(has), conv, recurrent))
    return tuple(found)


def check_at_rest(kv: Any) -> None:
    """Refuse a cache whose tensors may be on their way to the host, or back, while it is looked at.

    Raises:
        UnsupportedCache: it offloads its layers.

    Example:
        >>> check_at_rest([("k", "v")])
    """
    if getattr(kv, "offloading", False):
        raise UnsupportedCache(
            f"the {type(kv).__name__} offloads its layers: copies of them may still be under way; wait for the device "
            "and pass the layers' keys and values, or use a DynamicCache without offloading"
        )


@lru_cache(maxsize=256)
def _never_overwrites(kind: type) -> bool:
    # In transformers 5.17 a DynamicLayer has no reset of its own, and the one it inherits writes zeros.
    return kind.__name__ in _REPLACE and any(
        "reset" in vars(base) for base in kind.__mro__ if base.__name__ in _REPLACE
    )


def _halves(keys: Any) -> tuple[Any, Any]:
    """Keys of an indexer, `[1, tokens, dim]`, as K and V of one head."""
    half = keys.shape[-1] // 2
    return keys[:, None, :, :half], keys[:, None, :, half:]


def _check_index(number: int, layer: Any, is_indexed: bool) -> None:
    if (getattr(layer, "indexer_keys", None) is not None) != is_indexed:
        wanted = "keys of its indexer, and the cache has none" if is_indexed else "no keys of an indexer"
        raise UnsupportedCache(f"layer {number} of the cache is a {type(layer).__name__}: expected {wanted}")
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnsupportedCache(f"layer {number} of the cache keeps positions for its indexer, which is not supported")


def _pair(number: int, layer: Any, is_indexed: bool) -> tuple[Any, Any]:
    kind: Any = type(layer)
    is_ours, is_plain, is_static = _traits(kind)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not is_ours:
        return keys, values
    if not is_plain:
        raise _unsupported(number, kind.__name__)
    _check_index(number, layer, is_indexed)
    if is_static and keys is not None and values is not None:
        # The last tokens if it is a full window, the first places otherwise.
        length = min(int(layer.get_seq_length()), keys.shape[-2])
        return keys[..., :length, :], values[..., :length, :]
    return keys, values


@lru_cache(maxsize=256)
def _traits(kind: type) -> tuple[bool, bool, bool]:
    """Whether a layer is one of transformers', whether it holds keys and values, and whether in a static cache."""
    is_plain = kind.__name__ in (*_TAKEN, _INDEXED) and "Quantized" not in kind.__name__
    return kind.__module__.startswith("transformers."), is_plain, kind.__name__ in _STATIC


def _unsupported(number: int, name: str) -> UnsupportedCache:
    if "Quantized" in name:
        return UnsupportedCache(
            f"layer {number} of the cache is a {name}: it holds other keys and values than the model computed, and no "
            "others are stored; use a DynamicCache, and a codec with loss if records are to be smaller"
        )
    # Their tensors are indexes or recurrent: not the keys and values of tokens.
    return UnsupportedCache(f"layer {number} of the cache is a {name}, which is not supported; use a DynamicCache")
