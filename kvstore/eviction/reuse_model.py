"""Learns from past uses when records of a kind come back. Time is counted in touched records."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable

import numpy as np

AGES = 32  # steps of age, half an octave each: from 16 to 740,000 touched records
BOUNDS = [0, *(int(16 * 2 ** (i / 2)) for i in range(AGES))]
# With so many records of its own, a kind trusts them as much as the kind above it. Records come and go in paths of some
# tens, so these are some tens of independent events.
MIXTURE = 512.0
AT_FIRST = 0.1  # the chance in a step before anything is known: equal for each step, so the oldest goes first
REFRESH = 1024  # the indices are computed anew after so many touched records
HALVE = 1 << 18  # counts are halved after so many touched records: several lifetimes of a large tier


class Cohort:
    """The records of one kind that were last used together.

    Attributes:
        kind: the number that `Reuse.kind` gave.
        time: when they were used, in touched records.
        alive: how many of them are still known and have not come back.

    Example:
        >>> Cohort(kind=0, time=640).alive
        0
    """

    __slots__ = ("alive", "kind", "time")

    def __init__(self, kind: int, time: int) -> None:
        self.kind, self.time, self.alive = kind, time, 0


class Reuse:
    """The chance that a record is used again, by kind and age, and what it is worth to wait for it. Not thread-safe.

    For each kind and step of age it counts the records that reached the step without having come back, and those that
    came back in it. The chance of a step is the Dirichlet mixture (came + a * prior) / (reached + a). Its prior is the
    chance of the kind one name more general.

    The index of a record compares all times at which one could give up waiting for it. It is the greatest ratio of the
    chance that the record comes back before that time to the expected time that it is held (Gittins' index; hit density
    in LHD, NSDI 2018). Memory: at most two cohorts for each record counted, and two numbers for each kind and step.

    Example:
        Records of one kind come back after 50 touched records, those of the other never:

        >>> reuse = Reuse()
        >>> good, bad = reuse.kind("good"), reuse.kind("bad")
        >>> for now in range(0, 20000, 100):
        ...     reuse.advance(now)
        ...     for kind in (good, bad):
        ...         cohort = reuse.cohort(kind, now)
        ...         for _ in range(10):
        ...             reuse.join(cohort)
        ...             if kind == good:
        ...                 reuse.came_back(cohort, now + 50)
        >>> reuse.index(good, age=0) > reuse.index(bad, age=0)
        True
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[Hashable, ...], int] = {}
        self._above: list[int] = []
        self._reached = np.zeros((0, AGES + 1))
        self._came = np.zeros((0, AGES + 1))
        self._waiting: list[deque[Cohort]] = [deque() for _ in range(AGES)]
        self._cohorts = 0
        self._alive = 0
        self._index: list[list[float]] = []
        self._refreshed = 0
        self._halved = 0

    def kind(self, *names: Hashable) -> int:
        """Return the number of a kind; a new kind gets the next one.

        Args:
            names: what makes the kind, from the general to the special.
        """
        found = self._kinds.get(names)
        if found is None:
            above = self.kind(*names[:-1]) if names else 0
            found = self._kinds[names] = len(self._above)
            self._above.append(above)
            row = np.zeros((1, AGES + 1))
            self._reached, self._came = np.vstack([self._reached, row]), np.vstack([self._came, row])
            self._refresh()
        return found

    def cohort(self, kind: int, now: int) -> Cohort:
        """Return a new cohort without records.

        Args:
            kind: of its records.
            now: the time of their use.
        """
        made = Cohort(kind, now)
        self._waiting[0].append(made)
        self._cohorts += 1
        if self._cohorts > 2 * self._alive + 64:
            self._waiting = [deque(c for c in queue if c.alive or c.time == now) for queue in self._waiting]
            self._cohorts = sum(map(len, self._waiting))
        return made

    def join(self, cohort: Cohort) -> None:
        """Count a used record in a cohort of this moment."""
        self._alive += 1
        cohort.alive += 1
        self._reached[cohort.kind, 0] += 1

    def retract(self, cohort: Cohort) -> None:
        """Undo `join` for one record, at the same moment."""
        self.forget(cohort)
        self._reached[cohort.kind, 0] -= 1

    def came_back(self, cohort: Cohort, now: int) -> None:
        """Count that a record of the cohort is used again."""
        self.forget(cohort)
        self._came[cohort.kind, _step(now - cohort.time)] += 1

    def forget(self, cohort: Cohort) -> None:
        """Drop a record of the cohort: nobody will see whether it comes back."""
        self._alive -= 1
        cohort.alive -= 1

    def advance(self, now: int) -> None:
        """Move time on to `now`. Amortised: each cohort passes each bound of age once."""
        for step, queue in enumerate(self._waiting, 1):
            latest = now - BOUNDS[step]
            while queue and queue[0].time <= latest:
                cohort = queue.popleft()
                self._reached[cohort.kind, step] += cohort.alive
                if cohort.alive and step < AGES:
                    self._waiting[step].append(cohort)
                else:
                    self._cohorts -= 1
        if now >= self._halved + HALVE:
            self._halved = now
            self._reached *= 0.5
            self._came *= 0.5
        if now >= self._refreshed + REFRESH:
            self._refreshed = now
            self._refresh()

    def index(self, kind: int, age: int) -> float:
        """Return the expected uses of a record for each unit of time that it is held.

        Args:
            kind: of the record.
            age: touched records since its last use.
        """
        return self._index[kind][_step(age)]

    def _refresh(self) -> None:
        kinds = len(self._above)
        reached, came = self._reached.copy(), self._came.copy()
        for kind in range(kinds - 1, 0, -1):
            reached[self._above[kind]] += reached[kind]
            came[self._above[kind]] += came[kind]
        chance = np.full((kinds, AGES + 1), AT_FIRST)
        for kind in range(kinds):
            prior = chance[self._above[kind]]
            chance[kind] = np.clip((came[kind] + MIXTURE * prior) / (reached[kind] + MIXTURE), 0, 0.999)
        width = np.diff([*BOUNDS, 2 * BOUNDS[-1]])
        index = np.zeros((kinds, AGES + 1))
        for step in range(AGES + 1):
            ahead = chance[:, step:]
            left = np.cumprod(1 - ahead, axis=1)
            still = np.hstack([np.ones((kinds, 1)), left[:, :-1]])
            held = np.cumsum(still * width[step:] * (1 - ahead / 2), axis=1)
            index[:, step] = ((1 - left) / held).max(axis=1)
        self._index = index.tolist()


def _step(age: int) -> int:
    return bisect_right(BOUNDS, age) - 1
