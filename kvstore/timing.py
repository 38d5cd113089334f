"""How long calls and their parts took, as histograms; what `exporter` shows.

An observation costs about a microsecond (`python -m benchmarks.metrics`), so they are always on.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds; what takes longer is in one more bucket."""


class Timing(StrEnum):
    """The name of a histogram. `meaning` says what is timed.

    Example:
        >>> Timing.GET.value, Timing.GET.meaning
        ('get', 'seconds that gets took')
    """

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Timing:
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning = meaning
        return member

    __hash__ = str.__hash__  # that of enumerations is a call into Python, at each look-up

    GET = "get", "seconds that gets took"
    PUT = "put", "seconds until puts returned"
    READ = "read", "seconds that gets waited for reads of neighbouring records from a disk"
    DECODE = "decode", "seconds that decoding a block took"


@dataclass(frozen=True)
class Histogram:
    """How often something took how long.

    Attributes:
        counts: observations in each bucket of `BUCKETS`, and in one more for the rest.
        seconds: of all observations.

    Example:
        >>> one = Histogram((0, 0, 4) + (0,) * 14, seconds=0.0016)
        >>> one.total, one.quantile(0.5), (one + one).total, (one - one).total
        (4, 0.000375, 8, 0)
    """

    counts: tuple[int, ...]
    seconds: float

    def __add__(self, other: Histogram) -> Histogram:
        """Both together."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Histogram(counts, self.seconds + other.seconds)

    def __sub__(self, before: Histogram) -> Histogram:
        """What was observed since `before`, an earlier copy of the same histogram."""
        counts = tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        return Histogram(counts, max(0.0, self.seconds - before.seconds))

    @property
    def total(self) -> int:
        """How many observations there are."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Return the seconds that this share of the observations took at most; None without any.

        Inside a bucket observations are taken to lie evenly, as Prometheus does it; what is above the last bound
        counts as that bound.
        """
        wanted, below, low = share * self.total, 0, 0.0
        for bound, count in zip(BUCKETS, self.counts, strict=False):
            if count and below + count >= wanted:
                return low + (bound - low) * (wanted - below) / count
            below, low = below + count, bound
        return BUCKETS[-1] if self.total else None


class Where(NamedTuple):
    """What a histogram is told apart by. Immutable.

    Attributes:
        tier: where the blocks came from; of a get the farthest of its tiers; "none" of a get that returned nothing.
        codec: of the blocks; "tensors" for those that are not coded, "mixed" for several.

    Example:
        >>> Where("disk", "entropy").codec
        'entropy'
    """

    tier: str
    codec: str


NOWHERE = Where("none", "none")


class Timings:
    """Histograms by `Timing`, and by what they are told apart by. Thread-safe: `_lock` guards all fields.

    Example:
        >>> timings = Timings()
        >>> timings.observe(Timing.GET, 0.003, Where("disk", "entropy"))
        >>> sum(timings.snapshot()[Timing.GET].counts), timings.snapshot()[Timing.GET].seconds
        (1, 0.003)
        >>> [where.tier for where in timings.by_place(Timing.GET)]
        ['disk']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[Timing, Where], list[float]] = {}  # counts of the buckets, then the seconds

    def observe(self, timing: Timing, seconds: float, where: Where = NOWHERE) -> None:
        """Count one that took so long."""
        bucket = bisect_left(BUCKETS, seconds)
        with self._lock:
            row = self._found.get((timing, where))
            if row is None:
                row = self._found[timing, where] = [0] * (len(BUCKETS) + 1) + [0.0]
            row[bucket] += 1
            row[-1] += seconds

    def by_place(self, timing: Timing) -> dict[Where, Histogram]:
        """Return copies of the histograms of a timing; those that have something."""
        with self._lock:
            rows = {where: list(row) for (each, where), row in self._found.items() if each is timing}
        return {where: _histogram(row) for where, row in rows.items()}

    def snapshot(self) -> dict[Timing, Histogram]:
        """Return a histogram for each timing, of all places together."""
        return {timing: sum(self.by_place(timing).values(), _NOTHING) for timing in Timing}


def _histogram(row: list[float]) -> Histogram:
    return Histogram(tuple(int(count) for count in row[:-1]), row[-1])


_NOTHING = Histogram((0,) * (len(BUCKETS) + 1), 0.0)
