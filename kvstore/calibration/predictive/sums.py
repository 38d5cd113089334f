"""Sums over rows, from which every ridge regression of the exact mode is solved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.calibration.predictive.cholesky import solved
from kvstore.calibration.predictive.inputs import Wiring, used_inputs
from kvstore.calibration.targets import reach
from kvstore.codecs.predictive.model import MAX_BIAS
from kvstore.core.layout import KVLayout

Arrays = dict[str, np.ndarray[Any, Any]]
Tensor = torch.Tensor
Columns = tuple[int, slice]
"""A layer, and which of its inputs."""
DAMP = 1e-3  # of the mean diagonal of the Gram matrix, as in AQUA-KV
_STEP = 1 << 25  # multiply-adds of a step of a product, about


class ProductSums:
    """Sums over rows: of the inputs, and of their products with those of the same layer and of the two before.

    layers: those that are to be solved; None for all but the first, which needs no inputs.
    """

    def __init__(self, layout: KVLayout, layers: range | None = None) -> None:
        self._keys = [x.heads * x.key_dim for x in layout.layers]
        width = _widths(layout)
        self._sum = [torch.zeros(n, dtype=torch.double) for n in width]
        wanted = range(1, len(width)) if layers is None else layers
        self._product = {(i, j): torch.zeros(width[i], width[j], dtype=torch.double) for i, j in _pairs(wanted)}
        self.rows = 0

    def add(self, layers: list[tuple[Tensor, Tensor]], pause: Callable[[], None] = lambda: None) -> None:
        """Add the inputs of some rows, K and V of each layer. `pause` is called before every step of some
        milliseconds."""
        self.rows += len(layers[0][0])
        rows = dict[int, Tensor]()
        for number, pair in enumerate(layers):
            pause()
            rows.pop(number - 3, None)  # no product needs it any more
            rows[number] = x = torch.cat(pair, 1)
            self._sum[number] += x.sum(0)
            for j in range(max(0, number - 2), number + 1):
                if (number, j) in self._product:
                    strip = max(1, _STEP // max(1, rows[j].numel()))
                    for begin in range(0, x.shape[1], strip):
                        pause()
                        part = slice(begin, begin + strip)
                        self._product[number, j][part] += x[:, part].T @ rows[j]

    def solve(
        self, number: int, which: int, arrays: Arrays, wiring: Wiring, pause: Callable[[], None] = lambda: None
    ) -> None:
        """Puts `weight`, `bias` and `out_scale` of a part among the arrays. `pause` is called before every step of some
        milliseconds."""
        prefix, split = f"{number}.{'kv'[which]}.", self._keys[number]
        before = [number - 1, number - 2][: min(number, 2)]
        own = [(number, slice(0, split))] if which else []
        inputs = [*((i, slice(None)) for i in before), *own]
        shapes = [(self._keys[i], len(self._sum[i])) for i in before]
        used = used_inputs(wiring, which, shapes, len(own) * split)
        target = (number, slice(split, None) if which else slice(0, split))
        gram, moment = self.covariances(inputs, inputs, pause), self.covariances(inputs, [target], pause)
        gram += torch.eye(len(gram), dtype=torch.double) * DAMP * gram.diagonal().mean()
        weight = torch.zeros_like(moment)
        weight[used] = solved(gram[used][:, used], moment[used], pause)
        pause()
        scale = (weight.abs().amax(0) / 127).clamp(min=1e-12)
        whole = (weight / scale).round()
        means = torch.cat([self._sum[i][part] for i, part in inputs]) / self.rows
        middle = self._sum[number][target[1]] / self.rows
        bias = ((middle - means @ (whole * scale)) / scale).round().clamp(-MAX_BIAS, MAX_BIAS)
        fix = arrays.get(prefix + "fix")
        unit = scale.numpy() / reach(arrays[prefix + "in_scale"], fix)
        arrays[prefix + "weight"], arrays[prefix + "bias"] = whole.to(torch.int8).numpy(), bias.to(torch.int32).numpy()
        arrays[prefix + "out_scale"] = (unit if fix is None else unit * np.exp2(fix.astype(float))).astype(np.float32)

    @staticmethod
    def passes(layout: KVLayout, most_bytes: int) -> list[range]:
        """All layers but the first, in runs of which the sums take at most `most_bytes`, or of one layer each."""
        width, runs, first = _widths(layout), list[range](), 1
        for stop in range(2, len(width) + 1):
            longer = _pairs(range(first, stop + 1))
            if stop == len(width) or sum(8 * width[i] * width[j] for i, j in longer) > most_bytes:
                runs.append(range(first, stop))
                first = stop
        return runs

    def mean(self, a: Columns) -> Tensor:
        """Of some inputs of a layer, float64."""
        return self._sum[a[0]][a[1]] / self.rows

    def covariances(self, rows: Sequence[Columns], columns: Sequence[Columns], pause: Callable[[], None]) -> Tensor:
        """Times the number of `rows`: of some inputs and others, float64 `[inputs, inputs]`. Those of a row and a
        column are at most two layers apart. `pause` is called before every step of some milliseconds."""
        found = []
        for a in rows:
            beside = []
            for b in columns:
                pause()
                beside.append(self._covariance(a, b))
            found.append(torch.cat(beside, 1))
        return torch.cat(found)

    def _covariance(self, a: Columns, b: Columns) -> Tensor:
        (i, rows), (j, columns) = a, b
        product = self._product[i, j] if i >= j else self._product[j, i].T
        return product[rows, columns] - torch.outer(self._sum[i][rows], self._sum[j][columns]) / self.rows


def _widths(layout: KVLayout) -> list[int]:
    """Values of K and V of a token, by layer."""
    return [x.heads * (x.key_dim + x.value_dim) for x in layout.layers]


def _pairs(layers: range) -> list[tuple[int, int]]:
    """The pairs of layers whose products predictions of `layers` need."""
    first = max(0, layers.start - 2)
    return [(i, j) for i in range(first, layers.stop) for j in range(max(first, i - 2), i + 1)]
