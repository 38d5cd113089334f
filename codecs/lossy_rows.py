"""Rows of keys and values, predicted and quantised with loss: the arithmetic of the lossy mode, without its bytes.

A row is a token's values of one part: K or V of one layer. Rows do not depend on each other, so those of many blocks go
through at once. Which table a number is coded with comes from decoded numbers and integers alone (`Walk.state`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.codecs import predictive_reference as reference
from kvstore.codecs.lossy_model import (
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
    LossyPart,
    input_groups,
)
from kvstore.codecs.predictive_model import Part
from kvstore.codecs.rans import RansTables

# What a bit costs, in squares of the step. For the mean square it would be ln(2) / 6; but what is rounded to zero errs
# alike in neighbouring rows, which attention adds up: measured, half of that gives the least divergence.
LAGRANGE = 0.05
PRIOR = 1 << EXPECT  # magnitudes of one that every row is taken to have had, as expected
MAX_STEP = 1e6
FINE = 16  # offsets of rows are kept in so many parts of a quarter octave

Tensor = torch.Tensor
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


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
            raise ValueError(f"steps: expected two numbers above 0, found {k!r} and {v!r}")
        single = float(np.float32(k)), float(np.float32(v))
        q = [max(-MAX_SCALE, min(MAX_SCALE, round(4 * math.log2(x)))) for x in single]
        return cls(*single, (q[0], q[1]))

    def __getitem__(self, which: int) -> float:
        return self.v if which else self.k


# -- one part ----------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Prepared:
    """A part's arrays as the arithmetic here wants them, float32."""

    weight: Tensor | None
    analysis: Tensor
    """[C (value), C (component)]."""
    synthesis: Tensor
    """[C (component), C (value)]."""

    @classmethod
    def of(cls, part: LossyPart) -> Prepared:
        weight = None if part.weight is None else reference.tensor(part.weight).float()
        synthesis = synthesis_of(part.component, part.basis, part.unit)
        try:
            analysis = np.linalg.inv(synthesis)
        except np.linalg.LinAlgError:
            analysis = np.linalg.pinv(synthesis)
        return cls(weight, torch.from_numpy(analysis).float(), torch.from_numpy(synthesis).float())


def synthesis_of(component: Floats, basis: npt.NDArray[np.int8], unit: Floats) -> npt.NDArray[np.float64]:
    """From components, in units of cost, to values: float64 [C (component), C (value)]; arrays of a `LossyPart`."""
    found: npt.NDArray[np.float64] = component[:, None].astype(np.float64) * basis * unit
    return found


def first_prediction(lossless: Part, rows: Tensor) -> Tensor:
    """Of layer 0, of K before the rotation, float32 [n, C]. rows: the part's columns of the table of tokens."""
    mu = (reference.tensor(lossless.bias) + 256 * rows) * reference.tensor(lossless.out_scale)
    return mu if lossless.fix is None else mu * torch.exp2(-reference.tensor(lossless.fix).float())


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
    by = reference.tensor(focus)
    found = keys @ by[: keys.shape[1]] + values @ by[keys.shape[1] : -1] + by[-1]
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


# -- rows, part after part ---------------------------------------------------------------------------------------------


class Walk:
    """Goes over the parts of rows (tokens) in their order: `predict` the next, then `take` what was decoded of it.

    tokens, positions: int64 [n]; exact: bool [n], rows that are not coded; rows may be of different blocks.
    """

    def __init__(self, engine: Engine, steps: Steps, tokens: Tensor, positions: Tensor, exact: Tensor) -> None:
        self._engine, self._model, self.steps, self._exact = engine, engine.model, steps, exact
        base = self._model.base
        self._angles = None
        if base.rope_fine is not None and base.rope_coarse is not None:
            self._angles = reference.angles(base.rope_fine, base.rope_coarse, positions)
        self._tokens = tokens
        known = tokens < len(base.token_kv)
        rows = torch.from_numpy(base.token_kv[torch.where(known, tokens, 0).numpy()])
        self._inputs: dict[tuple[int, int], Tensor] = {(-1, 0): rows.float() * known[:, None]}
        self.state = torch.zeros(len(tokens), dtype=torch.long)

    def predict(self, number: int, which: int) -> Tensor:
        """float32 [n, C], of K before the rotation."""
        base, part = self._model.base, self._model.parts[number][which]
        if number == 0:
            split = base.parts[0][0].width
            rows = self._inputs[-1, 0][:, split:] if which else self._inputs[-1, 0][:, :split]
            return first_prediction(base.parts[0][which], rows)
        weight = self._engine.parts[number][which].weight
        assert weight is not None
        assert part.bias is not None
        assert part.out_scale is not None
        # Sums of products of 8 bits, which float32 holds exactly up to 2**24; beyond, the last place may differ.
        total = self.inputs(number, which, part.uses) @ weight
        return (total + reference.tensor(part.bias)) * reference.tensor(part.out_scale)

    def inputs(self, number: int, which: int, uses: int) -> Tensor:
        """float32 [n, inputs], integers from -127 to 127."""
        groups = input_groups(self._model.base, number, which)
        return torch.cat([self._inputs[at] for kind, at in groups.items() if uses >> kind & 1], 1)

    def classes(self, number: int, which: int, shifts: Tensor) -> Tensor:
        """int64 [n, C]; rows that are exact are not coded. shifts: of the rows' steps, int64 [n]."""
        part, quarters = self._model.parts[number][which], self.steps.quarters[which]
        found = classes_of(scale_at(self._model.levels[:, which], part.scale, quarters), quarters, self.state, shifts)
        return torch.where(self._exact[:, None], -1, found)

    def rotated(self, which: int, x: Tensor, sign: int = 1) -> Tensor:
        """K (which = 0) after the rotation; with sign = -1 before it. float32 [n, C]."""
        if which or self._angles is None:
            return x
        cos, sin = (t.float() / 16384 for t in self._angles)
        a, b = x.view(len(x), -1, 2, cos.shape[2]).unbind(2)
        return torch.cat([a * cos - sign * b * sin, b * cos + sign * a * sin], 2).view_as(x)

    def decoded(self, number: int, which: int, mu: Tensor, found: Tensor) -> Tensor:
        """bf16 bits, int64 [n, C]. found: components of the residual, in units of cost."""
        return to_bits(self.rotated(which, mu + found @ self._engine.parts[number][which].synthesis))

    def take(self, number: int, which: int, bits: Tensor) -> None:
        """bits: what a decoder has of this part."""
        if number == 0:
            return  # the token says it
        self._inputs = {at: x for at, x in self._inputs.items() if at[0] < 0 or at[0] >= number - 2}
        lossless = self._model.base.parts[number][which]
        self._inputs[number, which] = reference.inputs_of(lossless, bits, self._angles).float()

    def follow(self, number: int, which: int, signed: Tensor, classes: Tensor) -> None:
        """Sets the scale of the part after this one."""
        after = (number, 1) if which == 0 else (number + 1, 0)
        if after[0] < len(self._model.parts):
            found = surprise(self._engine.tables, signed, classes, which)
            self.state = following(self._model.parts[after[0]][after[1]].adapt, self.state, found)


