"""Reuse beyond the prefix: what a cache assembled from donors is worth, and which positions to compute anew.

A donor is a stored block that holds the same tokens behind another prefix. Its keys are rotated to the new positions;
what remains is that its tokens attended to another context. That error is largest right behind the *seam*, where the
common tokens begin, and falls with the distance from it: the nearer a token, the more it attends to it. How large it
is, says `kvstore.core.approximate.Estimates`, whose constants calibration fits to the model
(`kvstore/calibration/approximate`); probes.py is for models without.

Pure: no I/O, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.approximate.probes import LEAST_SHARE, probed, probed_plan
from kvstore.core.approximate import Approximate, Candidate, Estimates, Floats, ReusedSpan

WORTH = (0.3, 0.15, 0.075, 0.0375, 0.0188)
"""A position with at least this error is recomputed. The first value is tried first; the next ones if that does not
reach the KL that was asked for. A recomputed position costs about as much as a token of a prefill; the first value is
where the curve flattens."""
PROBES = 4
"""So many rows behind a seam are recomputed in any case: what is found there corrects the estimate of the others."""
SPREAD = (0.25, 16.0)
"""The least and the largest factor by which measured errors may correct an estimate."""
PRIOR = 1.0
"""Weight of the estimate beside what was measured at a seam, as a sum of errors."""


Estimated = tuple[Candidate, Floats]  # with the errors of its rows


@dataclass(frozen=True)
class Plan:
    """What to assemble. Each position is exact, in a span or in `recompute`.

    Attributes:
        tokens: how far the cache reaches.
        spans: what to take from donors; disjoint, rising.
        recompute: positions, rising: all that are in no span, and the worst of those that are.
        kl: bound of the KL divergence, nats a token, once these positions are recomputed.
    """

    tokens: int
    spans: tuple[ReusedSpan, ...]
    recompute: tuple[int, ...]
    kl: float


def plan(
    request: Approximate,
    exact_tokens: int,
    total_tokens: int,
    candidates: Sequence[Candidate | tuple[int, int, int, int, int, int]],
    estimates: Estimates | None,
) -> Plan | None:
    """Plan a cache for tokens [exact_tokens, total_tokens).

    It ends with the span at whose end the most tokens are saved, within the limits of the request. The caller computes
    the tokens behind that, as always.

    Args:
        request: the limits.
        exact_tokens: tokens of the exact prefix.
        total_tokens: tokens of the sequence.
        candidates: what donors hold, disjoint and rising.
        estimates: of the model; None if nothing was fitted to it. Then the plan's KL is infinite, and there is none
            unless the request is to probe.

    Returns:
        The plan, or None if it does not pay.

    Raises:
        ValueError: candidates overlap, do not rise, or lie outside.

    Example:
        >>> whole = Candidate(start=0, count=512, run=0, shift=0, donor=7, donor_start=0)
        >>> found = plan(Approximate(), 0, 512, [whole], Estimates(0.4, 45.0, 1.45, 0.002, 0.8))
        >>> found.tokens, len(found.spans)
        (512, 1)
    """
    spans = [x if isinstance(x, Candidate) else Candidate(*x) for x in candidates]
    _check(exact_tokens, total_tokens, spans)
    if estimates is None:
        made = probed_plan(request, exact_tokens, spans) if request.probe else None
        return None if made is None else Plan(made[0][-1].end, *made, math.inf)
    errors = [estimates.errors(x.run + np.arange(x.count), changed(x, exact_tokens)) for x in spans]
    best: tuple[int, Plan] | None = None
    for worth in WORTH:
        # Where no row would be left there is no reuse, only a longer list.
        kept = [(x, e) for x, e in zip(spans, errors, strict=True) if e[-1] < worth]
        found = _reach(request, exact_tokens, kept, worth, estimates)
        if found is not None and (best is None or found[0] > best[0]):
            best = found
        if found is not None and found[1].tokens == kept[-1][0].start + kept[-1][0].count:
            break  # a longer list saves less, unless it makes the cache reach further
    return None if best is None else best[1]


def _check(exact_tokens: int, total_tokens: int, spans: Sequence[Candidate]) -> None:
    end = exact_tokens
    if not 0 <= exact_tokens <= total_tokens:
        raise ValueError(f"exact_tokens: expected 0 to {total_tokens}, found {exact_tokens}")
    for span in spans:
        if span.start < end or span.count < 1 or span.start + span.count > total_tokens:
            raise ValueError(
                f"candidates: {span} overlaps the one before it, or lies outside of {end} to {total_tokens}"
            )
        if not 0 <= span.run <= span.start or span.start - span.shift < 0:
            raise ValueError(f"candidates: {span} has a run or shift that begins before position 0")
        end = span.start + span.count


def changed(span: Candidate, exact_tokens: int) -> int:
    """Return the tokens before the seam that differ, in the longer of both contexts.

    A donor that has as much context as the exact prefix is taken to begin with it: prompts of one application do.
    """
    seam = span.start - span.run
    there = seam - span.shift
    common = exact_tokens if min(seam, there) >= exact_tokens else 0
    return max(seam, there) - common


def _reach(
    request: Approximate, exact_tokens: int, kept: Sequence[Estimated], worth: float, estimates: Estimates
) -> tuple[int, Plan] | None:
    """(tokens saved, the plan) where a position of at least this error is recomputed; None if no end is allowed."""
    limit = math.inf if request.recompute is None else request.recompute
    best, missing, end, reused, left = None, 0, exact_tokens, 0, 0.0
    worst: list[float] = []
    for number, (span, error) in enumerate(kept):
        missing, end, reused = missing + span.start - end, span.start + span.count, reused + span.count
        if missing > limit:
            break
        bad = listed_rows(span, error, worth)
        worst, left = worst + error[:bad].tolist(), left + float(error[bad:].sum())
        budget = int(min(len(worst), limit - missing))
        unmended = sum(sorted(worst)[: len(worst) - budget]) if budget < len(worst) else 0.0
        saved = reused - budget
        kl = estimates.floor + estimates.slope * (left + unmended) / end
        if kl > request.max_kl or saved < LEAST_SHARE * (end - exact_tokens):
            continue
        if best is None or saved > best[0]:
            best = saved, number + 1, budget
    if best is None:
        return None
    return best[0], _assembled(kept[: best[1]], exact_tokens, best[2], worth, estimates)


def listed_rows(span: Candidate, errors: Floats, worth: float) -> int:
    """Return how many of the first rows of a span are to be recomputed: those of this error, and probes at a seam."""
    bad = int(np.count_nonzero(errors >= worth))
    return bad if span.run or errors[0] <= 0 else max(bad, min(PROBES, span.count - 1))


def _assembled(kept: Sequence[Estimated], exact_tokens: int, budget: int, worth: float, estimates: Estimates) -> Plan:
    """The plan of these spans, of whose rows the `budget` worst of at least this error are recomputed."""
    tokens = kept[-1][0].start + kept[-1][0].count
    listed = np.ones(tokens, np.bool_)
    listed[:exact_tokens] = False
    wanted = np.zeros(tokens)
    for span, error in kept:
        listed[span.start : span.start + span.count] = False
        bad = listed_rows(span, error, worth)
        wanted[span.start : span.start + bad] = error[:bad]
    ranked = np.argsort(-wanted, kind="stable")[:budget]
    listed[ranked[wanted[ranked] > 0]] = True
    spans = reused(kept, exact_tokens, listed, estimates)
    recompute = tuple(int(x) for x in np.flatnonzero(listed))
    return Plan(tokens, spans, recompute, estimates.floor + sum(span.kl for span in spans))


def reused(
    kept: Sequence[Estimated], exact_tokens: int, listed: npt.NDArray[np.bool_], estimates: Estimates
) -> tuple[ReusedSpan, ...]:
    """Return the spans of a cache. listed: bool [tokens], the positions that are recomputed."""
    spans = []
    for x, error in kept:
        left = np.where(listed[x.start : x.start + x.count], 0.0, error)
        share, before = estimates.slope * float(left.sum()) / len(listed), changed(x, exact_tokens)
        made = x.start, x.count, x.run, x.shift, x.donor, x.donor_start
        spans.append(ReusedSpan(*made, float(left.mean()), share, before))
    return tuple(spans)


def sharpened(spans: Sequence[ReusedSpan], positions: Any, errors: Any, estimates: Estimates | None) -> float:
    """Return the bound of a plan's KL, corrected by what was measured at the positions that were recomputed.

    Each seam is corrected by how much worse, or better, its own rows were than estimated; a seam without such rows is
    corrected by the others. Without estimates the measured errors are all there is (`probed`).

    Args:
        spans: those of the plan.
        positions: the recomputed positions, `[p]`.
        errors: float `[p]`, of the donors' rows there, in the measure of `ReusedSpan.error`.
        estimates: those that the plan was made with.
    """
    if estimates is None:
        return probed(spans, positions, errors)
    where, found = np.asarray(positions, np.int64), np.asarray(errors, np.float64)
    seams: list[tuple[float, float, float]] = []  # share of the KL, errors found, errors estimated
    for span in spans:
        inside = (where >= span.start) & (where < span.end) & np.isfinite(found)
        estimated = float(estimates.errors(span.run + where[inside] - span.start, span.changed).sum())
        row = (span.kl, float(found[inside].sum()), estimated)
        if span.run and seams:
            row = tuple(a + b for a, b in zip(seams.pop(), row, strict=True))  # type: ignore[assignment]
        seams.append(row)
    overall = _ratio(sum(x[1] for x in seams), sum(x[2] for x in seams), 1.0)
    return estimates.floor + sum(kl * _ratio(found, estimated, overall) for kl, found, estimated in seams)


def _ratio(found: float, estimated: float, expected: float) -> float:
    """How much worse than estimated, as if `PRIOR` more of errors had been found as expected."""
    return min(SPREAD[1], max(SPREAD[0], (found + PRIOR * expected) / (estimated + PRIOR)))
