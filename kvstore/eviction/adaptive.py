"""The policy "adaptive": goes by whichever of several orders would have saved most lately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from kvstore.eviction.arc import LeafFirstARC
from kvstore.eviction.leaf_first import LeafFirst
from kvstore.eviction.prior import PriorGuided
from kvstore.eviction.s3fifo import LeafFirstS3FIFO

Saving = Callable[[int], float]
EXPERTS: Mapping[str, Callable[[Saving | None], LeafFirst]] = MappingProxyType(
    {"prior": PriorGuided, "arc": lambda _: LeafFirstARC(), "s3fifo": lambda _: LeafFirstS3FIFO()}
)
"""The orders to choose from; the first one is followed at first."""

MEMORY = 8  # what was saved counts half after so many used records for each that is held,
LEAST_MEMORY = 1024  # and not before so many
STEPS = 16  # in so many steps
MARGIN = 0.02  # another order is followed when it saved more than this share more,
LEAST_MARGIN = 16.0  # and so many records


class _Shadow:
    """What a tier of the same size would hold if it went by one order alone.

    Attributes:
        order: over the records that are held there.
        held: these records.
        saved: what their uses saved, the old ones worth less.
    """

    def __init__(self, order: LeafFirst) -> None:
        self.order = order
        self.held: set[int] = set()
        self.saved = 0.0


class Adaptive(LeafFirst):
    """What the best of several orders would give up: expected saving ("prior"), ARC or S3-FIFO.

    An `EvictionPolicy`; see `LeafFirst` for what one use is. Each order has a shadow: the records that a tier with as
    many records would hold if it went by that order alone. A used record that stands in a shadow was saved there. The
    order whose shadow saved most lately is followed: first goes what its shadow does not hold, then what the order
    names. So what is held becomes what that order alone would hold, as records are used; a change of the order moves
    nothing by itself, and costs what the two would hold different.

    A use takes O(orders x log n), amortised. Memory: that of each order; about 6 KB a record.

    Args:
        saving: as in `PriorGuided`, about 1 in the mean.
        experts: names of the orders.

    Example:
        >>> policy = Adaptive()
        >>> for record in (1, 2, 3):
        ...     policy.touch([record])
        ...     policy.add(record)
        >>> policy.touch([1])
        >>> next(policy.victims())
        2
    """

    def __init__(self, saving: Saving | None = None, experts: Iterable[str] = tuple(EXPERTS)) -> None:
        super().__init__()
        self._saving = saving
        self._shadows = [_Shadow(EXPERTS[name](saving)) for name in experts]
        self._leader = self._shadows[0]
        self._most = 0  # records in a shadow; 0: nothing had to go so far
        self._now = 0
        self._aged = 0
        self._term = 0  # which leader this is, counted
        self._told = 0, 1  # of the record that is being added: the one before it, and its uses

    def add(self, record_id: int, parent: int = 0, nbytes: int = 0, uses: int = 1) -> None:
        """Hold a record; see `LeafFirst.add`."""
        self._told = parent, uses
        super().add(record_id, parent, nbytes, uses)
        self._told = 0, 1

    def touch(self, path: Iterable[int]) -> None:
        """Count a use of one prefix; see `LeafFirst.touch`."""
        records = [record for record in path if record > 0]
        for shadow in self._shadows:
            shadow.order.touch(records)
        super().touch(records)

    def victims(self) -> Iterator[int]:
        """Name all held records, the first to give up first; the prefix in use comes last, its end before its root."""
        self._leaves.restore()
        self._most = len(self)
        self._elect()
        order = self._leader.order.victims()
        while record := self._next() or self._named_by(order):
            self._leaves.give(record)
            yield record
        yield from self._leaves.rest(self._path)

    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        if self._most:
            self._most = max(self._most, len(self))
        for record in records:
            self._now += 1
            worth = (self._saving(record) if self._saving else 0.0) or 1.0
            for shadow in self._shadows:
                if record in shadow.held:
                    shadow.saved += worth
                    shadow.order.add(record)
                else:
                    self._take_in(shadow, record)
        for record in records:
            self._leaves.place(record, (record not in self._leader.held, self._term), (self._now, 0))
        self._age()

    def _take_in(self, shadow: _Shadow, record: int) -> None:
        """The shadow's tier takes in a record, if anything but the prefix in use can go for it."""
        while self._most and len(shadow.held) >= self._most:
            victim = next(shadow.order.victims())
            if victim in self._parents:
                return
            shadow.order.discard(victim)
            shadow.held.discard(victim)
            if shadow is self._leader and victim in self._leaves:
                self._leaves.place(victim, (True, self._term), self._leaves.key(victim))
        parent, uses = self._told
        shadow.held.add(record)
        shadow.order.add(record, self._parents.get(record, parent), uses=uses)

    def _age(self) -> None:
        if self._now - self._aged >= max(LEAST_MEMORY, MEMORY * self._most) / STEPS:
            self._aged = self._now
            for shadow in self._shadows:
                shadow.saved *= 0.5 ** (1 / STEPS)

    def _elect(self) -> None:
        best = max(self._shadows, key=lambda shadow: shadow.saved)
        if best.saved > self._leader.saved * (1 + MARGIN) + LEAST_MARGIN:
            self._leader = best
            self._term += 1

    def _next(self) -> int:
        """The head of what the leader does not hold. Queues are (whether that is so, under which leader), and those of
        earlier leaders are sorted anew from their heads on."""
        stays = (False, self._term)
        for queue in self._leaves.queues():
            while queue != stays and (record := self._leaves.head(queue)):
                if record not in self._leader.held:
                    return record
                self._leaves.place(record, stays, self._leaves.key(record))
        return 0

    def _named_by(self, order: Iterator[int]) -> int:
        named = next((record for record in order if self._leaves.is_head(record)), 0)
        return named or next(filter(None, map(self._leaves.head, self._leaves.queues())), 0)

    def _gone(self, record: int, evicted: bool) -> None:
        for shadow in self._shadows if not evicted else ():
            if record in shadow.held:
                shadow.held.discard(record)
                shadow.order.discard(record)