class Engine:
    """A model ready for coding: matrices in float32. Immutable, thread-safe."""

    def __init__(self, model: LossyModel) -> None:
        self.model = model
        self.parts = [(Prepared.of(k), Prepared.of(v)) for k, v in model.parts]
        self.tables = Tables.of(model.freqs, model.centroids, model.expect)
        rows = np.pad(model.row_freqs, ((0, 0), (0, SYMBOLS - SHIFTS)))
        self.coder = RansTables(np.concatenate([model.freqs, rows]), 12)


@dataclass(frozen=True)
class Rows:
    """What coding of rows found. Lists: a part after the other."""

    symbols: list[Bytes]
    """[n, C], with anything where nothing is coded."""
    classes: list[npt.NDArray[np.int64]]
    """[n, C]: negative where nothing is coded; those of V are not yet CLASSES higher."""
    escapes: list[npt.NDArray[np.int16]]
    """[n, C]: the numbers themselves."""
    shifts: list[npt.NDArray[np.int64]]
    """[n]: of the steps of rows."""
    decoded: list[Tensor]
    """bf16 bits, int64 [n, C]."""
    errors: Tensor
    """float32 [n, 2]: squares of errors of K and V in units of cost, means over parts and components."""
    largest: Tensor
    """float32 [n]: the largest error of a value."""


def quantise(
    engine: Engine,
    steps: Steps,
    tokens: Tensor,
    positions: Tensor,
    exact: Tensor,
    layers: Sequence[Sequence[Tensor]],
    favour: Tensor | None = None,
) -> Rows:
    """Predicts and quantises rows. layers: bf16 bits (finite) of K and V of each layer, int64 [n, C]. favour: float32
    [n], octaves by which the steps of rows are to be smaller than the model says."""
    walk = Walk(engine, steps, tokens, positions, exact)
    rows = Rows([], [], [], [], [], torch.zeros(len(tokens), 2), torch.zeros(len(tokens)))
    for number, pair in enumerate(layers):
        straight = [walk.rotated(which, from_bits(bits), -1) for which, bits in enumerate(pair)]
        for which, bits in enumerate(pair):
            shifts = torch.where(
                exact, PLAIN, shifts_of(engine.model.parts[number][which].focus, straight[0], straight[1], favour)
            )
            mu, classes = walk.predict(number, which), walk.classes(number, which, shifts)
            step = row_steps(steps[which], shifts)
            y = (straight[which] - mu) @ engine.parts[number][which].analysis / step
            magnitudes, escaped = choose(engine.tables, y.abs(), classes, which)
            signed = torch.where(y < 0, -magnitudes, magnitudes)
            found = values_of(engine.tables, signed, escaped, classes, which)
            decoded = torch.where(exact[:, None], bits, walk.decoded(number, which, mu, found * step))
            rows.symbols.append(torch.where(escaped, ESCAPE, signed.clamp(-LARGEST, LARGEST) + LARGEST).byte().numpy())
            rows.classes.append(classes.numpy())
            rows.escapes.append(torch.where(escaped, signed, 0).to(torch.int16).numpy())
            rows.shifts.append(shifts.numpy())
            rows.decoded.append(decoded)
            rows.errors[:, which] += ((y - found) * step).square().mean(1) * ~exact / len(layers)
            rows.largest.copy_(torch.maximum(rows.largest, (from_bits(decoded) - from_bits(bits)).abs().amax(1)))
            walk.take(number, which, decoded)
            walk.follow(number, which, signed, classes)
    return rows


def to_bits(x: Tensor) -> Tensor:
    """The bf16 bits of float32 numbers, int64."""
    return x.bfloat16().view(torch.int16).long() & 0xFFFF


def from_bits(bits: Tensor) -> Tensor:
    return (bits << 16).int().view(torch.float32)
