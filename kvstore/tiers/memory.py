"""A tier in memory: a byte budget that holds at every moment, and an order of eviction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from kvstore.eviction import EvictionPolicy
from kvstore.tiers.base import Tier


class Sized(Protocol):
    """Anything that a memory tier can hold."""

    @property
    def nbytes(self) -> int:
        """Bytes that it costs the tier."""


T = TypeVar("T", bound=Sized)


class MemoryTier(Tier[T]):
    """Records by number, within a budget of bytes.

    Thread-safe: `_lock` guards the items, their bytes and the policy; look-ups take no lock.

    Args:
        name: what metrics and hits call the tier.
        budget: the most bytes that the items may take.
        policy: says which records to evict first.
        may_evict: called before a record is evicted; false keeps it.
        evicted: called after a record was evicted, outside of the tier's lock.
        renew: makes the policy anew, empty; None: its class does.

    Attributes:
        told: called with (name, record, whether it is there now) in the order of changes, under the tier's lock; None
            for nobody.

    Example:
        >>> from kvstore.eviction.lru import LeafFirstLRU
        >>> gone = []
        >>> tier = MemoryTier("host", 10, LeafFirstLRU(), may_evict=lambda record: True, evicted=gone.append)
        >>> tier.add(1, memoryview(bytes(6))), tier.add(2, memoryview(bytes(6)))
        (True, True)
        >>> gone, tier.nbytes
        ([1], 6)
    """

    def __init__(
        self,
        name: str,
        budget: int,
        policy: EvictionPolicy,
        may_evict: Callable[[int], bool],
        evicted: Callable[[int], None],
        renew: Callable[[], EvictionPolicy] | None = None,
    ) -> None:
        self._name = name
        self._budget = budget
        self._policy = policy
        self._renew = renew or type(policy)
        self._may_evict = may_evict
        self._evicted = evicted
        self._items: dict[int, T] = {}
        self._bytes = 0
        self.told: Callable[[str, int, bool], None] | None = None
        self._torn = False  # a call was cut short by an interrupt: see `_mend`
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
        """Return a record's item; None if the tier does not have it."""
        return self._items.get(record_id)

    def sizes(self) -> tuple[int, dict[int, int]]:
        """Return (bytes taken, bytes by record) at one moment."""
        with self._lock:
            self._mend()
            return self._bytes, {record_id: item.nbytes for record_id, item in self._items.items()}

    def locate(self, records: Sequence[int]) -> list[T | None]:
        return [self._items.get(record) for record in records]

    def release(self, sources: Iterable[T]) -> None:
        """Do nothing: an item stays in memory as long as it is referenced."""

    def touch(self, path: Iterable[int]) -> None:
        """Note that the records of one prefix, root first, were used."""
        with self._lock:
            self._mend()
            self._torn = True
            self._policy.touch(path)
            self._torn = False

    def add(self, record_id: int, item: T) -> bool:
        """Take a record in, and evict others first if it needs their space.

        An item that replaces another of the same record is charged instead of it.

        Returns:
            False, and nothing changed, if the record cannot be made to fit.
        """
        gone: list[int] = []
        with self._lock:
            self._mend()
            self._torn = True
            old = self._items.get(record_id)
            need = item.nbytes - (old.nbytes if old is not None else 0)
            fits = self._make_room(item, need, record_id, gone)
            if fits:
                self._items[record_id] = item
                self._bytes += need
                self._policy.add(record_id, nbytes=item.nbytes)
                if self.told is not None:
                    self.told(self._name, record_id, True)
            self._torn = False
        for victim in gone:
            self._evicted(victim)
        return fits

    def remove(self, records: Iterable[int]) -> int:
        """Drop the records, without calling `evicted`; return how many of them the tier had."""
        with self._lock:
            self._mend()
            self._torn = True
            dropped = sum([self._drop(record_id) for record_id in records])
            self._torn = False
            return dropped

    def stats(self) -> dict[str, int]:
        return {"bytes": self.nbytes, "budget": self.budget, "records": len(self)}

    def by_namespace(self) -> dict[bytes, int]:
        """Return the bytes of each namespace that has a quota or reservation here, by its digest."""
        return {}

    def miscounted(self) -> bool:
        """Return whether these differ from what the records take."""
        return False

    def clear(self) -> None:
        """Drop all records, without calling `evicted`."""
        with self._lock:
            self._items.clear()
            self._torn = True
            self._mend()

    def _mend(self) -> None:
        """What a call left undone that was cut short is made anew from the items; their order is lost then."""
        if not self._torn:
            return
        self._policy = self._renew()
        for record_id in sorted(self._items):
            self._policy.add(record_id, nbytes=self._items[record_id].nbytes)
        self._bytes = sum(item.nbytes for item in self._items.values())
        self._torn = False

    def _over_quota(self, item: T, need: int, keep: int) -> list[int] | None:
        """The records that must leave for an item, however much room there is; None if it cannot be taken in."""
        return []

    def _make_room(self, item: T, need: int, keep: int, gone: list[int]) -> bool:
        victims = self._over_quota(item, need, keep)
        if victims is None:
            return False
        free = self.budget - self._bytes + sum([self._items[victim].nbytes for victim in victims])
        if free < need:
            named = {keep, *victims}
            for victim in self._policy.victims():
                if free >= need:
                    break
                if victim not in named and self._may_evict(victim):
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
        if self.told is not None:
            self.told(self._name, record_id, False)
        return True
