"""Batch caches in and out of a store, for programs that run the model themselves; `generate` needs none of this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.results import Hit, PutResult
from kvstore.core.rope import check_length
from kvstore.errors import LayoutMismatch, UnsupportedCache
from kvstore.integrations.transformers.cache import cache_layers
from kvstore.integrations.transformers.padding import LeftPadded, Rows, check_rows, row_of
from kvstore.store import KVStore

_RESERVE = 64


@dataclass(frozen=True)
class BatchHit:
    """The first columns of a batch, from a store.

    Attributes:
        columns: how many, padding included.
        tokens: of each row in these columns, without padding.
        cache: a transformers cache `[rows, heads, columns, dim]`, zeros where padding is. It is the caller's.

    Example:
        >>> BatchHit(columns=3, tokens=(3, 1), cache=None).columns
        3
    """

    columns: int
    tokens: tuple[int, ...]
    cache: Any


def put_batch(
    store: KVStore,
    input_ids: torch.Tensor,
    cache: Any,
    *,
    attention_mask: torch.Tensor | None = None,
    namespace: str | bytes = b"",
    ttl: float | None = None,
    pin: bool = False,
) -> list[PutResult]:
    """Put each row of a batch by itself, without its padding.

    The keys of a row must have been computed at positions that are counted from its first token, as `model.generate`
    does it. A call of the model itself counts from the first column unless it is given `position_ids`; such keys of a
    padded row are not those of its tokens, and nobody can see it.

    Args:
        store: where.
        input_ids: integers `[rows, n]`.
        cache: a transformers cache, or per layer (K, V), of the first columns of `input_ids`: `[rows, heads, m, dim]`,
            1 <= m <= n. Of what `model.generate` returns, `past_key_values` fits to `sequences`.
        attention_mask: `[rows, n]`, 1 where a token is. Padding before a row, and behind it, is not stored. None for a
            single row without padding.
        namespace, ttl, pin: see `KVStore.put`.

    Returns:
        What `KVStore.put` returned, row by row; rows of which the cache holds only padding are left out. Rows that
        begin alike share what they have in common.

    Raises:
        ValueError: names what does not fit. Nothing is stored then, nor below.
        LayoutMismatch: the tensors are not those of so many rows, or not of the store's layout.
        UnsupportedLength: a row is so long that it, and all that were computed beside it, have other keys.
        UnsupportedCache: see `KVStore.put`.

    Example:
        >>> import tempfile
        >>> from kvstore import KVLayout, KVStore, ModelIdentity
        >>> identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
        >>> ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
        >>> kv = [(torch.zeros(2, 2, 3, 8).bfloat16(), torch.zeros(2, 2, 3, 8).bfloat16())]
        >>> with tempfile.TemporaryDirectory() as folder, KVStore(folder, identity) as store:
        ...     done = put_batch(store, ids, kv, attention_mask=mask)
        ...     [row.tokens for row in done], store.contains([5, 6])
        ([2, 3], 2)
    """
    check_rows(store.identity.layout)
    rows = Rows.of(input_ids, attention_mask, may_end_early=True)
    if getattr(cache, "is_approximate", False):
        raise UnsupportedCache("cache: it is approximate, and only exact caches are stored; compute the batch anew")
    layers = cache_layers(cache) if hasattr(cache, "layers") else tuple((k, v) for k, v in cache)
    given = _given(store.identity.layout, rows, layers)
    return [store.put(tokens, kv, namespace=namespace, ttl=ttl, pin=pin) for tokens, kv in given]


def _given(layout: KVLayout, rows: Rows, layers: KVLayers) -> list[tuple[list[int], KVLayers]]:
    """The tokens and the cache of each row that is not all padding in the columns of the cache; checked."""
    columns, given = _columns(layers, len(rows.tokens), rows.columns), []
    for row, (tokens, begin) in enumerate(zip(rows.tokens, rows.begins, strict=True)):
        held = tokens[: max(0, columns - begin)]
        kv = row_of(layers, row, begin, begin + len(held))
        if held:
            check_length(layout, len(held))
            layout.layers_of(kv, len(held))
            given.append((held, kv))
    return given


def _columns(layers: KVLayers, rows: int, most: int) -> int:
    """How many columns a batch cache holds. Raises `LayoutMismatch` if it is not one of so many rows and columns."""
    for number, pair in enumerate(layers):
        for name, tensor in zip("KV", pair, strict=True):
            shape, first = tuple(getattr(tensor, "shape", ())), tuple(getattr(layers[0][0], "shape", ()))
            if len(shape) != 4 or shape[0] != rows or shape[2] != first[2] or not 1 <= shape[2] <= most:
                raise LayoutMismatch(
                    f"{name} of layer {number}: expected [rows={rows}, heads, tokens, dim] with the same 1 to {most} "
                    f"tokens in each layer, found {list(shape) or type(tensor).__name__}"
                )
    return int(layers[0][0].shape[2]) if layers else 0


def get_batch(
    store: KVStore,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    namespace: str | bytes = b"",
    device: Any = None,
) -> BatchHit | None:
    """Return the cache of the first columns of a batch, as many as are stored of every row.

    It fits to `model.generate(input_ids, attention_mask=attention_mask, past_key_values=hit.cache)`: the last column is
    left to be computed. So the row of which the least is stored decides; `generate` of this package uses all that is
    stored of each row.

    Args:
        store: from where.
        input_ids, attention_mask: `[rows, n]`, padded on the left; None for a single row without padding.
        namespace, device: see `KVStore.get`.

    Returns:
        A `BatchHit`, or None if there is no column in which every row is stored or padding.

    Raises:
        ValueError: names what does not fit.
        UnsupportedCache: the store's caches have layers that do not keep all tokens.

    Example:
        >>> import tempfile
        >>> from kvstore import KVLayout, KVStore, ModelIdentity
        >>> identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
        >>> kv = [(torch.ones(2, 2, 8).bfloat16(), torch.ones(2, 2, 8).bfloat16())]
        >>> ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
        >>> with tempfile.TemporaryDirectory() as folder, KVStore(folder, identity) as store:
        ...     done = store.put([5, 6], kv), store.put([7, 8], kv)
        ...     hit = get_batch(store, ids, attention_mask=mask)
        ...     hit.columns, hit.tokens, hit.cache.layers[0].keys[:, 0, :, 0].tolist()
        (2, (1, 2), [[0.0, 1.0], [1.0, 1.0]])
    """
    check_rows(store.identity.layout)
    rows = Rows.of(input_ids, attention_mask)
    spans = list(zip(rows.tokens, rows.begins, strict=True))
    columns = min(begin + store.contains(tokens, namespace=namespace) for tokens, begin in spans)
    columns = min(columns, rows.columns - 1)
    found: list[KVLayers] = []
    for tokens, begin in spans:
        wanted = columns - begin
        hit = None
        if wanted > 0:
            hit = store.get(tokens, namespace=namespace, max_tokens=wanted, device=device, reserve=0)
            columns = begin + (0 if hit is None else hit.tokens)  # fewer, if something left meanwhile
        found.append(() if hit is None else _plain(hit))
    held = tuple(max(0, columns - begin) for begin in rows.begins)
    if not any(held):
        return None
    batch = LeftPadded(store.identity.layout, len(found), columns, device, _RESERVE)
    for row, (layers, count) in enumerate(zip(found, held, strict=True)):
        batch.fill(row, row_of(layers, 0, 0, count))
    return BatchHit(columns, held, batch.cache())


def _plain(hit: Hit) -> KVLayers:
    """The layers of a hit, each of which holds all of its tokens."""
    kinds = {type(layer).__name__ for layer in hit.cache().layers} - {"GrowingLayer"}
    if kinds:
        raise UnsupportedCache(
            f"batches are supported of layers that keep all tokens, and these caches have a {min(kinds)}; call get for "
            "each row by itself"
        )
    return hit.layers
