"""Holds the rate of the lossy mode: finds the steps at which a block takes so many bits a value.

The ladder of a profile says what steps take on average, of the beginnings of its windows. Later in a long sequence the
same steps take a fifth more, and blocks of one sequence differ by as much. So a few rows of each block, evenly spread,
are encoded first, at the steps of the ladder; rows do not depend on each other. What they take says by how much the
steps of the block are to be larger or smaller. Nothing is remembered from block to block: the same block has the same
bytes always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.lossy_reference import HEADER

ROWS = 8  # of a block are looked at: the encoder's loops take so many at once
_STREAM = 64  # bytes of a stream of rANS beyond what its symbols take
_PARTS = 64  # of an octave of rate: rounded so that no processor's logarithm decides
_MOST = 3 * _PARTS  # the ladder says little of blocks that are further from the others


@dataclass(frozen=True)
class Rate:
    """Bits a value that blocks are to take. Immutable.

    Attributes:
        bits: of what is coded with loss, without the rows that are kept as they are.
        ladder: of the model, with at least two rungs.
    """

    bits: float
    ladder: npt.NDArray[np.float32]

    @property
    def steps(self) -> Steps:
        """What blocks take on average at the beginning of a window."""
        return self._steps(0)

    def steps_for(self, sample_bytes: int, layers: int, values: int, of: int) -> Steps:
        """Return the steps for a block.

        Args:
            sample_bytes: what a sample of its rows takes at `steps`.
            layers: of the block.
            values: in the sample.
            of: in the block.
        """
        beside = HEADER.size + layers + _STREAM  # the same for any number of rows
        found = max(sample_bytes - beside, 1) / values + beside / of
        off = round(_PARTS * math.log2(8 * found / self.bits))
        return self.steps if not off else self._steps(-max(-_MOST, min(off, _MOST)))

    def _steps(self, off: int) -> Steps:
        """At a rate that is so many parts of an octave above."""
        rates = np.log2(np.minimum.accumulate(self.ladder[:, 2].astype(np.float64)))[::-1]
        sizes = np.log2(self.ladder[::-1, :2].astype(np.float64))
        wanted = math.log2(self.bits) + off / _PARTS
        k, v = (2.0 ** _on_line(wanted, rates, sizes[:, which]) for which in (0, 1))
        return Steps.of(k, v)


def _on_line(x: float, xs: npt.NDArray[np.float64], ys: npt.NDArray[np.float64]) -> float:
    """Between points by straight lines; beyond them, by the line through the first and the last. xs: rising."""
    inside = float(np.interp(x, xs, ys))
    slope = float(ys[-1] - ys[0]) / max(float(xs[-1] - xs[0]), 1e-6)
    beyond = x - min(max(x, float(xs[0])), float(xs[-1]))
    return inside + slope * beyond
