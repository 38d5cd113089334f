"""Fits the lossy mode of the predictive codec: predictors, transforms, scales and tables.

In closed loop: a part is predicted from what a decoder would have of those before. First, layer by layer at a middle
rate, the predictor (ridge regression, as in AQUA-KV, arXiv:2501.19392, with more inputs) and the transform (the
Karhunen-Loeve transform of the residual, scaled by what an error costs). Then, at several rates at once, the scales of
components and rows, and the tables, which have the encoder's choices in them and so are made twice.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump, Progress, silent
from kvstore.calibration.lossy.closed_loop import ClosedLoop, InputGroup
from kvstore.calibration.lossy.costs import Costs, Focus, attention_costs, balanced, gradient_costs
from kvstore.calibration.lossy.tables import fit_tables, laplace, quarters
from kvstore.calibration.lossy.transform import factor_of, fit_transform, matrices
from kvstore.calibration.parallel import in_parallel
from kvstore.calibration.predictive.sums import DAMP
from kvstore.calibration.targets import reach, target
from kvstore.codecs.predictive import lossy_quantiser as lossy
from kvstore.codecs.predictive.lossy_model import input_groups
from kvstore.codecs.predictive.lossy_quantiser import Steps, Tables
from kvstore.codecs.predictive.lossy_rows import first_prediction
from kvstore.codecs.predictive.model import MAX_BIAS, PredictiveModel

Arrays = dict[str, np.ndarray[Any, Any]]
Tensor = torch.Tensor
MIDDLE = (3.0, 3.0)  # steps that predictors and transforms are fitted at
LEVELS = (-6, 0, 5)  # quarter octaves from there that scales are measured at
TABLE_ROUNDS = 2
COST_WINDOWS = 16
BALANCE_WINDOWS = 6
INPUT_PRICE = 0.005  # bits a row that an input of a part must save to be used: what its weights' size is worth
WITHOUT = ((), (3,), (4,), (3, 4), (1, 3), (2, 4), (0,), (0, 3, 4))  # kinds of inputs that may be left out


def fit(
    dump: KVDump,
    base: PredictiveModel,
    progress: Progress = silent,
    scratch: Path | None = None,
    *,
    model: Any = None,
    costs: Costs | None = None,
    focus: Focus | None = None,
    middle: tuple[float, float] = MIDDLE,
    uses: np.ndarray[Any, Any] | None = None,
) -> Arrays:
    """The profile's section "lossy", without a ladder. base: the lossless model of the same profile.

    model: of transformers, that the dump was made with; from its gradients comes what errors cost (`gradient_costs`,
    `balanced`). Without it, and without costs, `attention_costs` are taken, which need about twice the bits.
    costs, focus: instead of that. uses: uint8 [layers, 2], which kinds of inputs parts have (see `LossyPart.uses`); 0,
    the default: those worth it. scratch: where files of a byte a value of three layers are made, and removed.
    """
    if model is not None and costs is None and len(dump.fit_windows) > 1:
        costs, focus = gradient_costs(model, dump, dump.some(COST_WINDOWS), progress)
    costs = attention_costs(dump) if costs is None else costs
    uses = np.zeros((len(base.parts), 2), np.uint8) if uses is None else uses.copy()
    steps = Steps.of(*middle)
    levels = np.array([[q + x for q in steps.quarters] for x in LEVELS], np.int16)
    arrays: Arrays = {"uses": uses, "levels": levels, "ladder": np.zeros((0, 5), np.float32), **laplace()}
    for number, pair in enumerate(focus or []):
        for which in range(2):
            arrays[f"{number}.{'kv'[which]}.focus"] = pair[which].astype(np.float32)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        loop = ClosedLoop(dump, base, steps, Path(folder))
        for number in range(len(base.parts)):
            progress("lossy: fitting layers", number, len(base.parts))
            for which in range(2):
                _fit_part(loop, number, which, arrays, costs[number][which])
        progress("lossy: fitting layers", len(base.parts), len(base.parts))
    for turn in range(TABLE_ROUNDS):
        progress("lossy: fitting tables", turn, TABLE_ROUNDS)
        fit_tables(dump, base, arrays)
    progress("lossy: fitting tables", TABLE_ROUNDS, TABLE_ROUNDS)
    if model is not None:
        arrays = balanced(model, dump, base, arrays, dump.some(BALANCE_WINDOWS), middle, progress)
    return arrays


def _fit_part(loop: ClosedLoop, number: int, which: int, arrays: Arrays, cost: np.ndarray[Any, Any]) -> None:
    prefix, groups = f"{number}.{'kv'[which]}.", input_groups(loop.base, number, which)
    width = loop.base.parts[number][which].width
    keys = list(groups.values())
    square, total = torch.zeros(width, width, dtype=torch.double), torch.zeros(width, dtype=torch.double)
    moments = {key: torch.zeros(loop.width(key), width, dtype=torch.double) for key in keys}
    for window in loop.dump.fit_windows:
        y = torch.from_numpy(target(loop.dump, number, which, window))
        if not number:
            y = y - _first(loop, which, window)
        for key in keys:
            moments[key] += loop.inputs([key], window).T @ y
        square, total = square + y.T @ y, total + y.sum(0)
    if not number:
        covariance = square / loop.count
    else:
        given = _PartSums(loop, moments, square, total)
        uses = int(arrays["uses"][number, which])
        if not uses:
            uses = given.chosen(groups, cost, loop.steps[which])
            arrays["uses"][number, which] = uses
        keys = [key for kind, key in groups.items() if uses >> kind & 1]
        weight, scale, bias, covariance = given.ridge(keys)
        arrays[prefix + "weight"], arrays[prefix + "out_scale"] = weight.to(torch.int8).numpy(), scale.float().numpy()
        arrays[prefix + "bias"] = bias.round().clamp(-MAX_BIAS, MAX_BIAS).to(torch.int32).numpy()
    sigma = fit_transform(covariance.numpy(), cost, prefix, arrays)
    arrays[prefix + "scale"] = np.stack([quarters(sigma)] * len(LEVELS))
    arrays[prefix + "adapt"] = np.zeros(3, np.int32)
    arrays.setdefault(prefix + "focus", np.zeros(sum(part.width for part in loop.base.parts[number]) + 1, np.float32))
    if number:
        _decode_part(loop, number, which, arrays, keys)


@dataclass(frozen=True)
class _PartSums:
    """What a part's predictor is fitted from: sums of products of its inputs with it, and of it with itself."""

    loop: ClosedLoop
    moments: dict[InputGroup, Tensor]
    square: Tensor
    total: Tensor

    def ridge(self, keys: Sequence[InputGroup]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(8-bit weights [inputs, C], the scale of each column, the constant in units of it, the covariance [C, C] of
        what they leave), float64."""
        n = self.loop.count
        gram, sums = self.loop.gram(keys)
        gram = gram - torch.outer(sums, sums) / n
        moment = torch.cat([self.moments[key] for key in keys]) - torch.outer(sums, self.total) / n
        damped = gram + torch.eye(len(gram), dtype=torch.double) * DAMP * gram.diagonal().mean()
        weight = torch.linalg.solve(damped, moment)
        scale = (weight.abs().amax(0) / 127).clamp(min=1e-20)
        weight = (weight / scale).round()
        used = weight * scale
        both = used.T @ moment
        left = (self.square - torch.outer(self.total, self.total) / n - both - both.T + used.T @ gram @ used) / n
        return weight, scale, (self.total / n - (sums / n) @ used) / scale, left

    def chosen(self, groups: dict[int, InputGroup], cost: np.ndarray[Any, Any], step: float) -> int:
        """The kinds of inputs that are worth their weights: few bits, where one input is worth `INPUT_PRICE`."""
        factor = torch.from_numpy(factor_of(cost))
        best, least = 0, math.inf
        for without in WITHOUT:
            kinds = [kind for kind in groups if kind not in without]
            if not kinds or any(kind not in groups for kind in without):
                continue
            keys = [groups[kind] for kind in kinds]
            variances = torch.linalg.eigvalsh(factor.T @ self.ridge(keys)[3] @ factor).clamp(min=0)
            bits = 0.5 * torch.log2(1 + variances / step**2).sum().item()
            price = bits + INPUT_PRICE * sum(self.loop.width(key) for key in keys)
            if price < least:
                best, least = sum(1 << kind for kind in kinds), price
        return best


def _decode_part(loop: ClosedLoop, number: int, which: int, arrays: Arrays, keys: list[InputGroup]) -> None:
    """What a decoder will have of a part, as inputs of later ones."""
    prefix, width = f"{number}.{'kv'[which]}.", loop.base.parts[number][which].width
    weight = torch.from_numpy(arrays[prefix + "weight"]).float()
    out_scale, bias = torch.from_numpy(arrays[prefix + "out_scale"]), torch.from_numpy(arrays[prefix + "bias"])
    analysis, synthesis = matrices(arrays, prefix)
    tables = Tables.of(arrays["freqs"], arrays["centroids"], arrays["expect"])
    scale = torch.from_numpy(arrays[prefix + "scale"][0].astype(np.int64))
    part = loop.base.parts[number][which]
    in_scale = torch.tensor(reach(part.in_scale, part.fix))
    rows = loop.begin((number, which), width)

    def decode(window: int) -> None:
        mu = (loop.inputs(keys, window) @ weight + bias) * out_scale
        straight = [torch.from_numpy(target(loop.dump, number, i, window)) for i in range(2)]
        shifts = lossy.shifts_of(arrays[prefix + "focus"], *straight)
        step = lossy.row_steps(loop.steps[which], shifts)
        y = (straight[which] - mu) @ analysis / step
        classes = lossy.classes_of(scale, loop.steps.quarters[which], torch.zeros(len(y), dtype=torch.long), shifts)
        magnitudes, escaped = lossy.choose(tables, y.abs(), classes, which)
        signed = torch.where(y < 0, -magnitudes, magnitudes)
        found = lossy.values_of(tables, signed, escaped, classes, which)
        x = mu + (found * step) @ synthesis
        rows[window] = (x * in_scale).clamp(-127, 127).round().to(torch.int8).numpy()

    in_parallel(decode, loop.dump.fit_windows)
    loop.end((number, which))


def _first(loop: ClosedLoop, which: int, window: int) -> Tensor:
    """The prediction of layer 0."""
    rows, split = loop.inputs([(-1, 0)], window), loop.base.parts[0][0].width
    return first_prediction(loop.base.parts[0][which], rows[:, split:] if which else rows[:, :split])
