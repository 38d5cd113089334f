"""Where vLLM's paged memory has the keys and values of tokens, and how they are copied out of it and into it.

A layer's cache is `[blocks, heads, rows, content]`: one page for each block and head, with the keys of `rows` tokens
and their values. On a GPU a row has the key of a token, then its value. On a CPU the first part of a page has all keys
and the second all values, in an order that follows the machine's instructions; `order_of` finds it by trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.errors import UnsupportedModel

Pair = tuple[torch.Tensor, torch.Tensor]
# Patterns of 16 bits that are plain numbers of every 16-bit type, so that nothing on the way changes them.
_FIRST_PATTERN, _PATTERNS = 0x1000, 0x4000


@dataclass(frozen=True)
class PageOrder:
    """In which order a page has the numbers of keys, or of values.

    Attributes:
        kind: "rows": token by token; "columns": dimension by dimension; "any": as `places` says.
        places: `[rows * dim]`, for each number of `[rows, dim]` its place in the page; None unless "any".

    Example:
        >>> PageOrder.of(torch.tensor([0, 2, 4, 1, 3, 5]), rows=3, dim=2).kind
        'columns'
    """

    kind: str
    places: torch.Tensor | None = None

    @classmethod
    def of(cls, numbers: torch.Tensor, rows: int, dim: int) -> PageOrder:
        """Tell the order from what stands where.

        Args:
            numbers: `[rows * dim]`, for each place of the page which number of `[rows, dim]` it has.

        Raises:
            UnsupportedModel: the page does not have each number once.
        """
        counted = torch.arange(rows * dim)
        if not torch.equal(numbers.sort().values, counted):
            raise UnsupportedModel(
                "vLLM's pages do not have each number of keys and values once; they cannot be stored"
            )
        if torch.equal(numbers, counted):
            return cls("rows")
        if torch.equal(numbers, counted.view(rows, dim).t().flatten()):
            return cls("columns")
        return cls("any", numbers.argsort())

    def read(self, pages: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
        """Return `[..., rows, dim]` of `[..., rows * dim]`; a view unless the order is "any"."""
        if self.kind == "columns":
            return pages.view(*pages.shape[:-1], dim, rows).transpose(-1, -2)
        if self.places is not None:
            pages = pages.index_select(-1, self.places)
        return pages.view(*pages.shape[:-1], rows, dim)

    def write(self, pages: torch.Tensor, numbers: torch.Tensor) -> None:
        """Write `[..., rows, dim]` into `[..., rows * dim]`."""
        rows, dim = numbers.shape[-2:]
        if self.places is not None:
            pages.index_copy_(-1, self.places, numbers.flatten(-2))
        else:
            self.read(pages, rows, dim).copy_(numbers)


def order_of(
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], shape: Sequence[int], dtype: torch.dtype
) -> tuple[PageOrder, PageOrder]:
    """Find the orders of keys and of values in a page by writing two caches whose numbers say where they belong.

    Args:
        write: writes keys and values `[rows, heads, dim]` of one block into the cache that is its third argument.
        shape: of a cache, `[blocks, heads, rows, 2 * dim]`.
        dtype: of 16 bits.

    Raises:
        UnsupportedModel: see `PageOrder.of`.
    """
    _, heads, rows, content = shape
    dim = content // 2
    if torch.empty(0, dtype=dtype).element_size() != 2 or max(rows, dim) > _PATTERNS:
        raise UnsupportedModel(
            f"vLLM keeps its cache on the CPU in {dtype}, {rows} x {dim}: only 16-bit types are known"
        )
    found = []
    for counted in (torch.arange(rows)[:, None, None], torch.arange(dim)):
        numbers = (counted + _FIRST_PATTERN).to(torch.int16).expand(rows, heads, dim).contiguous().view(dtype)
        cache = torch.zeros(tuple(shape), dtype=dtype)
        write(numbers, numbers, cache)
        found.append(cache.view(torch.int16)[0, 0].flatten().long() - _FIRST_PATTERN)
    token, number = found
    which = (token * dim + number).view(2, rows * dim)
    return PageOrder.of(which[0], rows, dim), PageOrder.of(which[1], rows, dim)


@dataclass(frozen=True)
class PagedLayer:
    """The paged cache of one layer.

    Attributes:
        cache: `[blocks, heads, rows, key_dim + value_dim]`, vLLM's own memory. A block of vLLM may be several here.
        key_dim, value_dim: of the layer.
        orders: of keys and values in a page; None: a row has a key, then a value.
    """

    cache: torch.Tensor
    key_dim: int
    value_dim: int
    orders: tuple[PageOrder, PageOrder] | None = None

    def _pages(self, places: torch.Tensor) -> Pair:
        """`[blocks, heads, rows, dim]` of whole blocks: keys and values, copied."""
        pages = self.cache.index_select(0, places)
        if self.orders is None:
            return pages[..., : self.key_dim], pages[..., self.key_dim :]
        rows, keys = pages.shape[2], pages.shape[2] * self.key_dim
        flat = pages.flatten(2)
        return (
            self.orders[0].read(flat[..., :keys], rows, self.key_dim),
            self.orders[1].read(flat[..., keys:], rows, self.value_dim),
        )

    def read(self, places: torch.Tensor, skip: int, count: int) -> Pair:
        """Return K and V, `[heads, count, dim]`, of the tokens behind the first `skip` of these blocks; copies."""
        keys, values = (part.transpose(0, 1).flatten(1, 2)[:, skip : skip + count] for part in self._pages(places))
        return keys.contiguous(), values.contiguous()

    def write(self, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V, `[heads, tokens, dim]`, of as many tokens as these blocks have rows for."""
        rows = self.cache.shape[2]
        parts = [
            part.reshape(part.shape[0], -1, rows, part.shape[2]).transpose(0, 1).to(self.cache.device)
            for part in (keys, values)
        ]
        if self.orders is None:
            pages = torch.cat(parts, dim=-1)
        else:
            pages = self.cache.new_empty((len(places), *self.cache.shape[1:]))
            flat, split = pages.view(len(places), self.cache.shape[1], -1), rows * self.key_dim
            self.orders[0].write(flat[..., :split], parts[0])
            self.orders[1].write(flat[..., split:], parts[1])
        self.cache.index_copy_(0, places, pages)


