"""How long calls and their parts took, as histograms; what `exporter` shows.

Costs a microsecond an observation, so it is always on.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum

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

    GET = "get", "seconds that gets took"
    PUT = "put", "seconds until puts returned"
    READ = "read", "seconds that reads of neighbouring records from a disk took"
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


class Timings:
    """Histograms by `Timing`. Thread-safe: `_lock` guards all fields.

    Example:
        >>> timings = Timings()
        >>> timings.observe(Timing.GET, 0.003)
        >>> sum(timings.snapshot()[Timing.GET].counts), timings.snapshot()[Timing.GET].seconds
        (1, 0.003)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {timing: [0] * (len(BUCKETS) + 1) for timing in Timing}
        self._seconds = dict.fromkeys(Timing, 0.0)

    def observe(self, timing: Timing, seconds: float) -> None:
        """Count one that took so long."""
        bucket = bisect_left(BUCKETS, seconds)
        with self._lock:
            self._counts[timing][bucket] += 1
            self._seconds[timing] += seconds

    def snapshot(self) -> dict[Timing, Histogram]:
        """Return a copy of all histograms."""
        with self._lock:
            return {timing: Histogram(tuple(self._counts[timing]), self._seconds[timing]) for timing in Timing}
