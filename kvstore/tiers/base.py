"""What the memory tiers share: a byte budget that holds at every moment, and an order of eviction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from kvstore.eviction import EvictionPolicy


class Sized(Protocol):
    """Anything a memory tier can hold: it says what it costs."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class MemoryTier(Generic[T]):
    """Records by id, within `budget` bytes. Thread-safe.

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
        self.name = name
        self.budget = budget
        self._policy = policy
        self._may_evict = may_evict
        self._evicted = evicted
        self._items: dict[int, T] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, record_id: int) -> bool:
        return record_id in self._items

    def sizes(self) -> tuple[int, dict[int, int]]:
        """(bytes taken, bytes by record) at one moment."""
        with self._lock:
            return self._bytes, {record_id: item.nbytes for record_id, item in self._items.items()}

    def get(self, record_id: int) -> T | None:
        return self._items.get(record_id)

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

    def remove(self, record_id: int) -> bool:
        """Drops the record, without telling anyone."""
        with self._lock:
            return self._drop(record_id)

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
