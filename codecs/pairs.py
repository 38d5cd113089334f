"""Keys whose rotated pairs do not lie half a head apart: copies of views with K in `rope.pair_order`, and back.

Codecs that rotate in integers take K so, for a rotary embedding over a part of each head. Everything else takes K as
the cache holds it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvstore.codecs.device import wait_for
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.core.rope import Order, pair_order

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=64)
def order_of(layout: KVLayout) -> Order | None:
    """Return the order of a key's values; None if pairs lie half a head apart as they are, or nothing is known of them.

    Example:
        >>> order_of(KVLayout.uniform(num_layers=1, heads=2, head_dim=16)) is None
        True
    """
    dims = {layer.key_dim for layer in layout.layers}
    if layout.rope == "none" or len(dims) != 1 or min(dims) % 2:
        return None
    try:
        return pair_order(layout.rope, min(dims))
    except ValueError:
        return None


def buffer(view: KVView) -> KVView:
    """Return new memory for a copy of a view, on its device. Its contents are undefined."""
    if view.on_cpu:
        memory = np.empty(view.nbytes, np.uint8)
        return KVView.packed(view.layout, view.tokens, memory.ctypes.data, memory)
    import torch

    made = [torch.empty_like(tensor) for tensor in view.tensors()]
    return KVView.of_layers(view.layout, list(zip(made[::2], made[1::2], strict=True)), checked=True)


def in_pairs(view: KVView, order: Order) -> KVView:
    """Return a copy of a view, on its device, with K in `order`."""
    if not view.on_cpu:
        return _ordered(view, order)
    copy = buffer(view)
    view.copy_to(copy)
    _swap(copy, order, back=False)
    return copy


def from_pairs(view: KVView, order: Order, out: KVView) -> None:
    """Copy what `buffer` gave, with K in `order`, into `out` as a cache holds it; finished on return.

    The buffer is mutated.
    """
    if view.on_cpu:
        _swap(view, order, back=True)
        view.copy_to(out)
        return
    _ordered(view, np.argsort(order)).copy_to(out)
    wait_for(out.devices)


def _swap(copy: KVView, order: Order, back: bool) -> None:
    """Put K into `order`, or back, in memory that `buffer` gave: two neighbouring parts of each head change places."""
    dim = len(order)
    begin = int(np.argmax(order != np.arange(dim)))  # the first values of the rotated pairs stay where they are
    end = begin + dim // 2
    first = end - 2 * begin if back else begin
    values = copy.owner.view(f"<u{copy.layout.item_bytes}")
    at = 0
    for layer in copy.layout.layers:
        keys = values[at : at + layer.heads * copy.tokens * dim].reshape(-1, dim)
        middle = keys[:, begin:end].copy()
        keys[:, begin : end - first] = middle[:, first:]
        keys[:, end - first : end] = middle[:, :first]
        at += layer.heads * copy.tokens * (dim + layer.value_dim)


def _ordered(view: KVView, order: Order) -> KVView:
    """On a device."""
    import torch

    def ordered(key: torch.Tensor) -> torch.Tensor:
        return key[..., torch.from_numpy(order).to(key.device)]

    tensors = view.tensors()
    pairs = [(ordered(k), v) for k, v in zip(tensors[::2], tensors[1::2], strict=True)]
    return KVView.of_layers(view.layout, pairs, checked=True)
