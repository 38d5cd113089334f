"""Fits scales and tables of the lossy mode of the predictive codec, which have the encoder's choices in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump
from kvstore.codecs.predictive import lossy_quantiser as lossy
from kvstore.codecs.predictive.lossy_model import (
    CLASSES,
    ESCAPE,
    EXPECT,
    LARGEST,
    LEAST,
    MAX_SCALE,
    PLAIN,
    SHIFTS,
    SYMBOLS,
    LossyModel,
)
from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.lossy_rows import Engine, Walk, from_bits
from kvstore.codecs.predictive.model import MAX_ADAPT, PredictiveModel
from kvstore.codecs.rans.coder import quantise
from kvstore.core.layout import SINKS

Arrays = dict[str, np.ndarray[Any, Any]]
Tensor = torch.Tensor
TABLE_WINDOWS = 4  # that scales and tables are measured on
PARAMETRIC = 30.0  # observations that a class without any is taken to have had of a Laplace distribution


def fit_tables(dump: KVDump, base: PredictiveModel, arrays: Arrays) -> None:
    """Scales, adaptation and tables, from all levels in step."""
    engine = Engine(LossyModel.from_arrays(base, arrays))
    windows = dump.some(TABLE_WINDOWS)
    tokens = torch.from_numpy(np.concatenate([dump.tokens(w) for w in windows]))
    positions = torch.arange(dump.length).repeat(len(windows))
    exact = positions < SINKS
    levels = [(int(a), int(b)) for a, b in arrays["levels"]]
    steps = [Steps(2 ** (k / 4), 2 ** (v / 4), (k, v)) for k, v in levels]
    walks = [Walk(engine, s, tokens, positions, exact) for s in steps]
    errors = [torch.zeros(len(tokens), dtype=torch.long) for _ in walks]
    counts = np.zeros((2 * CLASSES, LARGEST + 2))
    sums = np.zeros((2 * CLASSES, LARGEST + 2))
    before, by_row = torch.full((len(tokens),), PLAIN), np.ones((SHIFTS, SHIFTS), np.int64)
    for number in range(len(base.parts)):
        pair = [
            torch.from_numpy(np.concatenate([dump.coded(number, w)[which] for w in windows]).astype(np.int64))
            for which in range(2)
        ]
        straight = [walks[0].rotated(which, from_bits(bits), -1) for which, bits in enumerate(pair)]
        for which, (bits, given) in enumerate(zip(pair, straight, strict=True)):
            prefix = f"{number}.{'kv'[which]}."
            shifts = torch.where(exact, PLAIN, lossy.shifts_of(engine.model.parts[number][which].focus, *straight))
            index = (before * SHIFTS + shifts)[~exact]
            by_row += torch.bincount(index, minlength=by_row.size).numpy().reshape(by_row.shape)
            before = shifts
            mus = [walk.predict(number, which) for walk in walks]
            ys = [(given - mu) @ engine.parts[number][which].analysis for mu in mus]
            _scales(arrays, prefix, ys, walks, errors, exact, which, number == 0)
            for i, (walk, y, mu) in enumerate(zip(walks, ys, mus, strict=True)):
                scale = torch.from_numpy(arrays[prefix + "scale"][i].astype(np.int64))
                classes = lossy.classes_of(scale, walk.steps.quarters[which], walk.state, shifts)
                classes = torch.where(exact[:, None], -1, classes)
                step = lossy.row_steps(walk.steps[which], shifts)
                ratio = y.abs() / step
                magnitudes, escaped = lossy.choose(engine.tables, ratio, classes, which)
                signed = torch.where(y < 0, -magnitudes, magnitudes)
                found = lossy.values_of(engine.tables, signed, escaped, classes, which)
                _count(counts, sums, magnitudes, ratio, classes, which)
                decoded = walk.decoded(number, which, mu, found * step)
                walk.take(number, which, torch.where(exact[:, None], bits, decoded))
                errors[i] = lossy.surprise(engine.tables, signed, classes, which)
    arrays.update(tables(counts, sums))
    arrays["row_freqs"] = quantise(by_row, 12, floor=True)


def _scales(
    arrays: Arrays,
    prefix: str,
    ys: Sequence[Tensor],
    walks: Sequence[Walk],
    errors: Sequence[Tensor],
    exact: Tensor,
    which: int,
    first: bool,
) -> None:
    """Scale and adaptation of a part; sets the walks' states for it."""
    coded = ~exact
    deviations = [(y[coded].abs().mean(0) * 1.2533).clamp(min=1e-30) for y in ys]  # of a normal distribution
    arrays[prefix + "scale"] = np.stack([quarters(d.numpy()) for d in deviations])
    if first and which == 0:
        return
    x, t = [], []
    for y, walk, error, deviation in zip(ys, walks, errors, deviations, strict=True):
        # Components that are coded now and then, or the largest, say how large the row is.
        large = deviation > walk.steps[which] / 8
        if not large.any():
            large = deviation >= deviation.max()
        energy = (y[coded][:, large] / deviation[large]).square().mean(1)
        t.append(32 * lossy.FINE / 4 * torch.log2(energy.clamp(min=1e-3)) / 4)
        base = (walk.state + lossy.FINE // 2) // lossy.FINE * lossy.FINE
        x.append(torch.stack([walk.state, base + error - walk.state, torch.ones_like(error)], 1)[coded].double())
    inputs, wanted = torch.cat(x), torch.cat(t).double()
    gram = inputs.T @ inputs + torch.diag(torch.tensor([1e4, 1e4, 1e-6], dtype=torch.double))
    found = torch.linalg.solve(gram, inputs.T @ wanted) * 256
    adapt = found.round().clamp(-MAX_ADAPT, MAX_ADAPT).to(torch.int32).numpy()
    arrays[prefix + "adapt"] = adapt
    for walk, error in zip(walks, errors, strict=True):
        walk.state = lossy.following(adapt, walk.state, error)


def _count(
    counts: np.ndarray[Any, Any],
    sums: np.ndarray[Any, Any],
    magnitudes: Tensor,
    ratio: Tensor,
    classes: Tensor,
    which: int,
) -> None:
    coded = classes >= 0
    index = (classes[coded] + CLASSES * which) * (LARGEST + 2) + magnitudes[coded].clamp(max=LARGEST + 1)
    counts += torch.bincount(index, minlength=counts.size).double().numpy().reshape(counts.shape)
    found = torch.bincount(index, weights=ratio[coded].double(), minlength=counts.size)
    sums += found.numpy().reshape(counts.shape)


def laplace() -> Arrays:
    """Tables before anything was seen."""
    empty = np.zeros((2 * CLASSES, LARGEST + 2))
    return {**tables(empty, empty), "row_freqs": quantise(np.ones((SHIFTS, SHIFTS), np.int64), 12)}


def tables(counts: np.ndarray[Any, Any], sums: np.ndarray[Any, Any]) -> Arrays:
    """Frequencies, centroids and expectations. counts, sums of ratios: float64 [2 * CLASSES, LARGEST + 2]."""
    sigma = 2.0 ** ((np.arange(CLASSES) + LEAST) / 4)
    k = np.arange(LARGEST + 2)
    edges = np.maximum(k - 0.4, 0)
    beyond = np.exp(-edges * math.sqrt(2) / np.concatenate([sigma, sigma])[:, None])
    prior = beyond - np.concatenate([beyond[:, 1:], np.zeros((2 * CLASSES, 1))], 1)
    smooth = counts + PARAMETRIC * prior
    middle = np.where(k > 0, k + 0.05, 0.0)
    centroids = (sums + PARAMETRIC * prior * middle) / np.maximum(smooth, 1e-12)
    # Not below the number itself, though the mean is: values drawn to zero err all alike, which attention adds up.
    centroids = np.where(smooth > 1e-6, np.clip(centroids, k, k + 0.5), middle)
    centroids[:, 0] = 0
    freqs = np.stack([frequencies(row / row.sum()) for row in smooth])
    mean = (smooth * k).sum(1) / smooth.sum(1)
    expect = np.empty((2 * CLASSES, 2), np.int64)
    for part in (slice(0, CLASSES), slice(CLASSES, None)):
        # A line through five classes, in logarithms.
        log = np.log(np.maximum(mean[part], 2.0**-EXPECT))
        padded = np.pad(log, 2, mode="reflect", reflect_type="odd")
        slope = (2 * (padded[4:] - padded[:-4]) + padded[3:-1] - padded[1:-3]) / 10
        expect[part, 0] = np.rint(np.exp(log) * 2**EXPECT)
        expect[part, 1] = np.rint(np.exp(log) * np.clip(slope, 0.05, 1.0) * 2**EXPECT)
    return {
        "freqs": freqs,
        "centroids": centroids[:, : LARGEST + 1].astype(np.float32),
        "expect": np.clip(expect, 1, 1 << 20).astype(np.int32),
    }


def frequencies(shares: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """uint16 [SYMBOLS] of 4096, for shares of magnitudes 0..LARGEST and of what is larger."""
    half = 2048 * shares[1:-1]
    kept = half >= 0.25
    each = np.where(kept, np.maximum(np.rint(half), 1), 0).astype(np.int64)
    escape = max(1, round(4096 * shares[-1] + 2 * half[~kept].sum()))
    zero = max(1, round(4096 * shares[0]))
    # What is missing or too much goes where it costs least, two at a time; the last of it to zero.
    while abs(missing := 4096 - escape - zero - 2 * int(each.sum())) > 1:
        may = each > (missing < 0)
        if not may.any():
            break
        change = 1 if missing > 0 else -1
        need = half / np.maximum(each + 0.5 * change, 0.5)
        each[np.where(may, need * change, -np.inf).argmax()] += change
    freqs = np.zeros(SYMBOLS, np.uint16)
    freqs[LARGEST + 1 : ESCAPE] = each
    freqs[:LARGEST] = each[::-1]
    freqs[ESCAPE] = escape
    freqs[LARGEST] = 4096 - escape - 2 * int(each.sum())
    return freqs


def quarters(sigma: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found = np.rint(4 * np.log2(np.maximum(sigma, 1e-30))).clip(-MAX_SCALE, MAX_SCALE)
    return np.asarray(found, np.int16)
