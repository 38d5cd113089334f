"""What is asked of a cache that is not exact, and what is said of one. Pure: no I/O, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import KVLayout

Floats = npt.NDArray[np.float64]
Part = TypeVar("Part")


def content_of(layout: KVLayout, keys: Part, values: Part) -> Part:
    """Return of a layer's (K, V) what errors of rows are measured of, since it is what attention passes on.

    V; of layers with latents K, which is the latent: their V is a rotated key.

    Example:
        >>> content_of(KVLayout.uniform(num_layers=1, heads=2, head_dim=16), "K", "V")
        'V'
    """
    return keys if layout.is_latent else values


@dataclass(frozen=True)
class Approximate:
    """The request for a cache that is not exact.

    Attributes:
        max_kl: the largest KL divergence of the next tokens' distributions from those on an exact cache, mean, nats a
            token: an upper bound, which 95 of 100 measured cases keep. Spans that would make it larger are left out;
            nothing approximate is given if it cannot be kept.
        recompute: the largest number of positions to recompute, counting those that no donor has. None: as many as
            pay.
        probe: what to do if the store's profile has no section "approximate". False: nothing approximate is given.
            True: what donors hold is given with `Hit.kl` infinite; `integrations.transformers.recompute` probes it,
            and it must not be used unless `Deviation.kl` is then at most `max_kl`.

    Raises:
        ValueError: names the field.

    Example:
        >>> Approximate(max_kl=0.05).recompute is None
        True
    """

    max_kl: float = 0.02
    recompute: int | None = None
    probe: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.max_kl, int | float) and not isinstance(self.max_kl, bool)
        if not number or not 0 < self.max_kl < math.inf:
            raise ValueError(f"max_kl: expected a number above 0, found {self.max_kl!r}")
        if self.recompute is None:
            return
        if not isinstance(self.recompute, int) or isinstance(self.recompute, bool) or self.recompute < 0:
            raise ValueError(f"recompute: expected None or a whole number from 0, found {self.recompute!r}")


@dataclass(frozen=True)
class Estimates:
    """What reuse costs on one model, as calibration found it: a formula's constants.

    error(d) = seam_error * (h / (h + d)) ** fall,    h = reach * u / (reach + u)

    d: tokens since the seam. u: tokens before the seam that differ, in the longer of both contexts. The error is of the
    content (`content_of`), |change|^2 / |content|^2, mean over the layers; it is what is to be expected. The KL, nats a
    token, is an upper bound: floor + slope * sum of the errors left in the cache / its tokens.

    Example:
        >>> errors = Estimates(0.4, 45.0, 1.45, 0.002, 0.8).errors([0, 100], changed=1000)
        >>> bool(errors[0] > errors[1])
        True
    """

    seam_error: float
    reach: float
    fall: float
    floor: float
    slope: float

    def errors(self, distance: Any, changed: int) -> Floats:
        """Return the expected relative errors of donors' rows; distance: a number or an array."""
        reach = self.reach * changed / (self.reach + changed)
        if reach <= 0:
            return np.zeros(np.shape(distance))
        return np.asarray(self.seam_error * (reach / (reach + np.asarray(distance, np.float64))) ** self.fall)


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
        kl: the span's share of the bound of the KL divergence, nats a token.
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
