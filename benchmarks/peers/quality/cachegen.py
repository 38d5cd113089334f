"""Coding as CacheGen (arXiv:2310.07240) has it, from the paper: of each ten tokens the first is an anchor in 8 bits,
the others are differences from it, quantised more coarsely the deeper the layer, and an arithmetic coder has a table
for every channel of every layer.

A difference is measured by its channel's standard deviation: steps of 0.5, 1 and 1.5 of it in the first, second and
last third of the layers, times `level`. Deviations and tables are fitted to the same windows as the other methods and
are not counted; coded bits are the code length under the tables. Keys are coded as they are kept, with their rotary
embedding, as the paper does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.peers.quality.clock import Clock
from benchmarks.peers.quality.code_length import Tables, counted
from benchmarks.peers.quality.data import Pairs
from kvstore.calibration.aqua.fit import Windows
from kvstore.core.layout import KVLayout

Floats = npt.NDArray[np.float32]
RUN = 10  # tokens: an anchor and what is measured from it
STEPS = (0.5, 1.0, 1.5)  # by thirds of the layers
TOP = 31  # the greatest difference, in steps
SINKS = 4
LEVELS = (0.5, 1.0, 1.5, 2.5)


def step_of(layer: int, layers: int) -> float:
    return STEPS[min(len(STEPS) * layer // layers, len(STEPS) - 1)]


def anchors_of(x: Floats) -> tuple[npt.NDArray[np.int16], Floats, npt.NDArray[np.int64]]:
    """Of rows `[n, channels]`: the anchors in 8 bits, -127 to 127; what they decode to; and each row's anchor."""
    rows = x[::RUN]
    scale = (np.abs(rows).max(1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    coded = np.rint(rows / np.maximum(scale, 1e-7)).clip(-127, 127)
    return coded.astype(np.int16), coded * scale, np.arange(len(x)) // RUN


def differences(x: Floats, decoded: Floats, anchor: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Which rows are differences, and those."""
    others = np.arange(len(x)) % RUN != 0
    return others, x[others] - decoded[anchor[others]]


def fit(dump: Windows) -> dict[str, npt.NDArray[Any]]:
    """By layer and part, names as "3.k": `.deviation` of differences; counts of symbols, `.anchors` and, by level,
    `.differences`, `[levels, channels, symbols]`."""
    found: dict[str, npt.NDArray[Any]] = {}
    layers = len(dump.layout.layers)
    for layer in range(layers):
        both = [dump.layer(layer, window) for window in range(dump.windows)]
        for part, name in enumerate("kv"):
            anchors, left = [], []
            for pair in both:
                x = np.asarray(pair[part], np.float32)[SINKS:]
                coded, decoded, anchor = anchors_of(x)
                anchors.append(coded)
                left.append(differences(x, decoded, anchor)[1])
            all_left = np.concatenate(left)
            deviation = np.maximum(all_left.std(0), 1e-6)
            found[f"{layer}.{name}.deviation"] = deviation
            found[f"{layer}.{name}.anchors"] = counted(np.concatenate(anchors).T + 127, 255)
            steps = [deviation * step_of(layer, layers) * level for level in LEVELS]
            found[f"{layer}.{name}.differences"] = np.stack(
                [counted(_symbols(all_left, step).T + TOP, 2 * TOP + 1) for step in steps]
            )
    return found


def _symbols(left: Floats, step: Floats) -> npt.NDArray[np.int16]:
    return np.rint(left / step).clip(-TOP, TOP).astype(np.int16)


class _Tensor:
    """The coder of K or V of one layer."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], name: str, step: float, level: float) -> None:
        self._step = arrays[f"{name}.deviation"] * step * level
        self._anchors = Tables(arrays[f"{name}.anchors"])
        self._differences = Tables(arrays[f"{name}.differences"][LEVELS.index(level)])

    def code(self, x: Floats) -> tuple[Floats, float]:
        """What comes back of `[n, channels]`, and its bits."""
        coded, decoded, anchor = anchors_of(x)
        others, left = differences(x, decoded, anchor)
        symbols = _symbols(left, self._step)
        out = decoded[anchor]
        out[others] += symbols * self._step
        bits = self._anchors.bits(coded.T + 127) + self._differences.bits(symbols.T + TOP)
        return out, bits + 16 * len(coded)


class CacheGen:
    """level: one of LEVELS; more is coarser."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], layout: KVLayout, level: float) -> None:
        layers = len(layout.layers)
        self.decoding = Clock()  # not used: without an arithmetic coder there is no decoding to speak of
        self._tensors = [
            tuple(_Tensor(arrays, f"{layer}.{name}", step_of(layer, layers), level) for name in "kv")
            for layer in range(layers)
        ]

    def code(self, tokens: torch.Tensor, pairs: Pairs, start: int) -> tuple[Pairs, int]:
        bits, found = 0.0, []
        for coders, pair in zip(self._tensors, pairs, strict=True):
            decoded = []
            for coder, tensor in zip(coders, pair, strict=True):
                heads, n, dim = tensor.shape
                rows, taken = coder.code(tensor.float().transpose(0, 1).reshape(n, -1).numpy())
                decoded.append(torch.from_numpy(rows).view(n, heads, dim).transpose(0, 1).to(tensor.dtype))
                bits += taken
            found.append((decoded[0], decoded[1]))
        return found, int(bits / 8) + 1
