"""Published eviction policies that the store does not have, each for prefixes: only leaf records leave.

They are `EvictionPolicy`s as those of `kvstore.eviction`: one use of a prefix counts each record once, and of the
records that a use brings the deepest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.eviction.leaf_first import LeafFirst


class SIEVE(LeafFirst):
    """SIEVE (Zhang et al., NSDI 2024): one queue in order of arrival, and a hand that spares what was used."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0
        self._round = 0
        self._visited: dict[int, bool] = {}

    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        for record in reversed(records):
            if record in self._leaves:
                self._visited[record] = True
            else:
                self._clock += 1
                self._visited[record] = False
                self._leaves.place(record, "", (self._round, self._clock))

    def _next(self) -> int:
        while record := self._leaves.head(""):
            turn, at = self._leaves.key(record)
            self._round = max(self._round, int(turn))
            if not self._visited[record]:
                return record
            self._visited[record] = False
            self._leaves.place(record, "", (turn + 1, at))
        return 0

    def _gone(self, record: int, evicted: bool) -> None:
        del self._visited[record]


class WTinyLFU(LeafFirst):
    """W-TinyLFU (Einziger et al., TOS 2017): a window of 1 %, then a segmented LRU that takes in what was used more
    often than what it would give up. Counts are exact, and halved after ten times as many uses as there are records."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0
        self._counts: dict[int, int] = {}
        self._counted_uses = 0
        self._is_full = False
        self._window: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        for record in reversed(records):
            self._clock += 1
            self._counts[record] = self._counts.get(record, 0) + 1
            self._counted_uses += 1
            if record not in self._leaves or record in self._window:
                queue, order = "window", self._window
            else:
                queue, order = "protected", self._protected
            order[record] = None
            order.move_to_end(record)
            self._leaves.place(record, queue, (self._clock, 0))
        while not self._is_full and len(self._window) > max(1, 0.01 * len(self)):
            self._on_probation(self._window.popitem(last=False)[0])
        while len(self._protected) > 0.8 * len(self):
            self._on_probation(self._protected.popitem(last=False)[0])
        if self._counted_uses > 10 * len(self) + 1000:
            self._counts = {record: count // 2 for record, count in self._counts.items() if count > 1}
            self._counted_uses //= 2

    def _on_probation(self, record: int) -> None:
        self._leaves.place(record, "probation", self._leaves.key(record))

    def _next(self) -> int:
        self._is_full = True
        candidate = self._leaves.head("window")
        victim = self._leaves.head("probation") or self._leaves.head("protected")
        if not candidate or (victim and len(self._window) <= max(1, 0.01 * len(self))):
            return victim or candidate
        if not victim or self._counts.get(candidate, 0) <= self._counts.get(victim, 0):
            return candidate
        del self._window[candidate]
        self._on_probation(candidate)
        return victim

    def _gone(self, record: int, evicted: bool) -> None:
        self._window.pop(record, None)
        self._protected.pop(record, None)


PEERS = {"sieve": SIEVE, "wtinylfu": WTinyLFU}
"""Those policies by name."""
