"""Fits the predictors of AQUA-KV, layer by layer in closed loop: a predictor sees what the decoder will have.

Windows of text pass one at a time; what is kept of them is the sums that a linear fit needs, and the decoded layer that
the next one is predicted from (bf16, in memory or in files).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.calibration.dump import KVDump, floats
from kvstore.codecs.aqua.codec import BACKBONES, FIRST_BITS, Backbone
from kvstore.codecs.aqua.higgs import Floats
from kvstore.codecs.aqua.predictors import AquaPredictors, Weights, predict, rounded, weight_shapes
from kvstore.core.layout import SINKS, KVLayout
from kvstore.core.rope import rotate
from kvstore.errors import ProfileError

DAMP = 1e-3  # of the ridge, relative to the mean square of the inputs; as the paper's
LARGEST = float(np.finfo(np.float16).max)
Sums = npt.NDArray[np.float64]


class Windows(Protocol):
    """Caches of windows of text, each prefilled from position 0: a dump.

    `layer(l, w)` are K (after the rotary embedding, as cached) and V of a layer of a window, float32
    `[length, heads * dim]`, arrays of numpy or torch.
    """

    layout: KVLayout
    windows: int
    length: int

    def layer(self, layer: int, window: int) -> tuple[Any, Any]: ...


class DumpWindows:
    """`Windows` of those of a dump that are to be fitted to; `watch` is told a layer when its first window is read."""

    def __init__(self, dump: KVDump, watch: Any) -> None:
        self._dump, self._watch = dump, watch
        self.layout: KVLayout = dump.layout
        self.windows, self.length = len(dump.fit_windows), dump.length

    def layer(self, layer: int, window: int) -> tuple[Any, Any]:
        if window == 0:
            self._watch(layer)
        keys, values = self._dump.layer(layer, self._dump.fit_windows[window])
        return floats(keys), floats(values)


def fit(dump: Windows, bits: int, backbone: str = "higgs", scratch: Path | None = None) -> AquaPredictors:
    """The predictors for a codec of so many bits and this backbone.

    scratch: a folder for files of in all 4 bytes a value of a layer, which are left there; None keeps them in memory.
    Raises `ProfileError` where the windows are too short, or hold numbers that cannot be fitted.
    """
    if dump.windows < 1 or dump.length <= SINKS:
        raise ProfileError(f"cannot fit {dump.windows} windows of {dump.length} tokens")
    weight_shapes(dump.layout)
    before = _Decoded.empty(dump, 0, scratch)
    for window in range(dump.windows):
        for part, targets in enumerate((_keys(dump, 0, window), _values(dump, 0, window))):
            before.put(part, window, _coded(BACKBONES[backbone], FIRST_BITS, targets))
    weights = []
    for layer in range(1, len(dump.layout.layers)):
        found, before = _fit_layer(dump, layer, before, BACKBONES[backbone], bits, scratch)
        weights.append(found)
    return AquaPredictors(dump.layout, tuple(weights))


class Ridge:
    """Sums for a linear map with a constant, damped: `add` windows, then `solve`."""

    def __init__(self) -> None:
        self._gram: Sums | None = None
        self._moment: Sums | None = None

    def add(self, inputs: list[Floats], targets: Floats) -> None:
        """inputs: `[tokens, n]` each; targets: `[tokens, outputs]`."""
        x = np.concatenate([*inputs, np.ones((len(targets), 1), np.float32)], axis=1).astype(np.float64)
        gram, moment = x.T @ x, x.T @ targets.astype(np.float64)
        self._gram = gram if self._gram is None else self._gram + gram
        self._moment = moment if self._moment is None else self._moment + moment

    def solve(self) -> Weights:
        """`[inputs + 1, outputs]`, fp16. Raises `ProfileError` for sums that are not finite."""
        if self._gram is None or self._moment is None:
            raise ValueError("no window was added")
        if not (np.isfinite(self._gram).all() and np.isfinite(self._moment).all()):
            raise ProfileError("the windows hold numbers that are not finite")
        damped = self._gram + np.eye(len(self._gram)) * (DAMP * self._gram.diagonal().mean())
        try:
            found = np.linalg.solve(damped, self._moment)
        except np.linalg.LinAlgError as error:
            raise ProfileError("the windows hold nothing but zeros") from error
        return found.clip(-LARGEST, LARGEST).astype(np.float16)


class _Decoded:
    """K, before the rotary embedding, and V of one layer of all windows, as bf16 bits `[windows, tokens, width]`."""

    def __init__(self, arrays: list[npt.NDArray[np.uint16]]) -> None:
        self._arrays = arrays

    @classmethod
    def empty(cls, dump: Windows, layer: int, scratch: Path | None) -> _Decoded:
        shape, arrays = dump.layout.layers[layer], []
        for name, dim in (("key", shape.key_dim), ("value", shape.value_dim)):
            size = (dump.windows, dump.length - SINKS, shape.heads * dim)
            if scratch is None:
                arrays.append(np.empty(size, np.uint16))
            else:  # two layers at a time are in use: the files of the last but one are written anew
                path = scratch / f"{name}.{layer % 2}"
                arrays.append(np.memmap(path, dtype=np.uint16, mode="w+", shape=size))
        return cls(arrays)

    def put(self, part: int, window: int, numbers: Floats) -> None:
        """numbers: bf16, so that nothing is lost."""
        self._arrays[part][window] = (numbers.view(np.uint32) >> 16).astype(np.uint16)

    def part(self, part: int, window: int) -> Floats:
        found: Floats = (self._arrays[part][window].astype(np.uint32) << 16).view(np.float32)
        return found


def _fit_layer(
    dump: Windows, layer: int, before: _Decoded, backbone: Backbone, bits: int, scratch: Path | None
) -> tuple[tuple[Weights, Weights], _Decoded]:
    """The weights of K and V of a layer, and the layer decoded."""
    decoded = _Decoded.empty(dump, layer, scratch)
    keys, values = Ridge(), Ridge()
    for window in range(dump.windows):
        keys.add([before.part(0, window)], _keys(dump, layer, window))
    key_weights = keys.solve()
    wide = key_weights.astype(np.float64)
    for window in range(dump.windows):
        guess = predict(wide, [before.part(0, window)])
        decoded.put(0, window, _coded(backbone, bits, _keys(dump, layer, window), guess))
        values.add([decoded.part(0, window), before.part(1, window)], _values(dump, layer, window))
    value_weights = values.solve()
    wide = value_weights.astype(np.float64)
    for window in range(dump.windows):
        guess = predict(wide, [decoded.part(0, window), before.part(1, window)])
        decoded.put(1, window, _coded(backbone, bits, _values(dump, layer, window), guess))
    return (key_weights, value_weights), decoded


def _keys(dump: Windows, layer: int, window: int) -> Floats:
    """Before their rotary embedding, of all tokens but the first, which are never predicted."""
    keys = np.asarray(dump.layer(layer, window)[0], np.float32)[SINKS:]
    positions = np.arange(SINKS, dump.length, dtype=np.int64)
    return rotate(keys, dump.layout.layers[layer].heads, positions, dump.layout.rope, -1)


def _values(dump: Windows, layer: int, window: int) -> Floats:
    return np.asarray(dump.layer(layer, window)[1], np.float32)[SINKS:]


def _coded(backbone: Backbone, bits: int, target: Floats, guess: Floats | None = None) -> Floats:
    """What the decoder will have of `target`, `[tokens, width]`. Raises `ProfileError` where that is nothing."""
    residual = target if guess is None else target - guess
    data = backbone.encode(residual, bits)
    if data is None:
        raise ProfileError("the windows hold numbers that are not finite")
    decoded = backbone.decode(data, len(residual), residual.shape[1], bits)
    return rounded(decoded if guess is None else guess + decoded)
