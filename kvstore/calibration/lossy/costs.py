"""What errors in keys and values cost, by which the lossy mode of the predictive codec spends its bits.

Either by the attention of the same layer alone (queries, output projection, norms), or by the model: the curvature of
the divergence of its predictions, from gradients of its loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump, Progress, floats, silent
from kvstore.calibration.lossy.gradients import frozen, gradients_of, leaves_of
from kvstore.calibration.lossy.quality import as_cached, code_window
from kvstore.calibration.targets import unrotated
from kvstore.codecs.predictive.lossy_model import MAX_SCALE, PLAIN, SHIFTS, LossyModel
from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.lossy_rows import Engine
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.core.layout import SINKS

Arrays = dict[str, np.ndarray[Any, Any]]
Costs = list[list[np.ndarray[Any, Any]]]
"""Gram matrices [C, C], float64, of K (before the rotary embedding) and V of each layer: an error e costs e @ G @ e."""
Focus = list[list[np.ndarray[Any, Any]]]
"""Of K and V of each layer: `LossyPart.focus`."""
LOGIT, THOUSANDTHS = 0.15, 16.7  # changes, of the norm of a layer's output, that cost 1 by `attention_costs`
ATTENTION = 0.2  # of the gradients' cost that is made up by the other, for there are few gradients
FOCUS = 0.6  # of the predicted octaves of a row's gradient are followed by its step: predictions are uncertain
FOCUS_DAMP = 0.03
WORTH = 0.9  # of the cost must be left, at most, where steps follow rows
DRAWS = 3  # of targets for a window, where errors are looked at together
MOST = 8.0  # times that errors together may cost what they do one by one


def attention_costs(dump: KVDump) -> Costs:
    """What an error costs by the energy of the queries and the output projection: in K, what it changes in logits; in
    V, in the layer's output, relative to its norm. Gram matrices, float64 [C, C] of K and V of each layer."""
    found = []
    for number, shape in enumerate(dump.layout.layers):
        value = np.zeros((shape.heads * shape.value_dim,) * 2)
        for head, factor in enumerate(dump.sensitivity_v[number].astype(np.float64)):
            at = slice(head * shape.value_dim, (head + 1) * shape.value_dim)
            value[at, at] = factor @ factor.T
        found.append(
            [
                np.diag(np.square(dump.sensitivity_k[number].astype(np.float64) / LOGIT)),
                value * (1000 / (THOUSANDTHS * float(dump.norm[number]))) ** 2,
            ]
        )
    return found


