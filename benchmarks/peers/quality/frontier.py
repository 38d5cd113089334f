"""At how many bits does predictive coding lose as little as a peer?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Curve = Sequence[tuple[float, float]]
"""(bits a value, what is lost) of the rungs of a ladder."""


def bits_at(curve: Curve, loss: float) -> float | None:
    """The fewest bits at which no more than `loss` is lost; None where no rung loses so little.

    Between rungs logarithms are interpolated; below the lowest rung nothing is promised, so that its bits are given.
    A rung counts only if every one with more bits loses as little, too: a lucky one does not.
    """
    points = sorted(curve)
    bits = np.log([x for x, _ in points])
    lost = np.log(np.maximum.accumulate([max(y, 1e-12) for _, y in points][::-1])[::-1])
    if np.log(loss) < lost[-1]:
        return None
    return float(np.exp(np.interp(-np.log(loss), -lost, bits)))


def frontier(
    curves: Mapping[str, Curve], peers: Mapping[str, Mapping[str, float]], wanted: Mapping[str, tuple[str, float]]
) -> dict[str, tuple[float | None, str]]:
    """Per case of `wanted`, {case: (peer, share of its losses)}: (bits, peer), where every loss is at most that share.

    curves: {metric: curve}; peers: {peer: {metric: loss}}. Cases whose peer was not measured are left out.
    """
    found: dict[str, tuple[float | None, str]] = {}
    for case, (peer, share) in wanted.items():
        if peer in peers:
            needed = [bits_at(curve, share * peers[peer][metric]) for metric, curve in curves.items()]
            found[case] = (None if None in needed else max(x for x in needed if x is not None), peer)
    return found
