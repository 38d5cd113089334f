"""A cache taken apart and checked: what `put` goes on with, whoever took it apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.states import State
from kvstore.errors import UnsupportedCache


@dataclass(frozen=True)
class PreparedCache:
    """The tensors of a cache that fit a layout. Immutable.

    Attributes:
        layers: `[heads, n, dim]` views; of layers with windows, the last tokens.
        states: at its end; `()` if the layout has none.
        mutable: whether somebody may still write into the tensors.
    """

    layers: KVLayers
    states: tuple[State, ...] = ()
    mutable: bool = True

    @classmethod
    def of(cls, layout: KVLayout, kv: Any, tokens: int) -> PreparedCache:
        """Take a cache of `tokens` tokens apart, and check it; nothing is copied. One that is prepared stays as it is.

        Raises:
            LayoutMismatch, UnsupportedCache: see `KVLayout.layers_of`; also if the cache is approximate.
        """
        if isinstance(kv, cls):
            return kv
        if getattr(kv, "is_approximate", False):
            raise UnsupportedCache(
                "kv: the cache is approximate, and only exact caches are stored; compute the whole sequence to store it"
            )
        layers, mutable = layout.layers_of(kv, tokens)
        return cls(layers, layout.states_of(kv), mutable)

    @classmethod
    def received(cls, layout: KVLayout, layers: KVLayers, states: tuple[State, ...], tokens: int) -> PreparedCache:
        """Check the tensors of so many tokens that another process took apart.

        Raises:
            LayoutMismatch: they do not fit the layout.
        """
        checked, _ = layout.layers_of(layers, tokens)
        return cls(checked, states, mutable=False)
