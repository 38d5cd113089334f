"""What fits aim at: values of a dump as numbers, keys before the rotation and in `rope.pair_order`, as codecs predict
them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.calibration.dump import Floats, KVDump, floats
from kvstore.codecs.predictive.linear_model import FINE, rotates
from kvstore.core.layout import SINKS, KVLayout
from kvstore.core.rope import fixed_point, in_pairs, paired_frequencies, rotate

Arrays = dict[str, npt.NDArray[Any]]
NO_SINKS = slice(SINKS, None)
COARSE = 1024  # entries of the coarse table of angles: 131,072 positions


def target(dump: KVDump, number: int, which: int, window: int, rows: slice = NO_SINKS) -> Floats:
    """What is predicted of some rows of a window: K of layer `number` before the rotation (which = 0), or V; float32
    `[rows, C]`."""
    x = floats(dump.layer(number, window)[which][rows])
    if which == 0 and rotates(dump.layout):
        x = unrotated(x, dump.layout, dump.layout.layers[number].key_dim, np.arange(dump.length)[rows])
    return x


def unrotated(keys: Floats, layout: KVLayout, dim: int, positions: npt.NDArray[np.int64] | None = None) -> Floats:
    """K without the rotation, in pairs. keys: float32 `[tokens, heads * dim]`, by default of positions from 0."""
    at = np.arange(len(keys)) if positions is None else positions
    return in_pairs(rotate(keys, keys.shape[1] // dim, at, layout.rope, -1), layout.rope, dim)


def angles(layout: KVLayout) -> Arrays:
    """The tables of the rotary embedding, in 1/16384; the decoder multiplies them, nobody computes a cosine again. None
    where predictors take no K for rotated."""
    if not rotates(layout):
        return {}
    radians = paired_frequencies(layout.rope, layout.layers[0].key_dim)
    tables = {}
    for name, positions in (("rope_fine", np.arange(FINE)), ("rope_coarse", FINE * np.arange(COARSE))):
        tables[name] = fixed_point(positions[:, None] * radians)
    return tables


def reach(in_scale: Floats, fix: npt.NDArray[Any] | None) -> Floats:
    """What a value, of K before the rotation, is multiplied by to become an input (`reference.inputs_of`); float32
    [C]. in_scale, fix: of its part."""
    return in_scale if fix is None else in_scale * np.exp2(fix.astype(np.float32) + 14)