def gradient_costs(
    model: Any, dump: KVDump, windows: Sequence[int], progress: Progress = silent, seed: int = 0
) -> tuple[Costs, Focus]:
    """What an error costs by the model itself, and which rows are worth smaller steps; of `windows`, at least two.

    An error of one costs a millionth of a nat of divergence, in all that follows: the first half of each window is the
    cache, the second is scored; see `gradients_of`. Few rows carry most of it (of some layers one in a hundred carries
    nine tenths): so the size of a row's gradient is predicted from its keys and values, by ridge regression of its
    logarithm, steps follow it, and only what is left goes into the cost. What does not help on the last quarter of the
    windows is not used. Memory and time are those of training on the windows, without optimiser.
    """
    half, generator = dump.length // 2, torch.Generator().manual_seed(seed)
    widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in dump.layout.layers]
    shapes = [[np.zeros((c, c)) for c in pair] for pair in widths]
    norms = []
    with frozen(model):
        for at, window in enumerate(windows):
            progress("lossy: what errors cost", at, len(windows))
            ids = torch.from_numpy(dump.tokens(window))[None, half:].to(model.device)
            (gradients,) = gradients_of(model, ids, leaves_of(model, dump, window), generator, 1)
            mine = []
            for i, g in enumerate(gradients):
                rows = g[0].transpose(0, 1).flatten(1).float().cpu().numpy()
                if i % 2 == 0:
                    rows = unrotated(rows, dump.layout, dump.layout.layers[i // 2].key_dim)
                rows = rows[SINKS:].astype(np.float64)
                norm = np.linalg.norm(rows, axis=1)
                # Weighed by their inverse size: a mean of squares would be that of the few largest alone.
                weighed = rows / np.sqrt(norm + np.median(norm) + 1e-30)[:, None]
                shapes[i // 2][i % 2] += weighed.T @ weighed
                mine.append(norm)
            norms.append(np.stack(mine))
    progress("lossy: what errors cost", len(windows), len(windows))
    costs, focus, others = [], [], attention_costs(dump)
    for number, pair in enumerate(shapes):
        inputs = [_row(dump, number, window, half) for window in windows]
        by, left = zip(*(_focus(inputs, [x[2 * number + which] for x in norms]) for which in range(2)), strict=True)
        by = by if number else tuple(np.zeros_like(x) for x in by)  # the token says what layer 0 is
        focus.append(list(by))
        costs.append([_mixed(x, o, m * 1e6 / 2) for x, o, m in zip(pair, others[number], left, strict=True)])
    return costs, focus


def _row(dump: KVDump, number: int, window: int, half: int) -> np.ndarray[Any, Any]:
    """K, before the rotation, V and 1, float64 [tokens but for sinks, C of K + C of V + 1]."""
    keys, values = (floats(np.asarray(x[:half])) for x in dump.layer(number, window))
    keys = unrotated(keys, dump.layout, dump.layout.layers[number].key_dim)
    return np.concatenate([keys, values, np.ones((half, 1))], 1)[SINKS:].astype(np.float64)


def _focus(
    rows: Sequence[np.ndarray[Any, Any]], norms: Sequence[np.ndarray[Any, Any]]
) -> tuple[np.ndarray[Any, Any], float]:
    """(float32 [inputs], the mean square of gradients after steps followed it); rows, norms: of each window."""
    fitted = max(1, len(rows) * 3 // 4)
    trial = _ridge(np.concatenate(rows[:fitted]), np.concatenate(norms[:fitted]))
    x, g = np.concatenate(rows[fitted:] or rows), np.concatenate(norms[fitted:] or norms)
    shifts = _shifts(x, trial)
    gain = np.mean(g**2 * 4.0**-shifts) * 4.0 ** shifts.mean() / max(np.mean(g**2), 1e-300)
    x, g = np.concatenate(rows), np.concatenate(norms)
    if not gain < WORTH:
        return np.zeros(x.shape[1], np.float32), float(np.mean(g**2))
    found = _ridge(x, g)
    return found.astype(np.float32), float(np.mean(g**2 * 4.0 ** -_shifts(x, found)))


def _ridge(x: np.ndarray[Any, Any], norms: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`FOCUS` times the logarithm of norms, less its mean, by the inputs, of which the last is 1; float64 [inputs]."""
    logs = np.log2(norms + 0.1 * np.median(norms) + 1e-30)
    mean, deviation = x[:, :-1].mean(0), x[:, :-1].std(0) + 1e-12
    z = (x[:, :-1] - mean) / deviation
    gram = z.T @ z
    weight = np.linalg.solve(gram + FOCUS_DAMP * len(z) * np.eye(len(gram)), z.T @ (logs - logs.mean()))
    weight *= FOCUS / deviation
    found: np.ndarray[Any, Any] = np.append(weight, -mean @ weight)
    return found


def _shifts(x: np.ndarray[Any, Any], focus: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.rint(x @ focus).clip(-PLAIN, SHIFTS - 1 - PLAIN)
    return found


def _mixed(shape: np.ndarray[Any, Any], other: np.ndarray[Any, Any], trace: float) -> np.ndarray[Any, Any]:
    """A Gram matrix with this trace."""
    found: np.ndarray[Any, Any] = (
        (1 - ATTENTION) * shape / max(np.trace(shape), 1e-300) + ATTENTION * other / np.trace(other)
    ) * max(trace, 1e-12)
    return found


def balanced(
    model: Any,
    dump: KVDump,
    base: PredictiveModel,
    arrays: Arrays,
    windows: Sequence[int],
    level: tuple[float, float],
    progress: Progress = silent,
) -> Arrays:
    """The same arrays with units of cost in which parts are alike when their errors are taken together.

    Errors of neighbouring tokens are alike: where attention takes a mean, of values, they add up; where it compares, as
    keys, they cancel. `gradient_costs` takes tokens one by one. By how much the sum over a window of what its errors
    change is larger than that, in squares, is how much more a part's errors cost; a mean over five layers.
    """
    engine, steps, half = Engine(LossyModel.from_arrays(base, arrays)), Steps.of(*level), dump.length // 2
    generator, together = torch.Generator().manual_seed(1), np.zeros((2, len(base.parts), 2))
    with frozen(model):
        for at, window in enumerate(windows):
            progress("lossy: how errors add up", at, len(windows))
            ids = torch.from_numpy(dump.tokens(window))[None, half:].to(model.device)
            with torch.inference_mode():
                rows = code_window(engine, steps, dump, window, half)[1]
                decoded = [x.float() for x in as_cached(rows.decoded, dump.layout)]
            leaves = leaves_of(model, dump, window)
            errors = [x.to(model.device) - leaf.detach().float() for x, leaf in zip(decoded, leaves, strict=True)]
            for gradients in gradients_of(model, ids, leaves, generator, DRAWS):
                for i, (g, e) in enumerate(zip(gradients, errors, strict=True)):
                    change = (g.float() * e).sum((0, 1, 3)).double()
                    together[:, i // 2, i % 2] += [change.sum().square().item(), change.square().sum().item()]
    progress("lossy: how errors add up", len(windows), len(windows))
    found = dict(arrays)
    for number in range(len(base.parts)):
        near = slice(max(1, number - 2), number + 3)
        for which in range(2):
            sums = together[:, near, which].sum(1)
            factor = math.sqrt(float(np.clip(sums[0] / max(sums[1], 1e-30), 1 / MOST, MOST)))
            quarters = round(4 * math.log2(factor))
            prefix = f"{number}.{'kv'[which]}."
            found[prefix + "component"] = (arrays[prefix + "component"] / 2 ** (quarters / 4)).astype(np.float32)
            found[prefix + "scale"] = (arrays[prefix + "scale"] + quarters).clip(-MAX_SCALE, MAX_SCALE).astype(np.int16)
    return found
