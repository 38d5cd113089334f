"""The constants of `Estimates`, from measured cases.

The error curve is what is to be expected of a row, so that what is found at recomputed rows can correct it. The KL is a
bound. Of all lines that 95 of 100 measurements keep it is the one that is lowest on average, and half as much again:
other text is worse than the text of the fit, and no number of rows tells how much a change of them matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from kvstore.approximate.estimates import from_arrays, to_arrays
from kvstore.calibration.approximate.cases import cases
from kvstore.calibration.approximate.measure import Floats, Seen, all_levels, measured
from kvstore.calibration.dump import KVDump, Progress, silent
from kvstore.core.approximate import Estimates

Arrays = dict[str, Any]
WINDOWS = 32
MARGIN = 1.5
SHARE = 0.95  # of the measurements that are below the line
EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ROUNDING = 1e-3  # errors below are mostly rounding
_LEVELS, _REACHES, _FALLS = np.arange(0.05, 1.05, 0.05), np.geomspace(8, 512, 37), np.arange(0.6, 2.6, 0.1)
_FLOORS = np.geomspace(1e-4, 1e-1, 121)


def fit(model: Any, dump: KVDump, progress: Progress = silent) -> Arrays:
    """The arrays of the section (see `Estimates`)."""
    windows = dump.some(WINDOWS)
    seen = []
    for done, case in enumerate(measured(model, dump.layout, cases(dump, windows))):
        progress("approximate: running the model", done, len(windows))
        seen.append(case)
    progress("approximate: running the model", len(windows), len(windows))
    return to_arrays(fit_to(seen))


def report(model: Any, dump: KVDump, arrays: Arrays) -> dict[str, Any]:
    """Of the held-out windows: "cases", and the share of measurements that keep the bound, "within"."""
    found = list(measured(model, dump.layout, cases(dump, list(dump.held_out))))
    estimates = from_arrays(arrays)
    rows = all_levels(found, estimates).reshape(-1, 2)
    bound = estimates.floor + estimates.slope * rows[:, 0]
    return {
        "cases": len(found),
        "within": float((rows[:, 1] <= bound).mean()) if len(rows) else None,
        "floor": estimates.floor,
        "slope": estimates.slope,
    }


def fit_to(seen: Sequence[Seen]) -> Estimates:
    """Of measured cases: the curve first, then the bound that goes with it."""
    curve = fit_errors(seen)
    floor, slope = fit_bound(all_levels(seen, Estimates(*curve, 0.0, 1.0)))
    return Estimates(*curve, floor, slope)


def fit_errors(seen: Sequence[Seen]) -> tuple[float, float, float]:
    """Seam error, reach and fall, of least squares of the logarithms of mean errors: by changed tokens, in bins of the
    distance. A grid is fine enough: one case differs from another by far more."""
    groups: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for case in seen:
        for span, changed in zip(case.spans, case.changed, strict=True):
            distance = span.run + np.arange(span.count)
            errors = case.errors[span.start : span.start + span.count]
            for number, (begin, end) in enumerate(pairwise(EDGES)):
                part = (distance >= begin) & (distance < end)
                if changed and part.any() and np.isfinite(mean := float(errors[part].mean())):
                    key = number, round(np.log2(changed))
                    groups.setdefault(key, []).append((float(distance[part].mean()), changed, mean))
    bins = np.array([np.mean(rows, 0) for rows in groups.values()]).reshape(-1, 3)
    bins = bins[bins[:, 2] > ROUNDING]
    if not len(bins):
        return float(_LEVELS[0]), float(_REACHES[0]), float(_FALLS[-1])
    distance, changed_, error = bins.T

    def loss(constants: tuple[float, float, float]) -> float:
        level, most, fall = constants
        reach = most * changed_ / (most + changed_)
        return float((np.log(level * (reach / (reach + distance)) ** fall / error) ** 2).sum())

    level, reach, fall = min(product(_LEVELS, _REACHES, _FALLS), key=loss)
    return float(level), float(reach), float(fall)


def fit_bound(rows: Floats) -> tuple[float, float]:
    """Floor and slope of the line that SHARE of (error, KL) are below, the lowest in the mean of the logarithm; times
    MARGIN."""
    error, kl = rows.T
    best = (np.inf, 0.0, 0.0)
    for floor in _FLOORS:
        steep = (kl - floor) / np.maximum(error, 1e-6)
        slope = max(float(np.quantile(steep, SHARE, method="higher")), 1e-6)
        best = min(best, (float(np.log(floor + slope * error).mean()), float(floor), slope))
    return MARGIN * best[1], MARGIN * best[2]
