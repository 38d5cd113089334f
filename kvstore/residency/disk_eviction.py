"""What a full disk gives up: the order of durable records, and what namespaces may take and keep of the disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvstore.core.explanation import Reason
from kvstore.errors import ConfigError
from kvstore.eviction import POLICIES, EvictionPolicy
from kvstore.metrics import Metric
from kvstore.residency.block import Block
from kvstore.residency.block_policy import new_policy
from kvstore.residency.disk_order import DiskOrder, Durable
from kvstore.residency.ledger import Ledger
from kvstore.residency.tenant_order import TenantOrder
from kvstore.tiers.disk.tier import DiskTier


@dataclass
class DiskEviction(Ledger):
    """The part of `Residency` that decides which durable records go. Thread-safe, as that is.

    Example:
        See `Residency`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.eviction not in POLICIES:
            raise ConfigError(f"eviction: expected one of {', '.join(POLICIES)}, found {self.config.eviction!r}")
        # None: the trie's own recency; else guarded by _lock. With tenants both are the same.
        self._disk_order: DiskOrder | TenantOrder | None = None
        self._tenants: TenantOrder | None = None
        self._refused: set[int] = set()  # queued records that are beyond a quota; guarded by _lock
        self.disk: DiskTier | None = None  # until it is open

    def _remove_entries(self, records: Sequence[int]) -> None:
        """Removes forgotten records from the catalog; nothing while there is none."""

    def evict(self) -> list[int]:
        """The disk is full: the store gives up the record that its policy names, in every tier; before it go the
        members that are coded against it, which were used no later. Returns what is to leave the catalog, [] for
        nothing. What is not written yet stays: it holds no space on disk, and a member among it is dropped, and said
        to be, when it is to be written."""
        with self._lock:
            abandoned, self._abandoned = self._abandoned, []
            record = self._victim()
            if not record:
                return abandoned
            members = self._written_members(record)
            gone = [*abandoned, *self._forget_all([*members, record], Reason.EVICTED)]
        self._tell(self._forgotten, [*members, record])
        if members:
            self.metrics.add(Metric.DROPPED_MEMBERS, len(members))
        return gone

    def keep_quotas(self, coming: Sequence[tuple[int, bytes, int]] = ()) -> tuple[list[int], set[int]]:
        """Evicts records of the namespaces that would be above their quota with what is coming.

        coming: (record, digest of its namespace, bytes) of queued blocks that are about to be durable. Returns what is
        to leave the catalog, and those of the coming ones for which there is no room: the last ones of each namespace.
        `written` drops these.
        """
        if self._tenants is None:
            return [], set()
        evicted, gone, members = list[int](), list[int](), 0
        rows_of = defaultdict[bytes, list[tuple[int, int]]](list)
        for record, digest, nbytes in coming:
            rows_of[digest].append((record, nbytes))
        with self._lock:
            for digest in self._tenants.with_quota:
                rows = rows_of[digest]
                needed = sum(nbytes for _, nbytes in rows)
                while self._tenants.over_quota(digest, needed) > 0 and (victim := self._tenants.victim_of(digest)):
                    leaving = [*self._written_members(victim), victim]
                    gone += self._forget_all(leaving, Reason.EVICTED)
                    evicted, members = evicted + leaving, members + len(leaving) - 1
                over = self._tenants.over_quota(digest, needed)
                for record, nbytes in sorted(rows, reverse=True):
                    if over > 0:
                        self._refused.add(record)
                        over -= nbytes
            refused = self._refused.intersection(record for record, _, _ in coming)
        self._tell(self._forgotten, evicted)
        self.metrics.add(Metric.DROPPED_MEMBERS, members)
        self.metrics.add(Metric.DROPPED_QUOTA, len(refused))
        return gone, refused

    def shrink_to_quotas(self) -> None:
        """Evicts what is above the quotas now, which may be lower than when it was written."""
        gone, _ = self.keep_quotas()
        self.metrics.add(Metric.DISK_EVICTED_RECORDS, len(gone))
        self._remove_entries(gone)

    def _drop(self, records: Collection[int]) -> None:
        """Forgets queued records that are not to be written, in every tier."""
        if not records:
            return
        with self._lock:
            gone = self._forget_all(sorted(records, reverse=True), Reason.DROPPED)
            for record in records:
                self.holes.release(record)
        self._tell(self._forgotten, records)
        self._remove_entries([record for record in gone if record not in records])

    def tenant_bytes(self) -> tuple[dict[int, int], dict[bytes, int], int] | None:
        """What is counted with tenants: (bytes by durable record, bytes by tenant, bytes of all others)."""
        if self._tenants is None:
            return None
        with self._lock:
            return self._tenants.snapshot()

    def rewritten(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Records were coded anew: (record, bytes) of each."""
        if self._tenants is not None:
            with self._lock:
                for record, nbytes in sizes:
                    self._tenants.resize(record, nbytes)

    def _victim(self) -> int | None:
        self._lock.check_held()
        if self._tenants is not None and self.disk is not None:
            return self._tenants_victim(self._tenants, self.disk.capacity)
        if self._disk_order is not None and (chosen := self._disk_order.victim()):
            return chosen
        record = self.index.evict(below=self._pending.first())
        if record is not None and self._disk_order is not None:
            self.metrics.add(Metric.FALLBACK_EVICTION)
        return record

    def _tenants_victim(self, tenants: TenantOrder, capacity: int) -> int:
        if victim := tenants.victim():
            return victim
        # What memory alone has keeps what is before it on disk.
        ends = (r for r in self._unwritten if self.index.leaf(r) is not None and not self._pins.is_kept(r))
        if victim := next(ends, 0):
            return victim
        if tenants.protected > capacity and (victim := tenants.victim(whosever=True)):
            self.metrics.add(Metric.FALLBACK_RESERVATION)
        return victim

    @property
    def orders_disk(self) -> bool:
        """Whether a policy decides what a full disk gives up. "lru" without tenants needs none: the trie knows it."""
        return self.config.eviction != "lru" or bool(self.config.tenants)

    def load_order(self, records: Iterable[Durable], digests: Iterable[bytes]) -> None:
        """Let the policy of the config decide what a full disk gives up; only where `orders_disk`.

        Args:
            records: what is durable, by rising record number.
            digests: of the namespace of each; used with tenants alone.
        """
        with self._lock:
            if self.config.tenants:
                self._disk_order = self._tenants = TenantOrder(
                    self.config.tenants, self._new_order, self._lock, self._families.members
                )
                self._tenants.load(records, digests)
            else:
                self._disk_order = self._new_order()
                self._disk_order.load(records)

    def _new_order(self) -> DiskOrder:
        return DiskOrder(self._new_policy(), self._lock, self._pins.is_kept, self._may_leave_disk)

    def _new_policy(self) -> EvictionPolicy:
        """An empty policy of the kind that the settings name, for one tier or one tenant."""
        return new_policy(POLICIES[self.config.eviction], self.savings)

    def _order_written(self, blocks: Sequence[Block], on_disk: set[int]) -> None:
        if self._disk_order is None:
            return
        written = [b for b in blocks if b.record in on_disk and b.record in self.index]
        if not written:
            return
        path = self.path(written[-1].record)
        durable = [Durable(b.record, b.parent, self.size_of(b.record)) for b in written]
        if self._tenants is not None:
            self._tenants.written(path, durable, blocks[-1].namespace)
        elif isinstance(self._disk_order, DiskOrder):
            self._disk_order.written(path, durable)

    def _may_leave_disk(self, record: int) -> bool:
        """Whether nothing continues the record, or a member that leaves with it, and no queued member waits for it."""
        members = self._families.members(record)
        ends = all(self.index.leaf(leaving) is not None for leaving in (record, *members))
        return ends and not any(member in self._pending for member in members)
