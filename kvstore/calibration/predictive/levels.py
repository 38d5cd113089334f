"""Fits the levels of the exact predictor (the profile's section "levels"), on top of the section "lossless".

A second pass over the windows sums the products of every layer's 8-bit inputs, as ../predictive/fit.py does. From these
sums come, for each level, the regressions on other layers, the covariance of what they leave, and its block Cholesky
factor: the weights from group to group. All weights of a column have one power of two for a scale. One window is in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.calibration.dump import KVDump, Progress, silent
from kvstore.calibration.predictive.cholesky import solved
from kvstore.calibration.predictive.inputs import HEADROOM, largest_inputs, sampled_parts
from kvstore.calibration.predictive.level_tables import fit_tables
from kvstore.calibration.predictive.rounding import rounded
from kvstore.calibration.predictive.sums import Columns, ProductSums
from kvstore.calibration.targets import NO_SINKS, target
from kvstore.codecs.predictive.levels.model import GROUP, LEVELS, MAX_FACTOR, REACH, coding_order
from kvstore.codecs.predictive.linear_model import RANGE, rotates
from kvstore.codecs.predictive.model import MAX_BIAS

Arrays = dict[str, npt.NDArray[Any]]
Tensor = torch.Tensor
_DAMP = 1e-4  # of the mean diagonal
_TAILS = 8.0  # standard deviations that an 8-bit residual reaches: it is cut less often than an input
_LARGEST = 4064  # of an input's reach, in fixed point: 32 steps of 8 bits, so that weights have room
_ROW_PLACES = 7  # more, of the sums of layer 0
_MOST_PLACES = 12


def fit(
    dump: KVDump, lossless: Arrays, levels: Sequence[int] = LEVELS, progress: Progress = silent
) -> dict[str, npt.NDArray[Any]]:
    """Make the profile's section "levels".

    Args:
        dump: of a model in bfloat16.
        lossless: the section "lossless", fitted before: its table of tokens and of angles are used.
        levels: those to make, of 1 to 3.
        progress: told what is being done.
    """
    arrays = _shared(dump, lossless)
    sums = ProductSums(dump.layout)
    windows = dump.fit_windows
    for window in windows:
        sums.add(_inputs(dump, window, arrays))
        progress("levels: summing windows", window + 1, len(windows))
    half = dump.layout.layers[0].key_dim // 2 if rotates(dump.layout) else 0
    for level in levels:
        for number in range(len(dump.layout.layers)):
            for which in range(2):
                _fit_part(dump, sums, arrays, level, number, which, lossless, half if which == 0 else 0)
        fit_tables(dump, lossless, arrays, level, progress)
    return arrays


def fit_in_passes(
    dump: KVDump, sample: KVDump, lossless: Arrays, level: int, most_bytes: int, progress: Progress = silent
) -> dict[str, npt.NDArray[Any]]:
    """The section "levels" with one level, from sums of at most `most_bytes`; as `fit.fit_in_passes`."""
    arrays, layers = _shared(sample, lossless), len(dump.layout.layers)
    half = dump.layout.layers[0].key_dim // 2 if rotates(dump.layout) else 0
    runs, windows, first = ProductSums.passes(dump.layout, most_bytes), dump.fit_windows, 0
    for number, run in enumerate(runs or [range(1, 1)]):
        sums = ProductSums(dump.layout, run)
        for window in windows if run else ():
            done = number * len(windows) + window
            told = partial(progress, "levels: summing windows", done, len(runs) * len(windows))
            sums.add(_inputs(dump, window, arrays), told)
        for layer in range(first, run.stop):
            for which in range(2):
                told = partial(progress, "levels: solving layers", layer, layers)
                _fit_part(dump, sums, arrays, level, layer, which, lossless, half if which == 0 else 0, told)
        first = run.stop
        del sums  # before the next ones are made
    progress("levels: summing windows", len(runs) * len(windows), len(runs) * len(windows))
    progress("levels: solving layers", layers, layers)
    fit_tables(sample, lossless, arrays, level, progress)
    return arrays


def _shared(dump: KVDump, lossless: Arrays) -> Arrays:
    """What levels have in common: fixed point, inputs, and the rows of tokens."""
    arrays: Arrays = {}
    for number, which, prefix, x in sampled_parts(dump):
        inputs = reach = largest_inputs(x)
        largest, most = np.abs(x).max(0), float(1 << 15)
        if which == 0 and rotates(dump.layout):
            pairs = x.reshape(len(x), -1, 2, dump.layout.layers[number].key_dim // 2)
            largest, most = _both(np.hypot(pairs[:, :, 0], pairs[:, :, 1]).max(0)), float(RANGE)
            reach = _both(inputs.reshape(pairs.shape[1:]).max(1))
        room = np.minimum(most / (HEADROOM * np.maximum(largest, 1e-6)), _LARGEST / reach)
        fix = np.floor(np.log2(room)).clip(-14, 30)
        arrays[prefix + "fix"] = fix.astype(np.int8)
        arrays[prefix + "gain"] = _factor(127 / (inputs * np.exp2(fix)))
        if number == 0:
            step = _first_steps(lossless, which)[0]
            arrays[prefix + "row"] = _factor(step * np.exp2(fix + _ROW_PLACES) / (1 << 15))
    return arrays


def _both(pairs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[heads, half] for both halves of every pair, flat."""
    return np.stack([pairs, pairs], 1).reshape(-1)