@dataclass(frozen=True)
class PagedCache:
    """The paged caches of all layers, in the order of the layers. Thread-safe for blocks that nobody else writes.

    Attributes:
        layers: at least one; all have as many rows in a block.
        block_tokens: tokens of a block of vLLM's scheduler, a multiple of those rows.
    """

    layers: tuple[PagedLayer, ...]
    block_tokens: int

    def _places(self, blocks: Sequence[int], skip_rows: int = 0) -> torch.Tensor:
        """The places in the first dimension of a cache that belong to these blocks."""
        cache = self.layers[0].cache
        parts = self.block_tokens // cache.shape[2]
        first = torch.tensor(list(blocks), dtype=torch.int64)[:, None] * parts
        return (first + torch.arange(parts)).flatten().to(cache.device)

    def read(self, blocks: Sequence[int], start: int, end: int) -> list[Pair]:
        """Copy the keys and values of tokens [start, end) out.

        Args:
            blocks: numbers of the blocks that have these tokens, the first with token `start`.

        Returns:
            Per layer K and V, `[heads, end - start, dim]`, on the device of the cache.
        """
        places, skip = self._places(blocks), start % self.block_tokens
        return [layer.read(places, skip, end - start) for layer in self.layers]

    def write(self, blocks: Sequence[int], layers: Sequence[Pair], start: int, end: int) -> None:
        """Copy keys and values of tokens [start, end) in, which fill whole blocks.

        Args:
            blocks: numbers of these blocks.
            layers: per layer K and V of all tokens from 0 on, `[1, heads, tokens, dim]`.
        """
        places = self._places(blocks)
        for layer, (keys, values) in zip(self.layers, layers, strict=True):
            layer.write(places, keys[0, :, start:end], values[0, :, start:end])
        device = self.layers[0].cache.device
        if device.type == "cuda":  # the caller says that they are there
            torch.cuda.current_stream(device).synchronize()

    def mark(self) -> Callable[[], None]:
        """Return what waits, in any thread, until the copies that this thread asked for so far are made."""
        device = self.layers[0].cache.device
        if device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event.synchronize

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, keys and values."""
        return sum(
            layer.cache.shape[1] * (layer.key_dim + layer.value_dim) * layer.cache.element_size()
            for layer in self.layers
        )


def paged_cache(
    caches: dict[str, Any], names: Sequence[str], block_tokens: int, orders: tuple[PageOrder, PageOrder] | None
) -> PagedCache:
    """Make a `PagedCache` of what vLLM registers.

    Args:
        caches: by name of the layer, `[blocks, heads, rows, 2 * dim]`.
        names: of the layers that are stored, in their order.
        block_tokens: tokens of a block of vLLM's scheduler.
        orders: of a page on the CPU.

    Raises:
        UnsupportedModel: names a layer whose cache is of another shape.
    """
    layers = []
    for name in names:
        cache = caches.get(name)
        if (
            not isinstance(cache, torch.Tensor)
            or cache.dim() != 4
            or cache.shape[3] % 2
            or block_tokens % cache.shape[2]
        ):
            found = list(cache.shape) if isinstance(cache, torch.Tensor) else type(cache).__name__
            raise UnsupportedModel(f"{name}: expected a cache [blocks, heads, rows, 2 * dim], found {found}")
        dim = cache.shape[3] // 2
        layers.append(PagedLayer(cache, dim, dim, orders))
    return PagedCache(tuple(layers), block_tokens)
