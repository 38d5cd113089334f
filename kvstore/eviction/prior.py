"""The policy "prior": the record with the least expected saving goes first, as learnt from past uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvstore.eviction.forest import Leaves
from kvstore.eviction.leaf_first import LeafFirst
from kvstore.eviction.reuse_model import Cohort, Reuse

# Records that left are remembered ("ghosts"), so many for each record held. They must be remembered for as long as
# records still come back: many lifetimes of a small tier.
GHOSTS = 16
FEW_GHOSTS = 1000  # remembered in addition, for a tier with few records
MOST_USES = 6  # counts of uses are grouped by octave up to this one: 32 uses and more are alike
MOST_NEW = 8  # the same for new records in a use: 128 and more are alike


class _Known:
    """What the policy knows of a record, held or not."""

    __slots__ = ("cohort", "saving", "uses")

    def __init__(self, cohort: Cohort) -> None:
        self.cohort, self.saving, self.uses = cohort, 1.0, 0


class PriorGuided(LeafFirst):
    """The leaf record with the least expected saving first: index of reuse x recompute cost / bytes.

    An `EvictionPolicy`; see `LeafFirst` for what one use is. `Reuse` learns when records of one kind come back. Three
    things make a kind:

    - whether the record was the last of its path (the end of a prompt is rarely continued block by block);
    - how often it was used;
    - how many new records its last use brought (none or few: a session that goes on; many: a new one).

    Of each kind the policy compares the leaf used longest ago and the one used last, because the index may rise with
    age before it falls. Records that left are remembered, so that what is learnt does not depend on what was held: at
    most `GHOSTS` for each record held and `FEW_GHOSTS` more.

    Memory: that of `Leaves` with both ends, and 1 + `GHOSTS` remembered records for each record held; about 4 KB a
    record. Naming a victim takes O(kinds + log n); there are at most 2 x 6 x 9 kinds.

    Args:
        saving: recompute cost / bytes of a held record, in any unit; 0 where it is as before. Asked at each use. By
            default all records save the same.

    Example:
        >>> policy = PriorGuided(saving=lambda record: 100.0 if record == 1 else 1.0)
        >>> for path in ([1], [2], [3]):
        ...     policy.touch(path)
        ...     policy.add(path[0])
        >>> policy.touch([4])
        >>> list(policy.victims())[-1]
        1
    """

    def __init__(self, saving: Callable[[int], float] | None = None) -> None:
        super().__init__(Leaves(both_ends=True))
        self._saving = saving
        self._reuse = Reuse()
        self._now = 0
        self._placed = 0
        self._known: dict[int, _Known] = {}
        self._ghosts: OrderedDict[int, _Known] = OrderedDict()
        self._cohorts: dict[int, Cohort] = {}  # of this use, by kind
        self._old = 0  # records at the beginning of the path that were known before this use

    def _begin(self, path: Sequence[int]) -> None:
        known = (i for i, record in enumerate(path) if record not in self._known and record not in self._ghosts)
        self._old = next(known, len(path))
        self._now += len(path)
        self._cohorts = {}
        self._reuse.advance(self._now)

    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        for record in records:
            known = self._known.get(record) or self._ghosts.pop(record, None)
            if known is not None:
                self._reuse.came_back(known.cohort, self._now)
            cohort = self._cohort((known.uses if known else 0) + 1, bool(path) and record == path[-1], len(path))
            if known is None:
                known = _Known(cohort)
            known.cohort, known.uses = cohort, known.uses + 1
            known.saving = (self._saving(record) if self._saving else 0.0) or known.saving
            self._known[record] = known
            self._reuse.join(cohort)
            self._place(record, cohort)

    def _extended(self, records: Sequence[int], path: Sequence[int]) -> None:
        for depth, record in enumerate(path):
            known = self._known.get(record)
            if known is None or known.cohort.time != self._now:
                continue
            self._recount(record, known, depth == len(path) - 1, len(path))

    def _recount(self, record: int, known: _Known, last: bool, length: int) -> None:
        """Count a record of this use as one of another kind than it seemed to be."""
        cohort = self._cohort(known.uses, last, length)
        if cohort is not known.cohort:
            self._reuse.retract(known.cohort)
            self._reuse.join(cohort)
            known.cohort = cohort
            self._place(record, cohort)

    def _place(self, record: int, cohort: Cohort) -> None:
        self._placed += 1
        self._leaves.place(record, cohort.kind, (self._now, self._placed))

    def _cohort(self, uses: int, last: bool, length: int) -> Cohort:
        new = max(0, length - self._old)
        kind = self._reuse.kind(last, min(MOST_USES, uses.bit_length()), min(MOST_NEW, new.bit_length()))
        if kind not in self._cohorts:
            self._cohorts[kind] = self._reuse.cohort(kind, self._now)
        return self._cohorts[kind]

    def _next(self) -> int:
        ends = {end(queue) for queue in self._leaves.queues() for end in (self._leaves.head, self._leaves.tail)}
        ends.discard(0)
        return min(ends, key=lambda record: (self._expected(record), self._leaves.key(record)), default=0)

    def _expected(self, record: int) -> float:
        known = self._known[record]
        return known.saving * self._reuse.index(known.cohort.kind, self._now - known.cohort.time)

    def _used_before(self, record: int, uses: int) -> None:
        known = self._known[record]
        known.uses = uses
        self._recount(record, known, last=False, length=0)

    def _gone(self, record: int, evicted: bool) -> None:
        known = self._known.pop(record)
        if not evicted:
            self._reuse.forget(known.cohort)
            return
        self._ghosts[record] = known
        while len(self._ghosts) > GHOSTS * len(self) + FEW_GHOSTS:
            self._reuse.forget(self._ghosts.popitem(last=False)[1].cohort)
