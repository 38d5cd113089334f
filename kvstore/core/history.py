"""The history of a store: what it was asked for and how long that took, sample by sample, in a bounded number of bytes.

A sample covers about a minute at first. When there are too many, neighbours among the older ones become one, so the
history reaches back as far as the store does, and is the coarser the older it is. Pure: values and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import numpy.typing as npt

from kvstore.metrics import Metric
from kvstore.timing import BUCKETS, Histogram, Timing

MOST_SAMPLES = 96
COUNTED = (
    Metric.GET_HITS,
    Metric.GET_MISSES,
    Metric.GET_TOKENS,
    Metric.GET_HIT_TOKENS_DEVICE,
    Metric.GET_HIT_TOKENS_QUEUE,
    Metric.GET_HIT_TOKENS_HOST,
    Metric.GET_HIT_TOKENS_DISK,
    Metric.GET_HIT_TOKENS_DONORS,
    Metric.GET_HIT_TOKENS_OTHER,
    Metric.PUT_TOKENS,
    Metric.PUT_NEW_TOKENS,
    Metric.DISK_EVICTED_RECORDS,
    Metric.DISK_WRITTEN_BYTES,
    Metric.QUARANTINED_RECORDS,
    Metric.GET_SAVED_S,
)
"""Counters of which a sample has what they grew by. The order is that of the bytes; more may only be appended."""
SIZES = ("device_bytes", "host_bytes", "disk_bytes", "disk_budget")
"""What a sample has as it was at its end."""
TIMED = (Timing.GET, Timing.PUT)

_MOST = float(1 << 53)  # a number above it is not one that a store has counted
_BINS = len(BUCKETS) + 1
_ROW = np.dtype(
    [
        ("times", "<f8", (3,)),
        ("counts", "<u8", (len(COUNTED),)),
        ("sizes", "<u8", (len(SIZES),)),
        ("bins", "<u4", (len(TIMED), _BINS)),
        ("seconds", "<f8", (len(TIMED),)),
    ]
)
_NONE = Histogram((0,) * _BINS, 0.0)


@dataclass(frozen=True)
class Sample:
    """What happened in a store between two moments. Immutable.

    Attributes:
        begin, end: unix seconds.
        seconds: how long the store was open between them.
        counts: what counters grew by, for those of `COUNTED` that did.
        sizes: bytes at the end, by the names in `SIZES`.
        timings: how long gets and puts took.

    Example:
        >>> sample = Sample(100.0, 160.0, 60.0, {Metric.GET_TOKENS: 100, Metric.GET_HIT_TOKENS_DISK: 25})
        >>> sample.hit_rate, (sample + sample).counts[Metric.GET_TOKENS]
        (0.25, 200)
    """

    begin: float
    end: float
    seconds: float
    counts: dict[Metric, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    timings: dict[Timing, Histogram] = field(default_factory=dict)

    @property
    def hit_tokens(self) -> int:
        """Tokens that gets returned."""
        return sum(count for metric, count in self.counts.items() if metric.startswith("get_hit_tokens_"))

    @property
    def hit_rate(self) -> float | None:
        """Share of the tokens asked for that were returned; None if none were asked for."""
        asked = self.counts.get(Metric.GET_TOKENS, 0)
        return self.hit_tokens / asked if asked else None

    def __add__(self, later: Sample) -> Sample:
        """Both as one."""
        return Sample(
            min(self.begin, later.begin),
            max(self.end, later.end),
            self.seconds + later.seconds,
            {metric: self.counts.get(metric, 0) + later.counts.get(metric, 0) for metric in COUNTED},
            later.sizes,
            {each: self.timings.get(each, _NONE) + later.timings.get(each, _NONE) for each in TIMED},
        )


def added(samples: Sequence[Sample], last: Sample) -> tuple[Sample, ...]:
    """Return the history with one sample more, and no more than `MOST_SAMPLES`."""
    kept = (*samples, last)
    if len(kept) <= MOST_SAMPLES:
        return kept
    half = MOST_SAMPLES // 2
    pairs = [reduce(Sample.__add__, kept[i : i + 2]) for i in range(0, half, 2)]
    return (*pairs, *kept[half:])


def pack(samples: Sequence[Sample]) -> bytes:
    """Return the bytes for the catalog (FORMAT.md, "History")."""
    rows = np.zeros(len(samples), _ROW)
    for row, sample in zip(rows, samples, strict=True):
        timings = [sample.timings.get(each, _NONE) for each in TIMED]
        row["times"] = sample.begin, sample.end, sample.seconds
        row["counts"] = [sample.counts.get(metric, 0) for metric in COUNTED]
        row["sizes"] = [sample.sizes.get(name, 0) for name in SIZES]
        row["bins"] = [np.minimum(found.counts, 0xFFFFFFFF) for found in timings]
        row["seconds"] = [found.seconds for found in timings]
    return rows.tobytes()


def unpack(data: bytes) -> tuple[Sample, ...]:
    """Read what `pack` wrote, the oldest sample first. Returns () for any other bytes; never raises."""
    if not is_history_sized(len(data)):
        return ()
    rows = np.frombuffer(data, _ROW)
    times, seconds = rows["times"], rows["seconds"]
    numbers = (times, seconds, rows["counts"], rows["sizes"])
    if not all(((part >= 0) & (part <= _MOST)).all() for part in numbers) or (times[:, 0] > times[:, 1]).any():
        return ()
    return tuple(_sample(row) for row in rows)


def is_history_sized(nbytes: int) -> bool:
    """Return whether so many bytes can be a history."""
    return nbytes % _ROW.itemsize == 0 and 0 <= nbytes // _ROW.itemsize <= MOST_SAMPLES


def _sample(row: npt.NDArray[np.void]) -> Sample:
    begin, end, seconds = row["times"].tolist()
    counts = dict(zip(COUNTED, row["counts"].tolist(), strict=True))
    sizes = dict(zip(SIZES, row["sizes"].tolist(), strict=True))
    found = zip(TIMED, row["bins"].tolist(), row["seconds"].tolist(), strict=True)
    return Sample(
        begin, end, seconds, counts, sizes, {each: Histogram(tuple(bins), took) for each, bins, took in found}
    )
