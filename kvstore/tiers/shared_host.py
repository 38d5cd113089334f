"""Host memory in which namespaces have quotas and reservations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.eviction import EvictionPolicy
from kvstore.eviction.shares import Shares
from kvstore.tiers.host import HostRecord
from kvstore.tiers.memory import MemoryTier


class SharedHost(MemoryTier[HostRecord]):
    """The host tier of a store with tenants. Thread-safe, as `MemoryTier` is; `_lock` guards the shares, too.

    Args:
        budget, may_evict, evicted: see `MemoryTier`.
        make: makes an empty policy.
        shares: by digest of the namespace (quota in bytes or None, reserved bytes).

    Example:
        >>> from kvstore.eviction.lru import LeafFirstLRU
        >>> tier = SharedHost(8192, LeafFirstLRU, {b"n" * 32: (4096, 0)}, lambda record: True, lambda record: None)
        >>> tier.by_namespace() == {b"n" * 32: 0}
        True
    """

    def __init__(
        self,
        budget: int,
        make: Callable[[], EvictionPolicy],
        shares: Mapping[bytes, tuple[int | None, int]],
        may_evict: Callable[[int], bool],
        evicted: Callable[[int], None],
    ) -> None:
        def renew() -> Shares:
            return Shares(
                make, shares, lambda r: self._items[r].header.namespace, lambda r: self._items[r].nbytes, may_evict
            )

        self._policy: Shares
        super().__init__("host", budget, renew(), may_evict, evicted, renew)

    def by_namespace(self) -> dict[bytes, int]:
        with self._lock:
            self._mend()
            return self._policy.bytes_by_owner()

    def miscounted(self) -> bool:
        with self._lock:
            self._mend()
            found = dict.fromkeys(self._policy.bytes_by_owner(), 0)
            for item in self._items.values():
                if item.header.namespace in found:
                    found[item.header.namespace] += item.nbytes
            return found != self._policy.bytes_by_owner()

    def _over_quota(self, item: HostRecord, need: int, keep: int) -> list[int] | None:
        owner = item.header.namespace
        over, victims = self._policy.over_quota(owner, need), list[int]()
        if over > 0:
            for victim in self._policy.victims_of(owner):
                if over <= 0:
                    break
                if victim != keep:
                    victims.append(victim)
                    over -= self._items[victim].nbytes
        return victims if over <= 0 else None
