"""The shape of a KV cache, stated and never inferred.

A cache is L layers of (K, V); K is `[heads, tokens, key_dim]` and V `[heads, tokens, value_dim]`, K stored after
the rotary embedding, as the model holds it. A layer keeps all tokens, or the last of them (docs/layouts.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvstore.core.alike_layers import AlikeLayers
from kvstore.core.cache_layers import items_of, states_in
from kvstore.core.rope_types import rope_of_kind
from kvstore.core.states import State
from kvstore.core.tensors import Alike, resolved, why_unreadable
from kvstore.errors import ConfigError, LayoutMismatch

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e5m2": 1, "float8_e4m3fn": 1}
SINKS = 4
"""First positions of a sequence: attention leans on them, and their keys and values are unlike all others. No fit looks
at them, and lossy codecs keep them exactly. Part of the format of lossy payloads."""
KVLayers = Sequence[tuple["torch.Tensor", "torch.Tensor"]]
_KINDS = ("full", "sliding", "chunked")


def _check_range(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        wanted = str(least) if least == most else f"an integer from {least} to {most}"
        raise ConfigError(f"{name}: expected {wanted}, found {value!r}")


@dataclass(frozen=True)
class LayerLayout:
    """The shape of one layer, and which tokens it keeps.

    Attributes:
        heads: key/value heads, 1 to 65536.
        key_dim, value_dim: the last dimension of K and of V, 1 to 65536. A latent is a layer of one head, with the
            latent as K and the rotated key as V.
        kind: "full" keeps all tokens; "sliding" and "chunked" keep the last `window - 1`, which is all that the next
            token can see beside itself.
        window: 2 to 2^30 tokens for "sliding" and "chunked", else 0.

    Raises:
        ConfigError: names the field that is out of range.

    Example:
        >>> LayerLayout(heads=8, key_dim=128, value_dim=128).heads
        8
        >>> LayerLayout(heads=8, key_dim=128, value_dim=128, kind="sliding", window=1024).first_kept(1500)
        477
    """

    heads: int
    key_dim: int
    value_dim: int
    kind: str = "full"
    window: int = 0

    def __post_init__(self) -> None:
        for name in ("heads", "key_dim", "value_dim"):
            _check_range(f"LayerLayout.{name}", getattr(self, name), 1, 65536)
        if self.kind not in _KINDS:
            raise ConfigError(f"LayerLayout.kind: expected one of {', '.join(_KINDS)}, found {self.kind!r}")
        least, most = (0, 0) if self.kind == "full" else (2, 1 << 30)
        _check_range(f"LayerLayout.window of a {self.kind} layer", self.window, least, most)

    def first_kept(self, length: int) -> int:
        """Return the position of the first token that a cache of `length` tokens keeps in this layer."""
        return max(0, length - self.window + 1) if self.window else 0

    @cached_property
    def shape(self) -> LayerLayout:
        """The same layer, as one that keeps all tokens."""
        return LayerLayout(self.heads, self.key_dim, self.value_dim)

    @property
    def row(self) -> list[Any]:
        """The layer as `KVLayout.canonical` has it."""
        shape: list[Any] = [self.heads, self.key_dim, self.value_dim]
        return shape if self.kind == "full" else [*shape, self.kind, self.window]


@dataclass(frozen=True)
class LayerGroup:
    """The layers of a layout that keep the same tokens.

    Attributes:
        window: of its layers; 0: they keep all tokens.
        layers: their numbers in the layout, rising.
        layout: of these layers alone, as layers that keep all tokens, with their rotary embedding: what codecs are
            told.

    Example:
        >>> layout = KVLayout((LayerLayout(2, 8, 8), LayerLayout(2, 8, 8, "sliding", 16)), "bfloat16")
        >>> [(group.window, group.layers) for group in layout.groups]
        [(0, (0,)), (16, (1,))]
    """

    window: int
    layers: tuple[int, ...]
    layout: KVLayout

    def missing(self, cut: int, start: int, tokens: int) -> int:
        """Return how many of a block's first tokens these layers lack.

        Args:
            cut: length of the cache that the block was taken from; 0 if that had all tokens in all layers.
            start: position of the block's first token.
            tokens: how many it has.
        """
        return min(max(0, cut - self.window + 1 - start), tokens) if self.window and cut else 0


@dataclass(frozen=True)
class KVLayout:
    """The layout of a cache: its layers, their dtype, and the positions that the keys carry.

    Immutable and hashable.

    Attributes:
        layers: 1 to 1024 layers.
        dtype: a name in `ITEM_BYTES`.
        rope: the rotary parameters as canonical JSON, "none" if positions are absolute or learned. Two caches with
            different rotary bases have the same shape and different contents.
        places: for each layer its number in the model's cache, rising; () if they are 0, 1, 2, ... A layer of the model
            that has no tokens of its own, because it reads another's or has no attention, is not among them.
        model_layers: how many layers the model's cache has; 0 if no more than `layers`.
        states: numbers in the model's cache, rising, of the layers that keep states; they may keep tokens, too.
        indexed: numbers in the model's cache, rising, of the layers that keep keys of an indexer, too. The last of
            `layers` are these keys, one head each, the first half of its width as K and the second as V.
        media: token ids that stand for images or sound, each behind the name that the model has for it, by name. No
            sequence with one of them is stored (`core.media`), for the ids do not show what is seen or heard.

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
    places: tuple[int, ...] = ()
    model_layers: int = 0
    states: tuple[int, ...] = ()
    media: tuple[tuple[str, int], ...] = ()
    indexed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not all(isinstance(x, LayerLayout) for x in self.layers):
            raise ConfigError("KVLayout.layers: expected a tuple of LayerLayout")
        if not (0 if self.states else 1) <= len(self.layers) <= 1024:
            raise ConfigError(f"KVLayout.layers: expected 1 to 1024 layers, found {len(self.layers)}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"KVLayout.dtype: expected one of {', '.join(ITEM_BYTES)}, found {self.dtype!r}")
        if not isinstance(self.rope, str):
            raise ConfigError(f"KVLayout.rope: expected text, found {self.rope!r}")
        if self.places or self.model_layers or self.states or self.indexed:
            self._check_places()
        if self.media:
            self._check_media()

    def _check_media(self) -> None:
        if not isinstance(self.media, tuple) or not all(isinstance(x, tuple) and len(x) == 2 for x in self.media):
            raise ConfigError("KVLayout.media: expected a tuple of pairs (name, token id)")
        for name, token in self.media:
            if not isinstance(name, str):
                raise ConfigError(f"KVLayout.media: expected text as name, found {name!r}")
            _check_range(f"KVLayout.media of {name}", token, 0, (1 << 32) - 1)
        if any(a >= b for a, b in pairwise(name for name, _ in self.media)):
            raise ConfigError("KVLayout.media: the names must rise")

    def _check_places(self) -> None:
        own = len(self.layers) - len(self.indexed)
        least = own + (0 if self.states or self.indexed else 1)
        _check_range("KVLayout.model_layers", self.model_layers, least, 4096)
        if not isinstance(self.places, tuple) or len(self.places) not in (0, own):
            raise ConfigError("KVLayout.places: expected a tuple of as many numbers as there are layers, or ()")
        for name, numbers in (("places", self.places), ("states", self.states), ("indexed", self.indexed)):
            if not isinstance(numbers, tuple):
                raise ConfigError(f"KVLayout.{name}: expected a tuple of numbers")
            for place in numbers:
                _check_range(f"KVLayout.{name}", place, 0, self.model_layers - 1)
            if any(a >= b for a, b in pairwise(numbers)):
                raise ConfigError(f"KVLayout.{name}: the numbers must rise")
        if self.places and self.places == tuple(range(own)):
            raise ConfigError("KVLayout.places: expected () for layers that are numbered 0, 1, 2, ...")
        if not set(self.indexed) <= set(self.place_of) or any(layer.window for layer in self.layers[own:]):
            raise ConfigError("KVLayout.indexed: expected layers that keep tokens, and keys of all of them")

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
        places = self.places, self.model_layers, self.states, self.indexed
        return hash((self.layers, self.dtype, self.rope, places, self.media))

    def __hash__(self) -> int:
        """Computed once: layouts are keys of caches that every block goes through."""
        return self._hash

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all keys and values have the same shape."""
        if not self.layers or self.indexed:
            return False
        first = self.layers[0]
        alike = first.key_dim == first.value_dim and all(layer == first for layer in self.layers)
        return alike and not self.is_grouped

    @cached_property
    def is_latent(self) -> bool:
        """Whether every layer has the shape of a latent: one head, K and V of different widths, all tokens."""
        alike = all(layer.heads == 1 and layer.key_dim != layer.value_dim for layer in self.layers)
        return bool(self.layers) and alike and not (self.is_grouped or self.indexed)

    @cached_property
    def place_of(self) -> tuple[int, ...]:
        """For each layer its number in the model's cache, without the keys of indexers."""
        return self.places or tuple(range(len(self.layers) - len(self.indexed)))

    @cached_property
    def is_grouped(self) -> bool:
        """Whether some layers keep only the last tokens, or states."""
        return bool(self.states) or any(layer.window for layer in self.layers)

    @cached_property
    def sections(self) -> int:
        """How many parts a payload has: the layers, and the states, if there are any."""
        return len(self.layers) + bool(self.states)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by the tokens that they keep: first those that keep all, then by rising window."""
        windows = sorted({layer.window for layer in self.layers})
        numbers = [tuple(i for i, layer in enumerate(self.layers) if layer.window == window) for window in windows]
        return tuple(LayerGroup(window, of, self._plain(of)) for window, of in zip(windows, numbers, strict=True))

    def _plain(self, layers: tuple[int, ...]) -> KVLayout:
        kinds = {self.layers[i].kind for i in layers}
        rope = rope_of_kind(self.rope, kinds.pop()) if len(kinds) == 1 else self.rope
        return KVLayout(tuple(self.layers[i].shape for i in layers), self.dtype, rope)

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
        document: dict[str, Any] = {"dtype": self.dtype, "layers": [x.row for x in self.layers], "rope": self.rope}
        if self.model_layers:
            document |= {"places": self.places, "model_layers": self.model_layers}
        if self.states:
            document["states"] = self.states
        if self.media:
            document["media"] = self.media
        if self.indexed:
            document["indexed"] = self.indexed
        return json.dumps(document, sort_keys=True)

    @classmethod
    def from_canonical(cls, text: str) -> KVLayout:
        """Read what `canonical` wrote.

        Raises:
            ConfigError: the text was not written by `canonical`.
        """
        try:
            document = json.loads(text)
            layers = tuple(LayerLayout(*row) for row in document["layers"])
            places, states, indexed = (tuple(document.get(name, ())) for name in ("places", "states", "indexed"))
            media = tuple(map(tuple, document.get("media", ())))
            kept = places, document.get("model_layers", 0), states, media, indexed
            layout = cls(layers, document["dtype"], document["rope"], *kept)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"not a canonical layout: {error}") from error
        if layout.canonical() != text:
            raise ConfigError("not a canonical layout: keys, order or spacing differ from what canonical() writes")
        return layout

    def layers_of(self, kv: Any, tokens: int) -> tuple[KVLayers, bool]:
        """Check a cache against this layout; nothing is copied or changed.

        Args:
            kv: a transformers cache (`.layers` with `.keys` and `.values`), or per layer (K, V), each
                `[1, heads, tokens, dim]` or `[heads, tokens, dim]`. A layer with a window may have fewer tokens: the
                last ones, from `LayerLayout.first_kept` on at the latest.
            tokens: how many tokens the cache has to hold.

        Returns:
            The layers as `[heads, tokens, dim]` views (copies where torch has only marked a negation), and whether the
            caller may still write into them. That is False for transformers' DynamicLayer and its sliding one, which
            replace their tensors and never write into them, and for our GrowingLayer, which never overwrites what it
            has written.

        Raises:
            LayoutMismatch: names the tensor that does not fit, or that has no memory of its own.
            UnsupportedCache: names a layer that does not hold the keys and values that it must.
        """
        if not self.layers:
            return (), False
        items, owned = items_of(kv, self.place_of if self.model_layers else None, tokens, self.indexed)
        if len(items) != len(self.layers):
            raise LayoutMismatch(f"kv has {len(items)} layers, the store's layout has {len(self.layers)}")
        if self.is_uniform and (alike := self._alike(items, tokens)) is not None:
            return alike, not owned
        views: list[tuple[torch.Tensor, torch.Tensor]] = []
        before: tuple[LayerLayout, Alike, Alike] | None = None
        for number, (item, layer) in enumerate(zip(items, self.layers, strict=True)):
            try:
                k, v = item
            except (TypeError, ValueError) as error:
                raise LayoutMismatch(f"kv layer {number}: expected a pair (K, V)") from error
            # Most layers are like the one before, and then little has to be looked at: a put looks at every tensor.
            if before is not None and (layer is before[0] or layer == before[0]):
                keys, values = before[1].view(k), before[2].view(v)
                if keys is not None and values is not None:
                    views.append((keys, values))
                    continue
            views.append(self._pair(k, v, number, layer, tokens))
            before = layer, Alike(k), Alike(v)
        return tuple(views), not owned

    def _alike(self, items: Sequence[Any], tokens: int) -> AlikeLayers | None:
        """The layers, if the first one fits and all are like it; it says nothing of what does not fit."""
        try:
            k, v = items[0]
            self._pair(k, v, 0, self.layers[0], tokens)
        except (TypeError, ValueError, LayoutMismatch):
            return None
        return AlikeLayers.of(items, Alike(k), Alike(v))

    def _pair(self, k: Any, v: Any, number: int, layer: LayerLayout, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._view(k, f"K of layer {number}", layer, tokens, layer.key_dim)
        values = self._view(v, f"V of layer {number}", layer, tokens, layer.value_dim)
        if keys.shape[1] != values.shape[1]:
            raise LayoutMismatch(
                f"kv layer {number}: K has {keys.shape[1]} tokens and V has {values.shape[1]}; they must agree"
            )
        return keys, values

    def states_of(self, kv: Any) -> tuple[State, ...]:
        """Return the states of a cache, which the caller may still write into; nothing is copied.

        Raises:
            UnsupportedCache: the cache lacks states that the layout has, or keeps more than it needs.
        """
        return states_in(kv, self.states) if self.states else ()

    def _view(self, tensor: Any, name: str, layer: LayerLayout, tokens: int, dim: int) -> torch.Tensor:
        try:
            shape = tuple(getattr(tensor, "shape", ()))
        except RuntimeError as error:  # a nested tensor has none
            raise LayoutMismatch(f"{name}: {why_unreadable(tensor)}") from error
        if len(shape) == 4 and shape[0] == 1:
            tensor, shape = tensor[0], shape[1:]
        least = tokens - layer.first_kept(tokens)
        if len(shape) != 3 or (shape[0], shape[2]) != (layer.heads, dim) or not least <= shape[1] <= tokens:
            wanted = str(tokens) if least == tokens else f"{least} to {tokens}"
            raise LayoutMismatch(
                f"{name}: expected [heads={layer.heads}, tokens={wanted}, dim={dim}] (a leading batch of 1 is fine), "
                f"found {list(getattr(tensor, 'shape', ())) or type(tensor).__name__}"
            )
        if str(tensor.dtype) != self._torch_dtype:
            kind = "" if str(tensor.dtype).startswith("torch.") else f" of a {type(tensor).__name__}, no torch tensor"
            raise LayoutMismatch(f"{name}: expected dtype {self.dtype}, found {tensor.dtype}{kind}")
        if problem := why_unreadable(tensor):
            raise LayoutMismatch(f"{name}: {problem}")
        return resolved(tensor.detach())
