"""Spread, adaptation and tables of a level, from a sample of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.calibration.dump import KVDump, Progress
from kvstore.calibration.predictive.strips import coded_in_strips, in_strips
from kvstore.calibration.predictive.tables import SAMPLE, adaptation, smoothed, spread
from kvstore.codecs.predictive import reference as base
from kvstore.codecs.predictive.levels import reference
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.predictive.model import CLASSES, SYMBOLS, CodingTables
from kvstore.codecs.rans.coder import quantise

Arrays = dict[str, npt.NDArray[Any]]
Tensor = torch.Tensor


def fit_tables(dump: KVDump, lossless: Arrays, arrays: Arrays, level: int, progress: Progress) -> None:
    """`scale` and `adapt` of every part, and `freqs`, from every `stride`th row of the windows."""
    stride = max(1, len(dump.fit_windows) * dump.length // SAMPLE)
    windows = [(window, slice(-window % stride, None, stride)) for window in dump.fit_windows]
    for number, shape in enumerate(dump.layout.layers):
        for name, width in (("k", shape.heads * shape.key_dim), ("v", shape.heads * shape.value_dim)):
            arrays[f"{level}.{number}.{name}.scale"] = np.zeros(width, np.int16)
            arrays[f"{level}.{number}.{name}.adapt"] = np.zeros(3, np.int32)
    arrays[f"{level}.freqs"] = quantise(np.ones((2 * CLASSES, SYMBOLS), np.int64), 12)
    walk = _sampled(dump, LevelModel.from_arrays(dump.layout, level, lossless, arrays), windows)
    counts = np.zeros((2 * CLASSES, SYMBOLS), np.int64)
    fits: list[Tensor] = []
    layers = len(dump.layout.layers)
    for number in range(layers):
        for which in range(2):
            pause = partial(progress, f"levels: tables of level {level}", number, layers)
            pause()
            cached = np.concatenate([dump.coded(number, w)[which][rows] for w, rows in windows])
            coded = _part(walk, number, which, torch.from_numpy(cached.astype(np.int64)), arrays, fits, pause)
            fits.append(coded.fits)
            pause()
            index = coded.classes * SYMBOLS + coded.symbols
            counts += torch.bincount(index.flatten(), minlength=counts.size).numpy().reshape(counts.shape)
    progress(f"levels: tables of level {level}", layers, layers)
    arrays[f"{level}.freqs"] = quantise(smoothed(counts), 12, floor=True)


def _sampled(dump: KVDump, model: LevelModel, windows: list[tuple[int, slice]]) -> reference.Walk:
    """A walk over rows that are not neighbours."""
    tokens = torch.from_numpy(np.concatenate([dump.tokens(window)[rows] for window, rows in windows]))
    walk = reference.Walk(model, tokens, 0)
    if model.rope_fine is not None and model.rope_coarse is not None:
        positions = torch.cat([torch.arange(dump.length)[rows] for _, rows in windows])
        walk.rotation = base.angles(model.rope_fine, model.rope_coarse, positions)
    return walk


def _part(
    walk: reference.Walk,
    number: int,
    which: int,
    cached: Tensor,
    arrays: Arrays,
    fits: list[Tensor],
    pause: Callable[[], None],
) -> base.Coded:
    """What is coded of the next part, of which this makes `scale` and `adapt`; fits: of the parts before. `pause` is
    called before every step of some milliseconds."""
    part, own = walk.model.parts[number][which], f"{walk.model.level}.{number}.{'kv'[which]}."
    bits = reference.in_order(cached, part, walk.rotation)
    values = reference.fixed(part, bits, walk.rotation)

    def of_group(columns: slice, _: Tensor) -> Tensor:
        pause()
        return values[:, columns]

    total = in_strips(partial(walk.sums, number, which), bits, pause)
    mu = reference.walk_groups(part, total, walk.rotation, of_group)
    pause()
    walk.take(number, which, values)
    scale = spread(bits, mu, pause)
    still = CodingTables(scale, np.zeros(3, np.int32))
    alone = coded_in_strips(
        partial(base.residuals, still, which), bits, mu, torch.zeros(len(bits), dtype=torch.long), pause
    )
    tables = CodingTables(scale, adaptation(alone.fits, fits))
    arrays[own + "scale"] = reference.as_cached(torch.from_numpy(scale)[None], part, walk.rotation)[0].numpy()
    arrays[own + "adapt"] = tables.adapt
    offset = base.offsets(tables, fits, len(bits))
    return coded_in_strips(partial(base.residuals, tables, which), bits, mu, offset, pause)
