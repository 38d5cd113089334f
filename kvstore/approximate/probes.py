"""What is done where nothing was fitted to the model: a few rows of every donor's run are recomputed, and what is found
there stands for the rows between them. Pure: no I/O, no torch.

The errors of the rows are measured, then; what they do to the predictions is not. For that the numbers here are three
times worse than those of the models that were measured, so that a reuse is refused where it cannot be known to be good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvstore.core.approximate import Approximate, Candidate, ReusedSpan

FLOOR = 0.004
SLOPE = 2.0
LEAST_SHARE = 0.5
"""Share of the tokens beyond the exact prefix that reuse must save; below it a plain prefill is not much slower."""


def runs(spans: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """The spans, those of one seam together."""
    run: list[Candidate] = []
    for span in spans:
        if run and not span.run:
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def probes(spans: Sequence[Candidate]) -> list[int]:
    """Positions to probe: at distances of 0, 1, 4, 16, 64 ... of every seam, and the last one."""
    found = []
    for run in runs(spans):
        first, last = run[0].start, run[-1].start + run[-1].count - 1
        wanted = {first, last} | {first + 4**power for power in range(16)}
        held = [range(span.start, span.start + span.count) for span in run]
        found += [x for x in sorted(wanted) if any(x in rows for rows in held)]
    return found


def probed_plan(
    request: Approximate, exact_tokens: int, spans: Sequence[Candidate]
) -> tuple[tuple[ReusedSpan, ...], tuple[int, ...]] | None:
    """Return what to take from donors, and the positions to recompute: those that no donor has, and probes.

    None if that is more than the request allows, or does not pay. Errors and shares of the KL are not known: infinite.
    """
    if not spans:
        return None
    end = spans[-1].start + spans[-1].count
    held = np.zeros(end, np.bool_)
    held[:exact_tokens] = True
    for x in spans:
        held[x.start : x.start + x.count] = True
    positions = sorted({*np.flatnonzero(~held).tolist(), *probes(spans)})
    if request.recompute is not None and len(positions) > request.recompute:
        return None
    if end - exact_tokens - len(positions) < LEAST_SHARE * (end - exact_tokens):
        return None
    made = tuple(
        ReusedSpan(x.start, x.count, x.run, x.shift, x.donor, x.donor_start, math.inf, math.inf) for x in spans
    )
    return made, tuple(positions)


def probed(spans: Sequence[ReusedSpan], positions: Any, errors: Any) -> float:
    """Return the estimate of the KL, nats a token, after the probes were recomputed; infinite if a run has none.

    Args:
        spans: those of the plan.
        positions: the recomputed positions, `[p]`, rising.
        errors: float `[p]`, of the donors' rows there, in the measure of `ReusedSpan.error`.
    """
    where, found = np.asarray(positions, np.int64), np.asarray(errors, np.float64)
    left, end = 0.0, 0
    for run in runs(spans):
        begin, end = run[0].start, run[-1].start + run[-1].count
        at = (where >= begin) & (where < end) & np.isfinite(found)
        if not at.any():
            return math.inf
        rows = np.concatenate([np.arange(x.start, x.start + x.count) for x in run])
        rows = rows[~np.isin(rows, where)]
        after = np.searchsorted(where[at], rows)
        known = found[at]
        nearest = np.maximum(known[np.maximum(after - 1, 0)], known[np.minimum(after, len(known) - 1)])
        left += float(nearest.sum())
    return FLOOR + SLOPE * left / max(1, end)
