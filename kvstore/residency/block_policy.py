"""An eviction policy that knows blocks by their names, behind one that is asked about records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvstore.eviction import Adaptive, EvictionPolicy, LeafFirstLFU, LeafFirstLRU, PriorGuided
from kvstore.eviction.leaf_first import LeafFirst
from kvstore.residency.savings import Savings


def new_policy(kind: type[LeafFirst] | type[LeafFirstLRU], savings: Savings) -> EvictionPolicy:
    """Return an empty policy. Those that remember nothing of what left are asked about records as they are."""
    if issubclass(kind, LeafFirstLRU | LeafFirstLFU):
        return kind()
    if issubclass(kind, PriorGuided | Adaptive):
        return BlockPolicy(kind, savings)
    return BlockPolicy(lambda _: kind(), savings)


class BlockPolicy:
    """An `EvictionPolicy` of the records of one tier, as another one orders their blocks.

    Args:
        make: makes that policy, empty; it is given what a use of a block saves, for each byte.
        savings: says which block a record is.

    Example:
        >>> from kvstore.eviction import PriorGuided
        >>> policy = BlockPolicy(PriorGuided, Savings())
        >>> policy.add(1), policy.add(2, parent=1)
        (None, None)
        >>> list(policy.victims())
        [2, 1]
    """

    def __init__(self, make: Callable[[Callable[[int], float]], EvictionPolicy], savings: Savings) -> None:
        self._savings = savings
        self._names: dict[int, int] = {}  # of the records that are held
        self._held: dict[int, tuple[int, int]] = {}  # by name: (record, bytes)
        self.order = make(self._saving)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, record_id: int, parent: int = 0, nbytes: int = 0, uses: int = 1) -> None:
        """Hold a record; see `EvictionPolicy.add`."""
        name = self._names.get(record_id) or self._savings.name(record_id)
        if self._held.get(name, (record_id, 0))[0] != record_id:
            name = record_id  # two records of one block, as one replaces the other
        self._names[record_id] = name
        self._held[name] = (record_id, nbytes or self._held.get(name, (0, 0))[1])
        self.order.add(name, self._name(parent) if parent else 0, nbytes, uses)

    def touch(self, path: Iterable[int]) -> None:
        """Count a use of one prefix; see `EvictionPolicy.touch`."""
        self.order.touch([self._name(record) for record in path if record > 0])

    def discard(self, record_id: int) -> None:
        """Hold a record no longer."""
        name = self._names.pop(record_id, 0)
        if name:
            self.order.discard(name)
            del self._held[name]

    def victims(self) -> Iterator[int]:
        """Name all held records, the first to give up first."""
        return (self._held[name][0] for name in self.order.victims())

    def _name(self, record: int) -> int:
        return self._names.get(record) or self._savings.name(record)

    def _saving(self, name: int) -> float:
        held = self._held.get(name)
        return self._savings.rate(*held) if held else 0.0
