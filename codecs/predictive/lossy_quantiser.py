"""What a row of the lossy mode costs and loses: scales, choice of symbols, and how the scale of the next row follows.

A row is a token's values of one part: K or V of one layer. Which table a number is coded with comes from decoded
numbers and integers alone, so that decoders whose floating point rounds otherwise read the same symbols.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.codecs.predictive import reference
from kvstore.codecs.predictive.lossy_model import CLASSES, ESCAPE, EXPECT, LARGEST, LEAST, MAX_SCALE, PLAIN, SHIFTS

# What a bit costs, in squares of the step. For the mean square it would be ln(2) / 6; but what is rounded to zero errs
# alike in neighbouring rows, which attention adds up: measured, half of that gives the least divergence.
LAGRANGE = 0.05
PRIOR = 1 << EXPECT  # magnitudes of one that every row is taken to have had, as expected
MAX_STEP = 1e6
FINE = 16  # offsets of rows are kept in so many parts of a quarter octave

Tensor = torch.Tensor


@dataclass(frozen=True)
class Steps:
    """Steps of K and of V, in units of what an error costs, and their quarter octaves."""

    k: float
    v: float
    quarters: tuple[int, int]

    @classmethod
    def of(cls, k: float, v: float) -> Steps:
        """ValueError unless both are finite and above 0."""
        if not (0 < k < MAX_STEP and 0 < v < MAX_STEP):
            raise ValueError(f"predictive: steps: expected two finite numbers above 0, found {k!r} and {v!r}")
        single = float(np.float32(k)), float(np.float32(v))
        q = [max(-MAX_SCALE, min(MAX_SCALE, round(4 * math.log2(x)))) for x in single]
        return cls(*single, (q[0], q[1]))

    def __getitem__(self, which: int) -> float:
        return self.v if which else self.k


@dataclass(frozen=True)
class Tables:
    """Of the classes of K, then of V."""

    rate: Tensor
    """float32 [2 * CLASSES, LARGEST + 1]: bits of a magnitude with its sign; infinite where there is no such symbol."""
    escape: Tensor
    """float32 [2 * CLASSES]: bits of an escape, all-in."""
    centroids: Tensor
    """float32 [2 * CLASSES, LARGEST + 1]."""
    expect: tuple[Tensor, Tensor]
    """int64 [2 * CLASSES + 1] each: the mean magnitude, and its slope; 0 at the end."""

    @classmethod
    def of(
        cls, freqs: npt.NDArray[np.uint16], centroids: npt.NDArray[np.float32], expect: npt.NDArray[np.int32]
    ) -> Tables:
        with np.errstate(divide="ignore"):
            bits = 12 - np.log2(freqs.astype(np.float32))
        rate = torch.from_numpy(bits[:, LARGEST:ESCAPE].copy())
        escape = torch.from_numpy(bits[:, ESCAPE] + 16)
        mean, slope = torch.from_numpy(np.pad(expect.astype(np.int64), ((0, 1), (0, 0))).T.copy())
        return cls(rate, escape, reference.tensor(centroids), (mean, slope))


def scale_at(levels: npt.NDArray[np.int16], scale: npt.NDArray[np.int16], quarters: int) -> Tensor:
    """Quarter octaves of the components' standard deviations at a step, int64 [C]: between levels by integers.

    levels: [levels], of one of K and V; scale: [levels, C].
    """
    at, rows = levels.astype(np.int64), scale.astype(np.int64)
    above = int(np.searchsorted(at, quarters))
    if above in (0, len(at)):
        return torch.from_numpy(rows[min(above, len(at) - 1)])
    gap, part = at[above] - at[above - 1], quarters - at[above - 1]
    return torch.from_numpy(rows[above - 1] + ((rows[above] - rows[above - 1]) * part * 2 + gap) // (2 * gap))


def classes_of(scale: Tensor, quarters: int, state: Tensor, shifts: Tensor) -> Tensor:
    """int64 [n, C]; negative ones are not coded. state: the offset of each row, quarter octaves / FINE, int64 [n];
    shifts: those of its step, int64 [n]."""
    row = (state + FINE // 2) // FINE + 4 * (shifts - PLAIN)
    return (scale - quarters - LEAST + row[:, None]).clamp(max=CLASSES - 1)


def shifts_of(focus: npt.NDArray[np.float32], keys: Tensor, values: Tensor, favour: Tensor | None = None) -> Tensor:
    """Of the steps of rows, int64 [n]. focus: `LossyPart.focus`; keys (before the rotation), values: float32 [n, C] of
    the part's layer. favour: float32 [n], octaves by which steps are to be smaller besides."""
    by = reference.tensor(focus).double()
    found = keys.double() @ by[: keys.shape[1]] + values.double() @ by[keys.shape[1] : -1] + by[-1]
    if favour is not None:
        found = found + favour
    return (found.round() + PLAIN).clamp(0, SHIFTS - 1).long()


