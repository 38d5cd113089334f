"""The order in which a full disk gives up records where namespaces have quotas and reservations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.config import TenantConfig
from kvstore.core.guard import Guard
from kvstore.core.keys import namespace_digest
from kvstore.residency.disk_order import DiskOrder, Durable


@dataclass
class _Share:
    """What one tenant has, or all namespaces that are none have together."""

    order: DiskOrder
    quota: int | None = None
    reserved: int = 0
    bytes: int = 0


class TenantOrder:
    """A `DiskOrder` for each tenant, and one for all other namespaces; and what the records of each take.

    Each of them names its next record by the policy of the store. Of those above their reservation the one goes whose
    next record was used longest ago. Naming one takes time in proportion to the number of tenants, however many records
    the others keep. Memory for each durable record: about 190 bytes beside that of the policy.

    Guarded by the lock of residency; every method asserts that the caller holds it.

    Args:
        tenants: by namespace.
        make: makes an empty `DiskOrder`.
        guard: the lock of residency.
        members: gives what is coded against a record and leaves with it.

    Example:
        >>> from kvstore.core.guard import RESIDENCY
        >>> from kvstore.eviction import LeafFirstLRU
        >>> guard, ann, bob = Guard(RESIDENCY), namespace_digest("ann"), namespace_digest("bob")
        >>> def make():
        ...     return DiskOrder(LeafFirstLRU(), guard, lambda record: False, lambda record: True)
        >>> order = TenantOrder({b"ann": TenantConfig(reserved_bytes=8192)}, make, guard, lambda record: ())
        >>> with guard:
        ...     order.load([Durable(record, 0, 4096) for record in (1, 2, 3)], [ann, ann, bob])
        ...     order.victim()
        3
    """

    def __init__(
        self,
        tenants: Mapping[bytes, TenantConfig],
        make: Callable[[], DiskOrder],
        guard: Guard,
        members: Callable[[int], Collection[int]],
    ) -> None:
        self._guard = guard
        self._members = members
        self._tenants = {
            namespace_digest(name): _Share(make(), tenant.quota_bytes, tenant.reserved_bytes)
            for name, tenant in tenants.items()
        }
        self._rest = _Share(make())
        self._owner: dict[int, _Share] = {}
        self._sizes: dict[int, int] = {}
        self._used: dict[int, int] = {}  # when each was used last
        self._now = 0

    def load(self, records: Iterable[Durable], digests: Iterable[bytes]) -> None:
        """Take in what is durable when the store is opened.

        Args:
            records: by rising record number.
            digests: of the namespace of each.
        """
        for durable, digest in zip(records, digests, strict=True):
            share = self._share(digest)
            share.order.load([durable])
            self._own(share, durable.record, durable.nbytes)

    def written(self, path: Sequence[int], records: Sequence[Durable], digest: bytes) -> None:
        """Take in records that are durable from now on; see `DiskOrder.written`."""
        share = self._share(digest)
        share.order.written(path, records)
        for durable in records:
            self._own(share, durable.record, durable.nbytes)
        self._use(path)

    def touch(self, path: Sequence[int]) -> None:
        """Count a use of one prefix, given root first; 0 stands for a missing record."""
        share = next((self._owner[record] for record in path if record in self._owner), None)
        if share is not None:
            share.order.touch(path)
            self._use(path)

    def forget(self, record: int) -> None:
        """Forget a record that the store forgets. Does nothing if it is not durable."""
        self._guard.check_held()
        share = self._owner.pop(record, None)
        if share is not None:
            share.order.forget(record)
            share.bytes -= self._sizes.pop(record)
            self._used.pop(record, None)

    def resize(self, record: int, nbytes: int) -> None:
        """Note that a record takes other bytes than before. Does nothing if it is not known."""
        self._guard.check_held()
        share = self._owner.get(record)
        if share is not None:
            share.bytes += nbytes - self._sizes[record]
            self._sizes[record] = nbytes

    def unpinned(self, records: Iterable[int]) -> None:
        """Bring back those of these records, which are pinned no more, that were set aside."""
        for record in sorted(records):
            share = self._owner.get(record)
            if share is not None:
                share.order.unpinned([record])

    def victim(self, whosever: bool = False) -> int:
        """Return the record that the disk is to give up next; 0 if no tenant may lose one. The caller forgets it.

        Args:
            whosever: also of a tenant that is within its reservation.
        """
        self._guard.check_held()
        found: list[tuple[int, int]] = []
        for share in (*self._tenants.values(), self._rest):
            if share.bytes <= share.reserved and not whosever:
                continue
            record = share.order.victim()
            if record and (whosever or share.bytes - self._taken_by(record) >= share.reserved):
                found.append((self._used.get(record, 0), record))
        return min(found)[1] if found else 0

    def victim_of(self, digest: bytes) -> int:
        """Return the record that one namespace is to give up next; 0 if it has none that may go."""
        return self._share(digest).order.victim()

    def over_quota(self, digest: bytes, coming: int = 0) -> int:
        """Return by how many bytes a namespace is above its quota when so many more come; 0 or less for none."""
        share = self._share(digest)
        return 0 if share.quota is None else share.bytes + coming - share.quota

    @property
    def with_quota(self) -> list[bytes]:
        """Digests of the namespaces that have one."""
        return [digest for digest, share in self._tenants.items() if share.quota is not None]

    @property
    def protected(self) -> int:
        """Bytes of records that are within reservations."""
        return sum(min(share.bytes, share.reserved) for share in self._tenants.values())

    def held(self) -> frozenset[int]:
        """Return all durable records that are known here. Takes time in proportion to their number."""
        return frozenset[int]().union(*(share.order.held() for share in (*self._tenants.values(), self._rest)))

    def snapshot(self) -> tuple[dict[int, int], dict[bytes, int], int]:
        """Return copies of (bytes by record, bytes by tenant, bytes of all others)."""
        self._guard.check_held()
        return dict(self._sizes), {digest: share.bytes for digest, share in self._tenants.items()}, self._rest.bytes

    def _share(self, digest: bytes) -> _Share:
        self._guard.check_held()
        return self._tenants.get(digest, self._rest)

    def _own(self, share: _Share, record: int, nbytes: int) -> None:
        share.bytes += nbytes - self._sizes.get(record, 0)  # of one that was written again the bytes were counted
        self._owner[record] = share
        self._sizes[record] = nbytes
        self._now += 1
        self._used[record] = self._now

    def _use(self, path: Sequence[int]) -> None:
        self._now += 1
        for record in path:
            if record in self._owner:
                self._used[record] = self._now

    def _taken_by(self, record: int) -> int:
        """Bytes of a record and of what leaves with it."""
        return sum(self._sizes.get(each, 0) for each in (record, *self._members(record)))
