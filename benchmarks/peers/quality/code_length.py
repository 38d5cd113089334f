"""What symbols take under tables that were counted beforehand: the length that an arithmetic coder comes near."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Symbols = npt.NDArray[Any]
SMOOTHING = 0.5  # of a symbol that was never seen


class Tables:
    """A table a row: of a channel, or of all values of one kind. counts: `[rows, symbols]`."""

    def __init__(self, counts: npt.NDArray[Any]) -> None:
        p = counts.astype(np.float64) + SMOOTHING
        self._bits = -np.log2(p / p.sum(1, keepdims=True))

    @classmethod
    def of(cls, symbols: Symbols, count: int) -> Tables:
        return cls(counted(symbols, count))

    def bits(self, symbols: Symbols) -> float:
        """symbols: `[rows, n]`, of each row those that its table is for. Their bits, without the last byte's rest."""
        return float(np.take_along_axis(self._bits, symbols.astype(np.int64), 1).sum())


def counted(symbols: Symbols, count: int) -> npt.NDArray[np.int64]:
    """How often each of `count` symbols is in each row of `symbols` `[rows, n]`: `[rows, count]`."""
    rows = len(symbols)
    flat = symbols.astype(np.int64) + np.arange(rows)[:, None] * count
    return np.bincount(flat.ravel(), minlength=rows * count).reshape(rows, count)
