"""What parts are predicted from: 8-bit inputs, and which of them count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump
from kvstore.calibration.targets import reach, target
from kvstore.codecs.predictive.linear_model import RANGE, rotates

Arrays = dict[str, np.ndarray[Any, Any]]
Tensor = torch.Tensor
SIGMAS = 5.0  # an input's 8 bits reach this far beyond its mean
HEADROOM = 2.0  # of K's fixed point above the largest pair that was seen
SCALE_WINDOWS = 4  # from so many windows


@dataclass(frozen=True)
class Wiring:
    """What is used of what the codec could use; everything, but to measure what each part brings.

    tokens: the table of layer 0. layers: how many layers before. values: of them K's prediction sees V too, V's always
    does (AQUA-KV: one layer, without). own_keys: V's sees K of its layer. adapt: scales follow the row.
    """

    tokens: bool = True
    layers: int = 2
    values: bool = True
    own_keys: bool = True
    adapt: bool = True


def fit_scales(dump: KVDump, arrays: Arrays) -> None:
    """How values become 8-bit inputs, and K's fixed point; from the first windows."""
    for number, which, prefix, x in sampled_parts(dump):
        largest = largest_inputs(x)
        power = np.ones(len(largest), np.float32)
        turned = which == 0 and rotates(dump.layout)
        if turned:
            arrays[prefix + "fix"] = _fixed_point(x, dump.layout.layers[number].key_dim // 2)
            power = np.exp2(arrays[prefix + "fix"].astype(np.float32))
        # A rotation leaves 14 binary places more.
        arrays[prefix + "in_scale"] = (127 / largest / (power * (1 << 14) if turned else 1)).astype(np.float32)
        if number == 0:
            arrays[prefix + "out_scale"] *= power


def sampled_parts(dump: KVDump) -> Iterator[tuple[int, int, str, np.ndarray[Any, Any]]]:
    """Of each part its layer, 0 for K or 1 for V, the beginning of its arrays' names, and its values in the first
    windows, float32 [rows, C]."""
    windows = list(dump.fit_windows)[:SCALE_WINDOWS]
    for number in range(len(dump.layout.layers)):
        for which in range(2):
            x = np.concatenate([target(dump, number, which, window) for window in windows])
            yield number, which, f"{number}.{'kv'[which]}.", x


def largest_inputs(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What 8 bits must reach, of each column of values [rows, C]."""
    largest: np.ndarray[Any, Any] = np.maximum(np.abs(x.mean(0)) + SIGMAS * x.std(0), 1e-6)
    return largest


def _fixed_point(x: np.ndarray[Any, Any], half: int) -> np.ndarray[Any, Any]:
    pairs = x.reshape(len(x), -1, 2, half)
    largest = np.hypot(pairs[:, :, 0], pairs[:, :, 1]).max(0)
    places = np.floor(np.log2(RANGE / (HEADROOM * np.maximum(largest, 1e-6)))).clip(-14, 30).astype(np.int8)
    return np.stack([places, places], 1).reshape(-1)  # places is [heads, half]


def inputs_of(dump: KVDump, window: int, rows: slice, arrays: Arrays) -> list[tuple[Tensor, Tensor]]:
    """Per layer the inputs of K and of V of some rows of a window, float32 [rows, C] of whole numbers.

    In floating point, so here and there a step beside `reference.inputs_of`, which is all the same to a fit.
    """
    found = []
    for number in range(len(dump.layout.layers)):
        pair = []
        for which in range(2):
            prefix = f"{number}.{'kv'[which]}."
            scale = reach(arrays[prefix + "in_scale"], arrays.get(prefix + "fix"))
            x = target(dump, number, which, window, rows)
            pair.append(torch.from_numpy(x * scale).round_().clamp_(-127, 127))
        found.append((pair[0], pair[1]))
    return found


def used_inputs(wiring: Wiring, which: int, before: list[tuple[int, int]], own: int) -> Tensor:
    """Which inputs of a part count, bool [inputs]. before: of the layers before, values of K, and of K and V."""
    flags = []
    for number, (keys, width) in enumerate(before):
        near = number < wiring.layers
        # In AQUA-KV K is predicted from K of the layer before, V from V of that and K of its own.
        flags += [near and (wiring.values or which == 0)] * keys
        flags += [near and (wiring.values or which == 1)] * (width - keys)
    return torch.tensor(flags + [wiring.own_keys] * own)
