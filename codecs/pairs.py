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
    """Return new tensors for a copy of a view, on its device. Their contents are undefined."""
    import torch

    if not view.on_cpu:
        made = [torch.empty_like(tensor) for tensor in view.tensors()]
    else:
        dtype = getattr(torch, view.layout.dtype)
        shapes = [(x.heads, view.tokens, dim) for x in view.layout.layers for dim in (x.key_dim, x.value_dim)]
        made = [torch.empty(shape, dtype=dtype) for shape in shapes]
    return KVView.of_layers(view.layout, list(zip(made[::2], made[1::2], strict=True)), checked=True)


def in_pairs(view: KVView, order: Order) -> KVView:
    """Return a copy of a view, on its device, with K in `order`."""
    if view.on_cpu:
        copy = buffer(view)
        view.copy_to(copy)
        view = copy
    return _ordered(view, order)


def from_pairs(view: KVView, order: Order, out: KVView) -> None:
    """Copy a view of tensors whose K is in `order` into `out`, as a cache holds it; finished on return."""
    back = _ordered(view, np.argsort(order))
    back.copy_to(out)
    if not out.on_cpu:
        wait_for(tensor.device for tensor in out.tensors())


def _ordered(view: KVView, order: Order) -> KVView:
    import torch

    def ordered(key: torch.Tensor) -> torch.Tensor:
        return key[..., torch.from_numpy(order).to(key.device)]

    tensors = view.tensors()
    pairs = [(ordered(k), v) for k, v in zip(tensors[::2], tensors[1::2], strict=True)]
    return KVView.of_layers(view.layout, pairs, checked=True)
