"""Fits the profile's section "donor": how a difference from a donor goes on from layer to layer, and within a layer.

The second half of a window is run once more, behind its first half with another beginning, or behind a few or many
tokens of another window (passages.py). What then differs from the dump is predicted as the levels of the exact
predictor predict values: from the layers before, and from the channels of the same layer that were decoded before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvstore.calibration.donor.differences import (
    DifferenceDump,
    Numbers,
    alike,
    differing,
    fit_differences,
    sizes_of,
    write_window,
)
from kvstore.calibration.donor.passages import PassagePair, passages
from kvstore.calibration.dump import KVDump, Progress, floats, silent
from kvstore.tiers.disk.fs import FileSystem

Arrays = dict[str, Any]
WINDOWS = 24  # more of them than this improve little
_MOST_BYTES = 1 << 30  # of sums


def fit(model: Any, dump: KVDump, scratch: Path, progress: Progress = silent) -> Arrays:
    """The arrays of the section (see `model_of_section`). scratch: a folder for files, which is not removed."""
    windows = dump.some(WINDOWS)
    folder = scratch / "differences"
    FileSystem().mkdir(str(folder))
    sizes, count = None, 0
    for number, pair in enumerate(passages(model, dump, windows)):
        progress("donor: running the model", number, len(windows))
        found = differences(pair, dump)
        sizes = sizes_of(found) if sizes is None else sizes
        write_window(folder, number, alike(dump.layout, found, sizes))
        count = len(found[0][0])
    progress("donor: running the model", len(windows), len(windows))
    made = DifferenceDump(folder, dump.layout, len(windows), count)
    return fit_differences(made, made, _MOST_BYTES, progress)


def differences(pair: PassagePair, dump: KVDump) -> Numbers:
    """What a passage differs in from the dump's."""
    rows = slice(pair.start, dump.length)
    stored = [dump.layer(number, pair.window) for number in range(len(pair.layers))]
    donor = [(floats(k[rows]), floats(v[rows])) for k, v in stored]
    own = [(_rows(k), _rows(v)) for k, v in pair.layers]
    return differing(dump.layout, own, donor, pair.position, pair.start)


def _rows(x: Any) -> Any:
    """`[heads, tokens, dim]` to float32 `[tokens, heads * dim]`."""
    return np.ascontiguousarray(x.transpose(0, 1).flatten(1).float().numpy())
