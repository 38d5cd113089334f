"""Spread, adaptation and tables of the exact mode, from a sample of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump, Progress
from kvstore.calibration.predictive.inputs import Wiring, inputs_of
from kvstore.calibration.predictive.strips import coded_in_strips, in_strips
from kvstore.codecs.predictive import float8_reference, reference
from kvstore.codecs.predictive.model import CLASSES, MAX_ADAPT, MAX_SCALE, SYMBOLS, Part
from kvstore.codecs.rans.coder import quantise
from kvstore.codecs.words import FLOAT8

Arrays = dict[str, np.ndarray[Any, Any]]
Tensor = torch.Tensor
SAMPLE = 2_048  # rows of each part, about, that the spread and the tables are taken from


def fit_tables(dump: KVDump, arrays: Arrays, progress: Progress, wiring: Wiring) -> None:
    """`scale` and `adapt` of every part, and `freqs`, from every `stride`th row of the windows."""
    stride = max(1, len(dump.fit_windows) * dump.length // SAMPLE)
    windows = [(window, slice(-window % stride, None, stride)) for window in dump.fit_windows]
    layers = len(dump.layout.layers)
    inputs = [
        [torch.cat(x) for x in zip(*pairs, strict=True)]
        for pairs in zip(*(inputs_of(dump, *w, arrays) for w in windows), strict=True)
    ]
    tokens = torch.from_numpy(np.concatenate([dump.tokens(window)[rows] for window, rows in windows]))
    positions = torch.cat([torch.arange(dump.length)[rows] for _, rows in windows])
    turn = None
    if "rope_fine" in arrays:
        turn = reference.angles(arrays["rope_fine"], arrays["rope_coarse"], positions)
    counts = np.zeros((2 * CLASSES, SYMBOLS), np.int64)
    fits: list[Tensor] = []
    for number in range(layers):
        for which in range(2):
            pause = partial(progress, "lossless: tables", number, layers)
            pause()
            prefix = f"{number}.{'kv'[which]}."
            bits = torch.from_numpy(np.concatenate([dump.coded(number, w)[which][rows] for w, rows in windows])).long()
            part = _part(prefix, arrays)
            if number:
                before = [x for i in (number - 1, number - 2)[: min(number, 2)] for x in inputs[i]]
                total = _sums(part, torch.cat(before + inputs[number][:which], 1))
            else:
                split = inputs[0][0].shape[1]
                table = arrays["token_kv"][:, split:] if which else arrays["token_kv"][:, :split]
                total = reference.first_sums(part, table, tokens)
            mu = in_strips(partial(_predicted, part, total, turn), bits, pause)
            arrays[prefix + "scale"] = spread(bits, mu, pause)
            part = _part(prefix, arrays)
            still = coded_in_strips(
                partial(_residuals, dump.dtype, part, which), bits, mu, torch.zeros(len(bits), dtype=torch.long), pause
            )
            adapt = adaptation(still.fits, fits)
            arrays[prefix + "adapt"] = adapt if wiring.adapt else np.zeros_like(adapt)
            part = _part(prefix, arrays)
            offset = reference.offsets(part, fits, len(bits))
            coded = coded_in_strips(partial(_residuals, dump.dtype, part, which), bits, mu, offset, pause)
            fits.append(coded.fits)
            pause()
            index = coded.classes * SYMBOLS + coded.symbols
            counts += torch.bincount(index.flatten(), minlength=counts.size).numpy().reshape(counts.shape)
    progress("lossless: tables", layers, layers)
    arrays["freqs"] = quantise(smoothed(counts), 12, floor=True)


def _predicted(part: Part, total: Tensor, turn: reference.Angles | None, rows: slice) -> Tensor:
    return reference.predict(part, total[rows], None if turn is None else (turn[0][rows], turn[1][rows]))


def _residuals(dtype: str, part: Part, which: int, bits: Tensor, mu: Tensor, offset: Tensor) -> reference.Coded:
    """As caches of this dtype are coded. bits: their words."""
    if dtype in FLOAT8:
        return float8_reference.residuals(float8_reference.Axis(dtype), part, which, bits, mu, offset)
    return reference.residuals(part, which, bits, mu, offset)


def _part(prefix: str, arrays: Arrays) -> Part:
    """A part as far as it is there; without `scale` and `adapt`, as if they were 0."""
    nothing = np.zeros(len(arrays[prefix + "bias"]), np.int16)
    return Part(
        in_scale=arrays[prefix + "in_scale"],
        out_scale=arrays[prefix + "out_scale"],
        scale=arrays.get(prefix + "scale", nothing),
        bias=arrays[prefix + "bias"],
        adapt=arrays.get(prefix + "adapt", nothing[:3]),
        fix=arrays.get(prefix + "fix"),
        weight=arrays.get(prefix + "weight"),
    )


def _sums(part: Part, inputs: Tensor) -> Tensor:
    """As `reference.sums`; in float32, which is exact for less than 1,040 inputs, and good enough for a fit."""
    product = inputs @ torch.from_numpy(part.weight).float()
    return torch.from_numpy(part.bias).long() + product.long()


def spread(bits: Tensor, mu: Tensor, pause: Callable[[], None]) -> np.ndarray[Any, Any]:
    """`scale`: quarter octaves of the residuals' standard deviation. `pause` is called before every step."""

    def sizes(rows: slice) -> Tensor:
        # The prediction was cut to 16 bits: half of its last place is put back.
        residual = _numbers(bits[rows]) - _numbers(mu[rows], 0x8000)
        return residual.abs().double().sum(0, keepdim=True)

    size = in_strips(sizes, bits, pause).sum(0) / len(bits) * 1.2533  # of a normal distribution
    log = torch.log2(size.clamp(min=1e-30)) * 4
    return log.round().clamp(-MAX_SCALE, MAX_SCALE).to(torch.int16).numpy()


def adaptation(fits: Tensor, before: list[Tensor]) -> np.ndarray[Any, Any]:
    """A, B and O of the least squares of `fits` on the fits of the two parts before."""
    zeros = torch.zeros_like(fits)
    one, two = ([zeros, zeros, *before])[-1], ([zeros, zeros, *before])[-2]
    x = torch.stack([one, two, torch.ones_like(fits)], 1).double()
    gram = x.T @ x + torch.diag(torch.tensor([1.0, 1.0, 1e-6], dtype=torch.double))
    found = torch.linalg.solve(gram, x.T @ fits.double()) * 256
    adapt: np.ndarray[Any, Any] = found.round().clamp(-MAX_ADAPT, MAX_ADAPT).to(torch.int32).numpy()
    return adapt


def smoothed(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Counts of symbols by class; classes that were hardly seen borrow from all classes of their part with more."""
    out = counts.copy()
    for first in (0, CLASSES):
        part = counts[first : first + CLASSES]
        for i in range(CLASSES):
            if part[i].sum() < 20 * SYMBOLS:
                out[first + i] += part.sum(0) * 20 * SYMBOLS // max(1, part.sum())
    return out


def _numbers(bits: Tensor, below: int = 0) -> Tensor:
    finite = ((bits >> 7) & 0xFF) != 0xFF
    return torch.where(finite, (bits << 16) + below, 0).to(torch.int32).view(torch.float32)
