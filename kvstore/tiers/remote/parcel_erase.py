"""Takes blocks out of the remote tier where they lie in parcels: what stands before them is written again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.core.explanation import Reason
from kvstore.metrics import Metric
from kvstore.tiers.remote.names import parcel_of
from kvstore.tiers.remote.parcel import ParcelHead
from kvstore.tiers.remote.parcels import Parcels


@dataclass
class ParcelErasure:
    """One erase. For one thread.

    Attributes:
        erased: keys of the blocks that are to go.
        batch: values that one call asks for, or removes.
        ttl_s: what is written again may be removed so long after; None: when the server likes.
        removed: those that went.
        left: those that may still be there, and blocks with which a parcel begins that may have some of them.
    """

    parcels: Parcels
    erased: frozenset[bytes]
    batch: int
    ttl_s: float | None
    removed: set[bytes] = field(default_factory=set)
    left: set[bytes] = field(default_factory=set)

    def run(self, before: Sequence[bytes]) -> tuple[int, int]:
        """Remove the blocks; return how many were removed, and of how many that is not known.

        before: blocks that stay, of the groups of those that go: parcels may begin with them.
        """
        keys = list(self.erased)
        parcels = self._there([*before, *keys], parcel_of)
        alone = self._there(keys, bytes)
        whole = {key: held for key in parcels if (held := self._whole(key)) is not None}
        for some in self._batches(list(whole)):
            self._delete([parcel_of(key) for key in some], [one for key in some for one in whole[key]])
        for some in self._batches(alone):
            self._delete(some, some)
        self.parcels.beliefs.forget(map(parcel_of, self.parcels.spots.forget(keys)))
        self.parcels.beliefs.note(self.removed, False)
        self.parcels.metrics.add(Metric.REMOTE_ERASED, len(self.removed))
        return len(self.removed), len(self.left)

    def _batches(self, keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        for first in range(0, len(keys), self.batch):
            yield keys[first : first + self.batch]

    def _deadline(self) -> float:
        return self.parcels.clock() + self.parcels.write_timeout_s

    def _there(self, keys: Sequence[bytes], value: Callable[[bytes], bytes]) -> list[bytes]:
        """Those of the keys of which there is such a value."""
        found = list[bytes]()
        for some in self._batches(keys):
            for key, there in zip(some, self.parcels.exist(list(map(value, some)), self._deadline()), strict=True):
                found += [key] if there else []
                self.left |= {key} if there is None else set()
        return found

    def _whole(self, key: bytes) -> Sequence[bytes] | None:
        """The blocks in a parcel that is to go as a whole; None if something stays of it. What does not is cut off."""
        head = self.parcels.head(key, self._deadline())
        if head is Reason.REMOTE_REFUSED:
            return [key]  # nobody can read it, and it may hold anything
        if isinstance(head, Reason):
            self.left |= {key} if head is not Reason.REMOTE_GONE else set()
            return None
        count = next((at for at, one in enumerate(head.keys) if one in self.erased), len(head.keys))
        if 0 < count < len(head.keys):
            self._shorten(head, count)
        return None if count else head.keys

    def _shorten(self, head: ParcelHead, count: int) -> None:
        """Remove a parcel, and write its first records again."""
        name, first = self.parcels.names.block(parcel_of(head.keys[0])), head.first(count)
        data = memoryview(bytearray(first.nbytes))
        size = self.parcels.calls.read_part(name, self.parcels.head_bytes, [data], self._deadline())
        self.parcels.spots.forget(head.keys)
        if self._delete([parcel_of(head.keys[0])], head.keys[count:]) and size == first.nbytes:
            self.parcels.put_again(first, data, self.ttl_s)

    def _delete(self, values: Sequence[bytes], keys: Sequence[bytes]) -> bool:
        """Remove values, which hold these blocks; return whether they are gone."""
        gone = self.parcels.calls.delete([self.parcels.names.block(value) for value in values]) is not None
        (self.removed if gone else self.left).update(self.erased.intersection(keys))
        return gone
