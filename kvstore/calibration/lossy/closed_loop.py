"""What a decoder would have of the last layers, as inputs of the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump
from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.core.layout import SINKS

Arrays = dict[str, np.ndarray[Any, Any]]
Tensor = torch.Tensor
InputGroup = tuple[int, int]
"""(layer, 0 for K or 1 for V), or (-1, 0) for what the token says."""


@dataclass
class ClosedLoop:
    """What a decoder has of the last layers, for all windows to fit, and the Gram matrices of it."""

    dump: KVDump
    base: PredictiveModel
    steps: Steps
    folder: Path
    _rows: dict[InputGroup, np.ndarray[Any, Any]] = field(default_factory=dict)
    _gram: dict[tuple[InputGroup, InputGroup], Tensor] = field(default_factory=dict)
    _sums: dict[InputGroup, Tensor] = field(default_factory=dict)
    _made: int = 0

    def __post_init__(self) -> None:
        self.count = len(self.dump.fit_windows) * (self.dump.length - SINKS)
        self._add((-1, 0), [])

    def inputs(self, keys: Sequence[InputGroup], window: int) -> Tensor:
        """float32 [tokens but for sinks, inputs]."""
        return torch.from_numpy(np.concatenate([self._of(key, window) for key in keys], 1)).float()

    def gram(self, keys: Sequence[InputGroup]) -> tuple[Tensor, Tensor]:
        """(sums of products [inputs, inputs], sums [inputs]), float64."""
        rows = [[self._gram[a, b] if (a, b) in self._gram else self._gram[b, a].T for b in keys] for a in keys]
        return torch.cat([torch.cat(row, 1) for row in rows], 0), torch.cat([self._sums[key] for key in keys])

    def width(self, key: InputGroup) -> int:
        return len(self._sums[key])

    def begin(self, key: InputGroup, width: int) -> np.ndarray[Any, Any]:
        """A file for the inputs that this part will be, int8 [windows, tokens but for sinks, C]."""
        for old in [old for old in self._rows if old[0] < key[0] - 2]:
            del self._rows[old], self._sums[old]
            self._gram = {pair: x for pair, x in self._gram.items() if old not in pair}
        path = self.folder / str(self._made % 8)
        self._made += 1
        shape = (len(self.dump.fit_windows), self.dump.length - SINKS, width)
        self._rows[key] = np.memmap(path, np.int8, "w+", shape=shape)
        return self._rows[key]

    def end(self, key: InputGroup) -> None:
        """After the rows of `begin` were filled."""
        oldest = key[0] - 2 + key[1]  # V will be predicted together with at most the layer before it
        self._add(key, [other for other in self._sums if other[0] < 0 or other[0] >= oldest])

    def _add(self, key: InputGroup, others: list[InputGroup]) -> None:
        every = [*others, key]
        total, sums = None, None
        for window in self.dump.fit_windows:
            x, mine = self.inputs(every, window), self.inputs([key], window)
            product, s = mine.T @ x, mine.sum(0)
            total = product.double() if total is None else total + product
            sums = s.double() if sums is None else sums + s
        assert total is not None
        assert sums is not None
        self._sums[key] = sums
        at = 0
        for other in every:
            width = len(self._sums[other])
            self._gram[key, other] = total[:, at : at + width]
            at += width

    def _of(self, key: InputGroup, window: int) -> np.ndarray[Any, Any]:
        token = key[0] < 0
        found: np.ndarray[Any, Any] = (
            self.base.token_kv[self.dump.tokens(window)[SINKS:]] if token else self._rows[key][window]
        )
        return found