def _factor(x: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """In 1/32768."""
    found: npt.NDArray[np.int16] = np.rint(x * (1 << 15)).clip(1, MAX_FACTOR).astype(np.int16)
    return found


def _first_steps(lossless: Arrays, which: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Layer 0: (step, middle) of the columns of the table of tokens."""
    prefix = f"0.{'kv'[which]}."
    fix = lossless.get(prefix + "fix")
    unit = lossless[prefix + "out_scale"].astype(float) / (1 if fix is None else np.exp2(fix.astype(float)))
    return 256 * unit, lossless[prefix + "bias"] * unit


def _inputs(dump: KVDump, window: int, arrays: Arrays) -> list[tuple[Tensor, Tensor]]:
    """As `inputs.inputs_of`, with the scales of levels."""
    found = []
    for number in range(len(dump.layout.layers)):
        pair = []
        for which in range(2):
            prefix = f"{number}.{'kv'[which]}."
            scale = np.exp2(arrays[prefix + "fix"].astype(np.float32)) * arrays[prefix + "gain"] / (1 << 15)
            x = target(dump, number, which, window, NO_SINKS) * scale.astype(np.float32)
            pair.append(torch.from_numpy(x).round_().clamp_(-128, 127))
        found.append((pair[0], pair[1]))
    return found


def _fit_part(
    dump: KVDump,
    sums: ProductSums,
    arrays: Arrays,
    level: int,
    number: int,
    which: int,
    lossless: Arrays,
    half: int,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """`pause` is called before every step of some milliseconds."""
    shape = dump.layout.layers[number]
    keys, own = shape.heads * shape.key_dim, f"{level}.{number}.{'kv'[which]}."
    if number == 0:
        middle = _first_steps(lossless, which)[1] * np.exp2(arrays[f"0.{'kv'[which]}.fix"].astype(float))
        arrays[own + "shift"] = np.full(len(middle), _ROW_PLACES, np.int8)
        arrays[own + "bias"] = _bias(middle * (1 << _ROW_PLACES), arrays[own + "shift"])
        arrays[own + "narrow"] = np.ones(len(middle), np.int16)
        return
    aim = (number, slice(keys, None) if which else slice(0, keys))
    before: list[Columns] = [(number - back, slice(None)) for back in range(1, REACH[level] + 1) if number >= back]
    inputs = [*before, (number, slice(0, keys))] if which else before
    unit = (1 << 15) / arrays[f"{number}.{'kv'[which]}.gain"].astype(float)  # an input's step, in fixed point
    order = coding_order(len(unit), half)
    back = np.argsort(order)
    gram, moment, left = _products(sums, inputs, aim, pause)
    weight = solved(_damped(gram), moment, pause) if inputs else moment
    pause()
    factor, spread = _factored(_left(gram, moment, left, weight)[order][:, order])
    narrow = _factor(127 / (_TAILS * spread * unit[order]))
    # From steps of residuals to fixed point, and what is added to it.
    step = unit[order][:, None] * ((1 << 15) / narrow / unit[order])
    across = weight.numpy() * unit
    largest = np.maximum(np.abs(across).max(0, initial=0)[order], np.abs(factor * step).max(1))
    shift = np.floor(np.log2(127.49 / np.maximum(largest, 1e-9))).clip(0, _MOST_PLACES)[back]
    places = np.exp2(shift)
    pause()
    whole = rounded(across * places, _damped(gram).numpy(), pause)
    pause()
    # The groups know what rounding has left.
    factor = _factored(_left(gram, moment, left, torch.from_numpy(whole / (places * unit)))[order][:, order])[0]
    between = np.rint(factor * step * places[order][:, None]).clip(-127, 127).astype(np.int8)
    arrays[own + "narrow"], arrays[own + "shift"] = narrow[back], shift.astype(np.int8)
    if inputs:
        arrays[own + "weight"] = whole.astype(np.int8)
    arrays[own + "group"] = _packed(between)
    means = torch.cat([sums.mean(part) for part in inputs]).numpy() if inputs else np.zeros(0)
    arrays[own + "bias"] = _bias(sums.mean(aim).numpy() * unit * places - means @ whole, shift)


def _products(
    sums: ProductSums, inputs: Sequence[Columns], aim: Columns, pause: Callable[[], None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Covariances of inputs, of inputs and what is aimed at, and of that, in steps of inputs."""
    aimed = sums.covariances([aim], [aim], pause) / sums.rows
    if not inputs:
        return torch.zeros(0, 0, dtype=torch.double), torch.zeros(0, len(aimed), dtype=torch.double), aimed
    gram, moment = (sums.covariances(inputs, others, pause) / sums.rows for others in (inputs, [aim]))
    return gram, moment, aimed


def _damped(gram: Tensor) -> Tensor:
    more = max(_DAMP * float(gram.diagonal().mean()), 1e-9) if len(gram) else 0.0
    return gram + torch.eye(len(gram), dtype=torch.double) * more


def _left(gram: Tensor, moment: Tensor, aimed: Tensor, weight: Tensor) -> npt.NDArray[Any]:
    """The covariance of what these weights leave."""
    cross = weight.T @ moment
    found: npt.NDArray[Any] = _damped(aimed - cross - cross.T + weight.T @ gram @ weight).numpy()
    return found


def _factored(left: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Of the covariance of residuals, in coding order: the weights from each group to columns after it, [C (to), C],
    and the standard deviation of what no group before explains of each column."""
    whole = torch.linalg.cholesky(torch.from_numpy(left)).numpy()
    factor, alone = np.zeros_like(whole), np.zeros(len(whole))
    for begin in range(0, len(left), GROUP):
        at = slice(begin, begin + GROUP)
        inner = whole[at, at]
        alone[at] = np.sqrt(np.square(inner).sum(1))
        factor[begin + GROUP :, at] = np.linalg.solve(inner.T, whole[begin + GROUP :, at].T).T
    return factor, alone


def _packed(between: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """[C (to), C] as it stands in a profile: of each group the weights of all columns before it, flat."""
    groups = [between[begin : begin + GROUP, :begin].T.reshape(-1) for begin in range(0, len(between), GROUP)]
    return np.concatenate(groups)


def _bias(middle: npt.NDArray[Any], shift: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """With the half that makes a shift round."""
    half = np.floor(np.exp2(shift.astype(float) - 1))
    found: npt.NDArray[np.int32] = np.rint(middle + half).clip(-MAX_BIAS, MAX_BIAS).astype(np.int32)
    return found
