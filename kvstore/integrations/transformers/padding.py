"""The rows of a left-padded batch: their tokens without padding, and caches in which all of them end in one column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvstore.core.layout import KVLayers, KVLayout
from kvstore.errors import UnsupportedCache
from kvstore.integrations.transformers.cache import cache_from_layers


@dataclass(frozen=True)
class Rows:
    """The sequences of a batch. Column c of the batch is token c - `begins[row]` of a row.

    Attributes:
        tokens: of each row, without padding; one or more.
        begins: the column of each row's first token.
        columns: of the batch.

    Example:
        >>> rows = Rows.of(torch.tensor([[0, 0, 7], [4, 5, 6]]), torch.tensor([[0, 0, 1], [1, 1, 1]]))
        >>> rows.tokens, rows.begins, rows.is_padded
        (([7], [4, 5, 6]), (2, 0), True)
    """

    tokens: tuple[list[int], ...]
    begins: tuple[int, ...]
    columns: int

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any, may_end_early: bool = False) -> Rows:
        """Take the padding off.

        Args:
            input_ids: integers `[rows, columns]`.
            attention_mask: `[rows, columns]`, 1 where a token is and 0 where padding is; None only for a single row,
                which has no padding then.
            may_end_early: padding behind the tokens is fine, too.

        Raises:
            ValueError: names the argument, and the row of the mask that does not fit.
        """
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
            found = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            raise ValueError(f"input_ids: expected an integer tensor [rows, tokens], found {found}")
        if 0 in input_ids.shape:
            raise ValueError(f"input_ids: expected at least one row and one token, found {list(input_ids.shape)}")
        ids, columns = input_ids.tolist(), input_ids.shape[1]
        if attention_mask is None:
            if len(ids) > 1:
                raise ValueError(
                    "attention_mask: a batch needs the mask that the tokenizer returned, 0 where padding is; pass "
                    "torch.ones_like(input_ids) if no row is padded"
                )
            return cls((ids[0],), (0,), columns)
        real = _mask(attention_mask, input_ids)
        spans = [_span(row, number, may_end_early) for number, row in enumerate(real.tolist())]
        tokens = tuple(row[begin:end] for row, (begin, end) in zip(ids, spans, strict=True))
        return cls(tokens, tuple(begin for begin, _ in spans), columns)

    @property
    def is_padded(self) -> bool:
        """Whether some row begins behind the first column."""
        return any(self.begins)


def _mask(attention_mask: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """bool `[rows, columns]`, true where a token is."""
    shape = tuple(getattr(attention_mask, "shape", ()))
    if not isinstance(attention_mask, torch.Tensor) or shape != tuple(input_ids.shape):
        found = list(shape) or type(attention_mask).__name__
        raise ValueError(f"attention_mask: expected {list(input_ids.shape)} as input_ids has, found {found}")
    real = attention_mask == 1
    if not bool((real | (attention_mask == 0)).all()):
        raise ValueError("attention_mask: expected 0 where padding is and 1 where a token is, found other values")
    return real


def _span(real: list[bool], row: int, may_end_early: bool) -> tuple[int, int]:
    """The columns from the first token of a row to behind its last one."""
    if True not in real:
        raise ValueError(f"attention_mask: row {row} has no tokens; leave it out")
    begin, end = real.index(True), len(real) - real[::-1].index(True)
    if not all(real[begin:end]):
        raise ValueError(f"attention_mask: row {row} has padding between tokens; only padding before them is supported")
    if end < len(real) and not may_end_early:
        raise ValueError(
            f"attention_mask: row {row} ends with padding; pad on the left instead (tokenizer.padding_side = 'left')"
        )
    return begin, end


class LeftPadded:
    """Memory for the caches of several rows, which all end in the last column; what stands before a row is zeros.

    Not thread-safe.

    Args:
        layout: of the caches.
        rows: how many.
        columns: at least the tokens of the longest row.
        device: where.
        reserve: space behind the columns, into which the cache appends without a copy, in tokens.

    Example:
        >>> padded = LeftPadded(KVLayout.uniform(1, 2, 8, "float32"), rows=2, columns=3, device="cpu")
        >>> for row, tokens in enumerate((3, 1)):
        ...     padded.fill(row, [(torch.ones(1, 2, tokens, 8), torch.ones(1, 2, tokens, 8))])
        >>> padded.cache().layers[0].keys[:, 0, :, 0]
        tensor([[1., 1., 1.],
                [0., 0., 1.]])
    """

    def __init__(self, layout: KVLayout, rows: int, columns: int, device: Any, reserve: int = 0) -> None:
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self._columns = columns
        self._buffers = tuple(
            (
                torch.empty((rows, x.heads, columns + reserve, x.key_dim), dtype=dtype, device=device),
                torch.empty((rows, x.heads, columns + reserve, x.value_dim), dtype=dtype, device=device),
            )
            for x in layout.layers
        )

    def fill(self, row: int, layers: Any, copies: int = 1) -> None:
        """Write the cache of a row; every row must be filled before `cache` is used.

        Args:
            row: which; with `copies`, the first of so many neighbours that all get it.
            layers: per layer (K, V), `[1, heads, tokens, dim]`; none at all for a row without tokens.
        """
        if not layers:
            for buffer in (tensor for pair in self._buffers for tensor in pair):
                buffer[row : row + copies, :, : self._columns].zero_()
        for buffers, pair in zip(self._buffers, layers, strict=True) if layers else ():
            for buffer, tensor in zip(buffers, pair, strict=True):
                begin = self._columns - tensor.shape[-2]
                rows = buffer[row : row + copies]
                rows[:, :, :begin].zero_()
                rows[:, :, begin : self._columns].copy_(tensor)

    def cache(self) -> Any:
        """Make a transformers `DynamicCache` of all rows, which appends to this memory. To be called once."""
        layers: KVLayers = tuple((k[:, :, : self._columns], v[:, :, : self._columns]) for k, v in self._buffers)
        return cache_from_layers(layers, self._buffers)


def check_rows(layout: KVLayout) -> None:
    """Check that the rows of a batch can be taken apart and put together.

    Raises:
        UnsupportedCache: some layers keep the last tokens of a row alone, or states.
    """
    if layout.is_grouped or layout.model_layers:
        raise UnsupportedCache(
            "batches of layers with windows or states, or without keys of their own, are not supported; go on with one "
            "row at a time, without padding"
        )


def row_of(layers: KVLayers, row: int, begin: int, end: int) -> KVLayers:
    """Return the columns `begin` to `end` of one row of a batch cache, `[1, heads, tokens, dim]`, without copying."""
    return tuple((k[row : row + 1, :, begin:end], v[row : row + 1, :, begin:end]) for k, v in layers)
