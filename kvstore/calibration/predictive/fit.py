"""Fits the lossless predictor: 8-bit weights, scales and tables, from what the decoder will have.

Lossless inputs are exact, so the loop is closed by itself: what a part is predicted from is the cache, rounded to the
8-bit inputs. One pass over the windows sums the products of every layer's inputs with its own and those of the two
layers before; every ridge regression (as in AQUA-KV, arXiv:2501.19392, with more inputs) is solved from these sums.
Then a sample of rows gives the spread of what is left, how that follows the row, and the tables. One window is in
memory at a time; the sums take `layers * 3 * C * C` float64, C the values of K and V of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore.calibration.dump import KVDump, Progress, floats, silent
from kvstore.calibration.predictive.inputs import Wiring, fit_scales, inputs_of
from kvstore.calibration.predictive.sums import ProductSums
from kvstore.calibration.predictive.tables import fit_tables
from kvstore.calibration.predictive.token_rows import token_rows
from kvstore.calibration.targets import NO_SINKS, angles
from kvstore.codecs.predictive.model import MAX_BIAS

Arrays = dict[str, np.ndarray[Any, Any]]


def fit(dump: KVDump, progress: Progress = silent, wiring: Wiring | None = None) -> Arrays:
    """The profile's section "lossless". wiring: all, but for experiments."""
    (arrays,) = fits(dump, [len(dump.fit_windows)], progress, wiring)
    return arrays


def fits(
    dump: KVDump, counts: Sequence[int], progress: Progress = silent, wiring: Wiring | None = None
) -> Iterator[Arrays]:
    """What `fit` makes of the first so many windows to fit to, for each of `counts`, in one pass; ascending."""
    wiring = wiring or Wiring()
    first: Arrays = {**angles(dump.layout), **_first_layer(dump, wiring)}
    fit_scales(dump, first)
    sums = ProductSums(dump.layout)
    for window in dump.first(counts[-1]).fit_windows:
        sums.add(inputs_of(dump, window, NO_SINKS, first))
        progress("lossless: summing windows", window + 1, counts[-1])
        if window + 1 in counts:
            arrays = dict(first)
            for number in range(1, len(dump.layout.layers)):
                for which in range(2):
                    sums.solve(number, which, arrays, wiring)
            fit_tables(dump.first(window + 1), arrays, progress, wiring)
            yield arrays


def fit_in_passes(
    dump: KVDump, sample: KVDump, most_bytes: int, progress: Progress = silent, wiring: Wiring | None = None
) -> Arrays:
    """The section "lossless", with sums of at most `most_bytes`, or of one layer.

    Looks at every window of `dump` once for each pass over some of the layers. sample: a few windows of the same
    caches, for the scales and the tables.
    """
    wiring = wiring or Wiring()
    first: Arrays = {**angles(dump.layout), **_first_layer(dump, wiring)}
    fit_scales(sample, first)
    arrays, windows = dict(first), dump.fit_windows
    runs = ProductSums.passes(dump.layout, most_bytes)
    for number, layers in enumerate(runs):
        sums = ProductSums(dump.layout, layers)
        for window in windows:
            done = number * len(windows) + window
            told = partial(progress, "lossless: summing windows", done, len(runs) * len(windows))
            sums.add(inputs_of(dump, window, NO_SINKS, first), told)
        for layer in layers:
            for which in range(2):
                told = partial(progress, "lossless: solving layers", layer, len(dump.layout.layers))
                sums.solve(layer, which, arrays, wiring, told)
        del sums  # before the next ones are made
    progress("lossless: summing windows", len(runs) * len(windows), len(runs) * len(windows))
    progress("lossless: solving layers", len(dump.layout.layers), len(dump.layout.layers))
    fit_tables(sample, arrays, progress, wiring)
    return arrays


def _first_layer(dump: KVDump, wiring: Wiring) -> Arrays:
    """The first layer by the token alone: its K and V of every token, 8 bits a value around the channel's middle."""
    arrays: Arrays = {}
    rows = token_rows(dump)
    vocabulary, width = rows.shape
    table = np.empty((vocabulary, width), np.int8)
    middle, step = np.empty(width), np.empty(width)
    for begin in range(0, width, 64):
        part = floats(rows[:, begin : begin + 64]).astype(np.float64)
        low, high = part.min(0), part.max(0)
        m, s = (low + high) / 2, np.maximum((high - low) / 254, 1e-12)
        s = np.where(high > low, s, np.maximum(np.abs(m) / (1 << 15), 1e-12))  # the same for all: what a bias can say
        table[:, begin : begin + 64] = np.rint((part - m) / s).clip(-127, 127) * wiring.tokens
        middle[begin : begin + 64], step[begin : begin + 64] = m, s
    arrays["token_kv"] = table
    shape = dump.layout.layers[0]
    split = shape.heads * shape.key_dim
    for name, columns in (("k", slice(0, split)), ("v", slice(split, None))):
        arrays[f"0.{name}.out_scale"] = (step[columns] / 256).astype(np.float32)
        arrays[f"0.{name}.bias"] = (
            np.rint(256 * middle[columns] / step[columns]).clip(-MAX_BIAS, MAX_BIAS).astype(np.int32)
        )
    return arrays