def row_steps(step: float, shifts: Tensor) -> Tensor:
    """float32 [n, 1]."""
    return step * torch.exp2((PLAIN - shifts).float())[:, None]


def choose(tables: Tables, ratio: Tensor, classes: Tensor, which: int) -> tuple[Tensor, Tensor]:
    """(magnitudes, whether they are escapes): the best of error and price.

    ratio: float32 [n, C], magnitudes of what is to be coded, in steps. classes: [n, C], of K or V. Returns int64 and
    bool [n, C], 0 and False where nothing is coded.
    """
    magnitudes, escapes = torch.zeros_like(classes), torch.zeros_like(classes, dtype=torch.bool)
    # The rest, by far most of it, is zero in any case.
    some = ((ratio > 0.5) & (classes >= 0)).nonzero(as_tuple=True)
    x, index = ratio[some], classes[some] + CLASSES * which
    flat, first = x.clamp(max=LARGEST - 1).floor().long(), index * (LARGEST + 1)
    rate, centroids = tables.rate.flatten(), tables.centroids.flatten()
    whole = x.round().clamp(max=32767)
    best, cost = whole.long(), (x - whole).square() + LAGRANGE * tables.escape[index]
    escaped = torch.ones_like(best, dtype=torch.bool)
    for k in (flat + 1, flat, torch.zeros_like(flat)):
        found = (x - centroids[first + k]).square() + LAGRANGE * rate[first + k]
        better = found <= cost
        best, cost = torch.where(better, k, best), torch.where(better, found, cost)
        escaped &= ~better
    magnitudes[some], escapes[some] = best, escaped
    return magnitudes, escapes


def values_of(tables: Tables, signed: Tensor, escaped: Tensor, classes: Tensor, which: int) -> Tensor:
    """What numbers stand for, in steps: float32 [n, C]. signed: int64 [n, C], 0 where nothing is coded."""
    found = torch.zeros(signed.shape)
    some = signed.nonzero(as_tuple=True)
    x = signed[some]
    index = (classes[some] + CLASSES * which) * (LARGEST + 1) + x.abs().clamp(max=LARGEST)
    found[some] = torch.where(escaped[some], x.float(), tables.centroids.flatten()[index] * x.sign())
    return found


def surprise(tables: Tables, signed: Tensor, classes: Tensor, which: int) -> Tensor:
    """By how much a row was larger than its classes say, in quarter octaves / FINE, int64 [n]."""
    # One more class than there are, the last, for what is not coded.
    index = torch.where(classes < 0, 2 * CLASSES, classes + CLASSES * which).flatten()
    mean, slope = (x[index].view(classes.shape).sum(1) for x in tables.expect)
    found = (signed.abs().clamp(max=LARGEST).sum(1) << EXPECT) + PRIOR
    octaves = log2_sixteenths(found) - log2_sixteenths(mean + PRIOR)
    # From an octave of magnitudes to quarter octaves of scale: at low rates magnitudes grow faster. 177 / 256: ln 2.
    return (octaves * (mean + PRIOR) * 177 // ((slope + PRIOR // 16) << 8)).clamp(-32 * FINE, 32 * FINE)


def following(adapt: npt.NDArray[np.int32], state: Tensor, found: Tensor) -> Tensor:
    """The state of the next part. adapt: of that part."""
    a, b, c = (int(x) for x in adapt)
    error = (state + FINE // 2) // FINE * FINE + found - state
    return ((a * state + b * error + c + 128) >> 8).clamp(-32 * FINE, 40 * FINE)


def log2_sixteenths(v: Tensor) -> Tensor:
    """About 16 * log2(v) of integers from 1 to 2**40, int64; between powers of two by a straight line."""
    top = torch.frexp(v.double())[1].long() - 1
    return 16 * top + ((v << 4) >> top) - 16
