"""Eviction where owners of records have quotas and reservations: a policy for each of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvstore.eviction.base import EvictionPolicy


@dataclass
class _Share:
    """What one owner holds, or all that are not named hold together."""

    policy: EvictionPolicy
    quota: int | None = None
    reserved: int = 0
    bytes: int = 0


class Shares:
    """One policy for each owner that is named, and one for all others.

    An `EvictionPolicy`. It names no record that would bring an owner below its reservation, and of the others first the
    one that was used longest ago, among those that each policy names next. Naming one takes time in proportion to the
    number of owners, however many records the others keep.

    Args:
        make: makes an empty policy.
        shares: by owner (quota in bytes or None, reserved bytes).
        owner: gives the owner of a record that is held or about to be added.
        size: gives the bytes of the same.
        may_go: whether a record may leave at all.

    Example:
        >>> from kvstore.eviction.lru import LeafFirstLRU
        >>> owners = {1: b"ann", 2: b"ann", 3: b"bob"}
        >>> reserved = {b"ann": (None, 8)}
        >>> shares = Shares(LeafFirstLRU, reserved, owners.__getitem__, lambda record: 4, lambda record: True)
        >>> for record in owners:
        ...     shares.add(record)
        >>> list(shares.victims())
        [3]
        >>> list(shares.victims_of(b"ann"))
        [1, 2]
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        shares: Mapping[bytes, tuple[int | None, int]],
        owner: Callable[[int], bytes],
        size: Callable[[int], int],
        may_go: Callable[[int], bool],
    ) -> None:
        self._owner, self._size, self._may_go = owner, size, may_go
        self._named = {name: _Share(make(), quota, reserved) for name, (quota, reserved) in shares.items()}
        self._rest = _Share(make())
        self._held: dict[int, tuple[_Share, int]] = {}
        self._used: dict[int, int] = {}
        self._now = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, record_id: int, parent: int = 0, nbytes: int = 0, uses: int = 1) -> None:
        """Hold a record; see `EvictionPolicy.add`."""
        share, nbytes = self._named.get(self._owner(record_id), self._rest), self._size(record_id)
        share.bytes += nbytes - self._held.get(record_id, (share, 0))[1]
        self._held[record_id] = share, nbytes
        share.policy.add(record_id, parent, nbytes, uses)
        self._now += 1
        self._used[record_id] = self._now

    def touch(self, path: Iterable[int]) -> None:
        """Count a use of one prefix, which one owner has."""
        records = list(path)
        share = next((self._held[record][0] for record in records if record in self._held), None)
        if share is None:
            return
        share.policy.touch(records)
        self._now += 1
        self._used.update((record, self._now) for record in records if record in self._held)

    def discard(self, record_id: int) -> None:
        """Hold a record no longer."""
        share, nbytes = self._held.pop(record_id, (None, 0))
        if share is not None:
            share.policy.discard(record_id)
            share.bytes -= nbytes
            del self._used[record_id]

    def victims(self) -> Iterator[int]:
        """Name the records that may go, the first to give up first."""
        left: dict[int, tuple[_Share, int, Iterator[int]]] = {}
        queue: list[tuple[int, int, int]] = []
        for number, share in enumerate((*self._named.values(), self._rest)):
            if share.bytes > share.reserved:
                left[number] = share, share.bytes, self._leaving(share)
                self._line_up(queue, left, number)
        while queue:
            _, record, number = heapq.heappop(queue)
            yield record
            self._line_up(queue, left, number)

    def victims_of(self, owner: bytes) -> Iterator[int]:
        """Name the records of one owner that may go, reserved or not."""
        return self._leaving(self._named.get(owner, self._rest))

    def over_quota(self, owner: bytes, coming: int) -> int:
        """Return by how many bytes an owner is above its quota when so many more come; 0 or less for none."""
        share = self._named.get(owner, self._rest)
        return 0 if share.quota is None else share.bytes + coming - share.quota

    def bytes_by_owner(self) -> dict[bytes, int]:
        """Return what each named owner holds."""
        return {owner: share.bytes for owner, share in self._named.items()}

    def _leaving(self, share: _Share) -> Iterator[int]:
        return (record for record in share.policy.victims() if self._may_go(record))

    def _line_up(
        self,
        queue: list[tuple[int, int, int]],
        left: dict[int, tuple[_Share, int, Iterator[int]]],
        number: int,
    ) -> None:
        """Puts the next record of an owner in the queue, if it may lose that beside those that were named."""
        share, nbytes, records = left[number]
        record = next(records, 0)
        if record and nbytes - self._held[record][1] >= share.reserved:
            left[number] = share, nbytes - self._held[record][1], records
            heapq.heappush(queue, (self._used[record], record, number))
