"""What rows differ in from rows of the same tokens elsewhere, as a dump that the levels of the exact predictor can be
fitted to.

Rows that hardly differ and rows that differ much are to count alike, and are coded alike (codecs/donor/groups): each is
made larger or smaller by a power of two. Every other row has the other sign, for which of two rows is the donor is
chance; so the mean is 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.calibration.dump import Bits, Floats, KVDump, Progress, nearest_bits, silent
from kvstore.calibration.predictive import levels
from kvstore.calibration.targets import angles
from kvstore.codecs.donor.groups.model import without_tokens
from kvstore.codecs.donor.tables import frequencies
from kvstore.codecs.predictive.linear_model import rotates
from kvstore.core.layout import KVLayout
from kvstore.core.rope import rotate
from kvstore.tiers.disk.fs import FileSystem, write_file

Arrays = dict[str, npt.NDArray[Any]]
Numbers = list[tuple[Floats, Floats]]
"""Of each layer what rows of K, as cached but without the rotation, and of V differ in: float32 `[rows, C]`."""
LEVEL = 3
"""Of the exact predictor: that of differences. With 2 members are decoded a quarter faster, and 1 % larger."""
_LEAST = 1e-9
_QUIET = 32
"""Quarter octaves below the loudest column of a part: none is taken to be quieter. Keys that no rotation moves do not
differ in the first layer, but for what rounding does to a few; measured by a scale of nothing, those few would say that
all columns of their group are loud."""


class DifferenceDump(KVDump):
    """Windows of differences, as `alike` makes them; all of them are to fit to."""

    @property
    def held_out(self) -> range:
        """None: what was fitted to differences is measured on blocks."""
        return range(0)


def sizes_of(numbers: Numbers) -> Floats:
    """How large the differences of V are in the mean, `[layers]`: what rows are measured by."""
    return np.array([max(float(np.abs(v).mean()), _LEAST) for _, v in numbers], np.float32)


def alike(layout: KVLayout, numbers: Numbers, sizes: Floats) -> list[tuple[Bits, Bits]]:
    """Return rows made alike large, as the words of a window: bf16, keys rotated to positions from 0 on."""
    pairs = list(zip(numbers, sizes, strict=True))
    # V of the first layer has no context to differ by.
    share = np.mean([np.abs(v).mean(1) / size for (_, v), size in pairs[1:] or pairs], 0)
    factor = np.exp2(-np.floor(np.log2(np.maximum(share, _LEAST))))
    factor = (factor * np.where(np.arange(len(factor)) % 2, -1, 1)).astype(np.float32)[:, None]
    places = np.arange(len(factor))
    found = []
    for shape, (k, v) in zip(layout.layers, numbers, strict=True):
        keys = k * factor
        if rotates(layout):
            keys = rotate(keys, shape.heads, places, layout.rope, 1)
        found.append((nearest_bits(keys), nearest_bits(v * factor)))
    return found


def differing(
    layout: KVLayout,
    own: Sequence[tuple[Floats, Floats]],
    donor: Sequence[tuple[Floats, Floats]],
    position: int,
    donor_position: int,
) -> Numbers:
    """Return what rows of consecutive positions differ in. own, donor: of each layer K and V as cached, `[rows, C]`."""
    found = []
    for shape, (k, v), (other_k, other_v) in zip(layout.layers, own, donor, strict=True):
        if rotates(layout):
            places = np.arange(len(k))
            k = rotate(k, shape.heads, position + places, layout.rope, -1)
            other_k = rotate(other_k, shape.heads, donor_position + places, layout.rope, -1)
        found.append((k - other_k, v - other_v))
    return found


def fit_differences(dump: KVDump, sample: KVDump, most_bytes: int, progress: Progress = silent) -> Arrays:
    """Make the profile's section "donor".

    Args:
        dump: of differences; every window is looked at once for each pass over some of the layers.
        sample: a few windows of the same, for scales.
        most_bytes: that the sums of one pass may take, if they take more than those of one layer.
        progress: told what is being done.
    """
    turned = angles(dump.layout)
    arrays = levels.fit_in_passes(dump, sample, _no_tokens(dump.layout, turned), LEVEL, most_bytes, progress)
    for name, scale in arrays.items():
        if name.endswith(".scale"):
            arrays[name] = np.maximum(scale, scale.max() - _QUIET).astype(scale.dtype)
    # What symbols are likely follows from the sizes of values, not of differences: the codec's own tables know.
    return {**arrays, **turned, f"{LEVEL}.freqs": frequencies()}


def _no_tokens(layout: KVLayout, turned: Arrays) -> Arrays:
    """As of a section "lossless" whose first layer predicts nothing."""
    shape = layout.layers[0]
    found: Arrays = dict(without_tokens(layout, turned))
    for name, width in (("k", shape.heads * shape.key_dim), ("v", shape.heads * shape.value_dim)):
        found[f"0.{name}.out_scale"] = np.ones(width, np.float32)
        found[f"0.{name}.bias"] = np.zeros(width, np.int32)
    return found


def write_window(folder: Path, window: int, layers: Sequence[tuple[Bits, Bits]]) -> None:
    """Write a window of a `DifferenceDump` in `folder`."""
    tokens = np.zeros(len(layers[0][0]), "<i8")
    parts = [tokens.tobytes(), *(part.astype("<u2").tobytes() for pair in layers for part in pair)]
    write_file(FileSystem(), os.path.join(folder, f"{window:05d}.kv"), b"".join(parts))
