"""A tier in memory: a byte budget that holds at every moment, and an order of eviction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from kvstore.eviction import EvictionPolicy
from kvstore.tiers.base import Tier


class Sized(Protocol):
    """Anything a memory tier can hold: it says what it costs."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class MemoryTier(Tier[T]):
    """Records by id, within `budget` bytes. Thread-safe: `_lock` guards the items, their bytes and the policy; what is
    only looked up is read without it.

    may_evict: asked before a record goes; a record that is nowhere else and pinned stays.
    evicted: told after a record went (outside of the tier's lock).
    """

    def __init__(
        self,
        name: str,
        budget: int,
        policy: EvictionPolicy,
        may_evict: Callable[[int], bool],
        evicted: Callable[[int], None],
    ) -> None:
        self._name = name
        self._budget = budget
        self._policy = policy
        self._may_evict = may_evict
        self._evicted = evicted
        self._items: dict[int, T] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, record_id: int) -> bool:
        return record_id in self._items

    def get(self, record_id: int) -> T | None:
        return self._items.get(record_id)

    def sizes(self) -> tuple[int, dict[int, int]]:
        """(bytes taken, bytes by record) at one moment."""
        with self._lock:
            return self._bytes, {record_id: item.nbytes for record_id, item in self._items.items()}

    def locate(self, records: Sequence[int]) -> list[T | None]:
        return [self._items.get(record) for record in records]

    def release(self, sources: Iterable[T]) -> None:
        """Does nothing: what is found stays in memory as long as it is referenced."""

    def touch(self, path: Iterable[int]) -> None:
        """The records of one prefix, root first, were used."""
        with self._lock:
            self._policy.touch(path)

    def add(self, record_id: int, item: T) -> bool:
        """Takes the record in, evicting others first; False, and nothing changed, where it cannot be made to fit.

        An item that replaces another under the same id is charged instead of it.
        """
        gone: list[int] = []
        with self._lock:
            old = self._items.get(record_id)
            need = item.nbytes - (old.nbytes if old is not None else 0)
            if not self._make_room(need, record_id, gone):
                return False
            self._items[record_id] = item
            self._bytes += need
            self._policy.add(record_id)
        for victim in gone:
            self._evicted(victim)
        return True

    def remove(self, records: Iterable[int]) -> int:
        """Drops the records, without telling anyone; returns how many there were."""
        with self._lock:
            return sum([self._drop(record_id) for record_id in records])

    def stats(self) -> dict[str, int]:
        return {"bytes": self.nbytes, "budget": self.budget, "records": len(self)}

    def clear(self) -> None:
        with self._lock:
            for record_id in list(self._items):
                self._drop(record_id)

    def _make_room(self, need: int, keep: int, gone: list[int]) -> bool:
        if self._bytes + need <= self.budget:
            return True
        free, victims = self.budget - self._bytes, []
        for victim in self._policy.victims():
            if free >= need:
                break
            if victim != keep and self._may_evict(victim):
                free += self._items[victim].nbytes
                victims.append(victim)
        if free < need:
            return False
        for victim in victims:
            self._drop(victim)
        gone.extend(victims)
        return True

    def _drop(self, record_id: int) -> bool:
        item = self._items.pop(record_id, None)
        if item is None:
            return False
        self._bytes -= item.nbytes
        self._policy.discard(record_id)
        return True
