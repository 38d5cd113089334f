"""Keeps the history of a store that is open for writing: a sample a minute, while it is used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.history import COUNTED, SIZES, TIMED, Sample, added, pack, unpack
from kvstore.metrics import Metric
from kvstore.residency.residency import Residency
from kvstore.tiers.disk.environment import CatalogError
from kvstore.timing import Histogram, Timing

INTERVAL_S = 60.0


class Recorder:
    """Takes a sample when one is due, and writes it to the catalog.

    Thread-safe: `_lock` guards `_before`; one thread calls `tick`.

    An interval in which nobody got or put anything leaves no sample, and costs no write.

    Args:
        residency: whose sizes and counters; a store without a disk keeps no history.
        interval_s: seconds that a sample covers.
        clock, passed: give the time in unix seconds, and seconds that only grow.
    """

    def __init__(
        self,
        residency: Residency,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.time,
        passed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._residency = residency
        self._interval_s = interval_s
        self._clock, self._passed = clock, passed
        self._lock = threading.Lock()
        self._before = self._look()  # when the last sample was taken
        self._due = self._before.passed + interval_s

    def tick(self) -> None:
        """Write a sample if an interval is over. A catalog that fails is counted; the sample comes with the next one
        then."""
        disk = self._residency.disk
        if disk is None or self._passed() < self._due:
            return
        now = self._look()
        self._due = now.passed + self._interval_s
        try:
            sample = self._sample(now)
            if sample is not None:
                disk.save_history(pack(added(self._saved(), sample)))
        except CatalogError as error:
            self._residency.metrics.add(Metric.CATALOG_ERRORS, because=error)
            return
        with self._lock:
            self._before = now

    def last(self) -> bytes | None:
        """Return the whole history with what was not written yet, for the commit of a close; None if nothing is new.

        Raises:
            CatalogError: the catalog cannot be read.
        """
        sample = self._sample(self._look())
        return None if sample is None else pack(added(self._saved(), sample))

    def history(self) -> tuple[Sample, ...]:
        """Return all samples, the one that is under way last. Raises `CatalogError`."""
        sample = self._sample(self._look())
        return self._saved() if sample is None else added(self._saved(), sample)

    def _saved(self) -> tuple[Sample, ...]:
        return unpack(self._residency.disk.catalog.history()) if self._residency.disk is not None else ()

    def _look(self) -> _Look:
        metrics = self._residency.metrics
        timed = metrics.timings.snapshot()
        counted = {metric: int(metrics[metric]) for metric in COUNTED}
        return _Look(self._clock(), self._passed(), counted, {each: timed[each] for each in TIMED})

    def _sample(self, now: _Look) -> Sample | None:
        """What happened since the last sample; None if nobody got or put anything."""
        with self._lock:
            before = self._before
        timings = {each: now.timed[each] - before.timed[each] for each in TIMED}
        if not any(found.total for found in timings.values()):
            return None
        counts = {metric: now.counted[metric] - before.counted[metric] for metric in COUNTED}
        residency, disk = self._residency, self._residency.disk
        on_disk = (disk.nbytes, disk.budget) if disk is not None else (0, 0)
        sizes = dict(zip(SIZES, (residency.device.nbytes, residency.host.nbytes, *on_disk), strict=True))
        end = max(before.clock, now.clock)  # a clock that was set back makes no sample that ends before it begins
        return Sample(before.clock, end, now.passed - before.passed, counts, sizes, timings)


@dataclass(frozen=True)
class _Look:
    """Counters and histograms at one moment.

    Attributes:
        clock: unix seconds.
        passed: seconds that only grow.
        counted, timed: what had been counted by then.
    """

    clock: float
    passed: float
    counted: dict[Metric, int]
    timed: dict[Timing, Histogram]
