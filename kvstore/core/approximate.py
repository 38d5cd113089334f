"""What is asked of a cache that is not exact, and what is said of one. Pure: no I/O, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Approximate:
    """The request for a cache that is not exact.

    Attributes:
        max_kl: the largest estimated KL divergence of the next tokens' distributions from those on an exact cache,
            mean, nats a token. Spans that would make it larger are left out; nothing approximate is given if it
            cannot be kept.
        recompute: the largest number of positions to recompute, counting those that no donor has. None: as many as
            pay.

    Raises:
        ValueError: names the field.

    Example:
        >>> Approximate(max_kl=0.05).recompute is None
        True
    """

    max_kl: float = 0.02
    recompute: int | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.max_kl, int | float) and not isinstance(self.max_kl, bool)
        if not number or not 0 < self.max_kl < math.inf:
            raise ValueError(f"max_kl: expected a number above 0, found {self.max_kl!r}")
        if self.recompute is None:
            return
        if not isinstance(self.recompute, int) or isinstance(self.recompute, bool) or self.recompute < 0:
            raise ValueError(f"recompute: expected None or a whole number from 0, found {self.recompute!r}")


@dataclass(frozen=True)
class Candidate:
    """A stored block that has the tokens [start, start + count): its rows from `donor_start` on.

    Attributes:
        run: tokens of the same chain of donors that matched directly before; 0 at a seam.
        shift: position here less position there.
        donor: number of the record.
    """

    start: int
    count: int
    run: int
    shift: int
    donor: int
    donor_start: int


@dataclass(frozen=True)
class ReusedSpan(Candidate):
    """Positions [start, start + count) of a cache, which were taken from the rows of a donor.

    Attributes:
        run: tokens of the same chain of donors that matched directly before; 0 at a seam.
        shift: position here less position there.
        donor: number of the donor's record.
        donor_start: its first row that was taken.
        error: estimated relative error of the rows that are left after the recomputation, mean over all of the span's.
        kl: the span's share of the estimated KL divergence, nats a token.
        changed: tokens of context that differ before the seam.

    Example:
        >>> ReusedSpan(start=64, count=32, run=0, shift=16, donor=7, donor_start=0, error=0.05, kl=0.001).end
        96
    """

    error: float
    kl: float
    changed: int = 0

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.count
