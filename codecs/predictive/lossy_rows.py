"""Rows of keys and values, predicted and quantised with loss: the arithmetic of the lossy mode, without its bytes.

Sums of products that are rounded are made in float64: another order of them, or another processor, changes a choice of
symbols less than once in 2**40, so that csrc/lossy/encode writes the same bytes. Rows do not depend on each other, so
those of many blocks go through at once, part after part. What a part's rows cost and lose is in lossy_quantiser.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.codecs.predictive import reference
from kvstore.codecs.predictive.lossy_model import (
    ESCAPE,
    LARGEST,
    PLAIN,
    SHIFTS,
    SYMBOLS,
    LossyModel,
    LossyPart,
    input_groups,
)
from kvstore.codecs.predictive.lossy_quantiser import (
    Steps,
    Tables,
    choose,
    classes_of,
    following,
    row_steps,
    scale_at,
    shifts_of,
    surprise,
    values_of,
)
from kvstore.codecs.predictive.model import Part
from kvstore.codecs.rans.coder import RansTables

Tensor = torch.Tensor
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Prepared:
    """A part's arrays as the arithmetic here wants them."""

    weight: Tensor | None
    """float32 [inputs, C]."""
    analysis: Tensor
    """float32 [C (value), C (component)]."""
    synthesis: Tensor
    """float64 [C (component), C (value)]."""

    @classmethod
    def of(cls, part: LossyPart) -> Prepared:
        weight = None if part.weight is None else reference.tensor(part.weight).float()
        synthesis = synthesis_of(part.component, part.basis, part.unit)
        try:
            analysis = np.linalg.inv(synthesis)
        except np.linalg.LinAlgError:
            analysis = np.linalg.pinv(synthesis)
        return cls(weight, torch.from_numpy(analysis).float(), torch.from_numpy(synthesis))


def synthesis_of(component: Floats, basis: npt.NDArray[np.int8], unit: Floats) -> npt.NDArray[np.float64]:
    """From components, in units of cost, to values: float64 [C (component), C (value)]; arrays of a `LossyPart`."""
    found: npt.NDArray[np.float64] = component[:, None].astype(np.float64) * basis * unit
    return found


def first_prediction(lossless: Part, rows: Tensor) -> Tensor:
    """Of layer 0, of K before the rotation, float32 [n, C]. rows: the part's columns of the table of tokens."""
    mu = (reference.tensor(lossless.bias) + 256 * rows) * reference.tensor(lossless.out_scale)
    return mu if lossless.fix is None else mu * torch.exp2(-reference.tensor(lossless.fix).float())


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
        residual = found.double() @ self._engine.parts[number][which].synthesis
        return to_bits(self.rotated(which, mu.double() + residual))

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
    """float64 [n, 2]: squares of errors of K and V in units of cost, means over parts and components."""
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
    rows = Rows([], [], [], [], [], torch.zeros(len(tokens), 2, dtype=torch.double), torch.zeros(len(tokens)))
    for number, pair in enumerate(layers):
        straight = [walk.rotated(which, from_bits(bits), -1) for which, bits in enumerate(pair)]
        for which, bits in enumerate(pair):
            shifts = torch.where(
                exact, PLAIN, shifts_of(engine.model.parts[number][which].focus, straight[0], straight[1], favour)
            )
            mu, classes = walk.predict(number, which), walk.classes(number, which, shifts)
            step = row_steps(steps[which], shifts)
            whole = (straight[which] - mu).double() @ engine.parts[number][which].analysis.double()
            y = (whole / step.double()).float()
            magnitudes, escaped = choose(engine.tables, y.abs(), classes, which)
            signed = torch.where(y < 0, -magnitudes, magnitudes)
            found = values_of(engine.tables, signed, escaped, classes, which)
            decoded = torch.where(exact[:, None], bits, walk.decoded(number, which, mu, found * step))
            rows.symbols.append(torch.where(escaped, ESCAPE, signed.clamp(-LARGEST, LARGEST) + LARGEST).byte().numpy())
            rows.classes.append(classes.numpy())
            rows.escapes.append(torch.where(escaped, signed, 0).to(torch.int16).numpy())
            rows.shifts.append(shifts.numpy())
            rows.decoded.append(decoded)
            lost = (y.double() - found.double()) * step.double()
            rows.errors[:, which] += lost.square().mean(1) * ~exact / len(layers)
            rows.largest.copy_(torch.maximum(rows.largest, (from_bits(decoded) - from_bits(bits)).abs().amax(1)))
            walk.take(number, which, decoded)
            walk.follow(number, which, signed, classes)
    return rows


def to_bits(x: Tensor) -> Tensor:
    """The bf16 bits of numbers, by way of float32, int64."""
    return x.float().bfloat16().view(torch.int16).long() & 0xFFFF


def from_bits(bits: Tensor) -> Tensor:
    return (bits << 16).int().view(torch.float32)
