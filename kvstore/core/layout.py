"""The shape of a KV cache, stated and never inferred.

A cache is L layers of (K, V); K is `[heads, tokens, key_dim]` and V `[heads, tokens, value_dim]`, K stored after
the rotary embedding, as the model holds it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvstore.core.tensors import resolved, why_unreadable
from kvstore.errors import ConfigError, LayoutMismatch, UnsupportedCache

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e5m2": 1, "float8_e4m3fn": 1}
SINKS = 4
"""First positions of a sequence: attention leans on them, and their keys and values are unlike all others. No fit looks
at them, and lossy codecs keep them exactly. Part of the format of lossy payloads."""
KVLayers = tuple[tuple["torch.Tensor", "torch.Tensor"], ...]


@dataclass(frozen=True)
class LayerLayout:
    """The shape of one layer.

    Attributes:
        heads: key/value heads, 1 to 65536.
        key_dim, value_dim: the last dimension of K and of V, 1 to 65536.

    Raises:
        ConfigError: names the field that is out of range.

    Example:
        >>> LayerLayout(heads=8, key_dim=128, value_dim=128).heads
        8
    """

    heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in ("heads", "key_dim", "value_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
                raise ConfigError(f"LayerLayout.{name}: expected an integer from 1 to 65536, found {value!r}")


@dataclass(frozen=True)
class KVLayout:
    """The layout of a cache: its layers, their dtype, and the positions that the keys carry.

    Immutable and hashable.

    Attributes:
        layers: 1 to 1024 layers.
        dtype: a name in `ITEM_BYTES`.
        rope: the rotary parameters as canonical JSON, "none" if positions are absolute or learned. Two caches with
            different rotary bases have the same shape and different contents.

    Raises:
        ConfigError: names the field that does not fit.

    Example:
        >>> layout = KVLayout.uniform(num_layers=2, heads=4, head_dim=16)
        >>> layout.bytes_per_token
        512
        >>> KVLayout.from_canonical(layout.canonical()) == layout
        True
    """

    layers: tuple[LayerLayout, ...]
    dtype: str
    rope: str = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not all(isinstance(x, LayerLayout) for x in self.layers):
            raise ConfigError("KVLayout.layers: expected a tuple of LayerLayout")
        if not 1 <= len(self.layers) <= 1024:
            raise ConfigError(f"KVLayout.layers: expected 1 to 1024 layers, found {len(self.layers)}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"KVLayout.dtype: expected one of {', '.join(ITEM_BYTES)}, found {self.dtype!r}")
        if not isinstance(self.rope, str):
            raise ConfigError(f"KVLayout.rope: expected text, found {self.rope!r}")

    @classmethod
    def uniform(
        cls, num_layers: int, heads: int, head_dim: int, dtype: str = "bfloat16", rope: str = "none"
    ) -> KVLayout:
        """Make a layout whose layers are all alike, with K and V of the same width.

        Args:
            num_layers: 1 to 1024.
            heads: key/value heads of a layer.
            head_dim: last dimension of K and of V.
            dtype, rope: see `KVLayout`.

        Raises:
            ConfigError: names the argument that does not fit.
        """
        return cls((LayerLayout(heads, head_dim, head_dim),) * num_layers, dtype, rope)

    @cached_property
    def _hash(self) -> int:
        return hash((self.layers, self.dtype, self.rope))

    def __hash__(self) -> int:
        """Computed once: layouts are keys of caches that every block goes through."""
        return self._hash

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all keys and values have the same shape."""
        first = self.layers[0]
        return first.key_dim == first.value_dim and all(layer == first for layer in self.layers)

    @cached_property
    def _torch_dtype(self) -> str:
        return f"torch.{self.dtype}"

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def bytes_per_token(self) -> int:
        """Raw bytes of one token, all layers, K and V."""
        return sum(x.heads * (x.key_dim + x.value_dim) for x in self.layers) * self.item_bytes

    def canonical(self) -> str:
        """The layout as one line of JSON, the same for equal layouts; part of the identity."""
        rows = [[x.heads, x.key_dim, x.value_dim] for x in self.layers]
        return json.dumps({"dtype": self.dtype, "layers": rows, "rope": self.rope}, sort_keys=True)

    @classmethod
    def from_canonical(cls, text: str) -> KVLayout:
        """Read what `canonical` wrote.

        Raises:
            ConfigError: the text was not written by `canonical`.
        """
        try:
            document = json.loads(text)
            layers = tuple(LayerLayout(*row) for row in document["layers"])
            layout = cls(layers, document["dtype"], document["rope"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"not a canonical layout: {error}") from error
        if layout.canonical() != text:
            raise ConfigError("not a canonical layout: keys, order or spacing differ from what canonical() writes")
        return layout

    def layers_of(self, kv: Any, tokens: int) -> tuple[KVLayers, bool]:
        """Check a cache against this layout; nothing is copied or changed.

        Args:
            kv: a transformers cache (`.layers` with `.keys` and `.values`), or per layer (K, V), each
                `[1, heads, tokens, dim]` or `[heads, tokens, dim]`.
            tokens: how many tokens the cache has to hold.

        Returns:
            The layers as `[heads, tokens, dim]` views (copies where torch has only marked a negation), and whether the
            caller may still write into them. That is False for transformers' DynamicLayer, which replaces its tensors
            and never writes into them, and for our GrowingLayer, which never overwrites what it has written.

        Raises:
            LayoutMismatch: names the tensor that does not fit, or that has no memory of its own.
            UnsupportedCache: names a layer that does not hold the keys and values of all tokens.
        """
        items, owned = _items(kv)
        if len(items) != len(self.layers):
            raise LayoutMismatch(f"kv has {len(items)} layers, the store's layout has {len(self.layers)}")
        views = []
        for number, (item, layer) in enumerate(zip(items, self.layers, strict=True)):
            try:
                k, v = item
            except (TypeError, ValueError) as error:
                raise LayoutMismatch(f"kv layer {number}: expected a pair (K, V)") from error
            views.append(
                (
                    self._view(k, f"K of layer {number}", layer.heads, tokens, layer.key_dim),
                    self._view(v, f"V of layer {number}", layer.heads, tokens, layer.value_dim),
                )
            )
        return tuple(views), not owned

    def _view(self, tensor: Any, name: str, heads: int, tokens: int, dim: int) -> torch.Tensor:
        try:
            shape = tuple(getattr(tensor, "shape", ()))
        except RuntimeError as error:  # a nested tensor has none
            raise LayoutMismatch(f"{name}: {why_unreadable(tensor)}") from error
        if len(shape) == 4 and shape[0] == 1:
            tensor, shape = tensor[0], shape[1:]
        if shape != (heads, tokens, dim):
            raise LayoutMismatch(
                f"{name}: expected [heads={heads}, tokens={tokens}, dim={dim}] (a leading batch of 1 is fine), "
                f"found {list(getattr(tensor, 'shape', ())) or type(tensor).__name__}"
            )
        if str(tensor.dtype) != self._torch_dtype:
            raise LayoutMismatch(f"{name}: expected dtype {self.dtype}, found {tensor.dtype}")
        if problem := why_unreadable(tensor):
            raise LayoutMismatch(f"{name}: {problem}")
        return resolved(tensor.detach())


def _items(kv: Any) -> tuple[list[Any], bool]:
    """(K, V) per layer, and whether only the cache itself writes into them."""
    layers = getattr(kv, "layers", None)
    try:
        if layers is None:
            return list(kv), False
        layers = list(layers)
    except TypeError as error:
        raise LayoutMismatch(f"kv: expected a cache or a sequence of (K, V), found {type(kv).__name__}") from error
    owned = all(_never_overwrites(type(layer)) for layer in layers)
    return [_pair(number, layer) for number, layer in enumerate(layers)], owned


def _never_overwrites(kind: type) -> bool:
    # In transformers 5.17 a DynamicLayer has no reset of its own, and the one it inherits writes zeros.
    return kind.__name__ in ("DynamicLayer", "GrowingLayer") and "reset" in vars(kind)


def _pair(number: int, layer: Any) -> tuple[Any, Any]:
    kind = type(layer)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if kind.__module__.startswith("transformers."):
        if kind.__name__ not in ("DynamicLayer", "StaticLayer"):
            # Their tensors are windows, quantised or recurrent: not the keys and values of all tokens.
            raise UnsupportedCache(
                f"layer {number} of the cache is a {kind.__name__}, which is not supported; use a DynamicCache"
            )
        if kind.__name__ == "StaticLayer" and keys is not None and values is not None:
            length = int(layer.get_seq_length())
            return keys[..., :length, :], values[..., :length, :]
    return keys, values
