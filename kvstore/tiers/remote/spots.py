"""Where blocks lie in parcels, as far as heads were read. Never proof: who reads checks what comes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.tiers.remote.parcel import ParcelHead

_MOST = 1 << 16  # of about 350 bytes each


@dataclass(frozen=True)
class Spot:
    """Where a record lies. Immutable.

    Attributes:
        parcel: key of the first block in it.
        offset: of the record, behind the head.
        nbytes: of the record, as it lies there.
    """

    parcel: bytes
    offset: int
    nbytes: int

    def is_before(self, other: Spot | None) -> bool:
        """Whether the other record begins where this one ends."""
        return other is not None and (self.parcel, self.offset + self.nbytes) == (other.parcel, other.offset)


class Spots:
    """Spots by the keys of blocks, each for some seconds. Thread-safe: `_lock` guards `_known`.

    Args:
        life_s: what a head said is believed for so long.

    Example:
        >>> spots = Spots(30)
        >>> spots.note(ParcelHead((b"a", b"b"), (500, 600)))
        >>> spots.of(b"b")
        Spot(parcel=b'a', offset=500, nbytes=600)
    """

    def __init__(self, life_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._life_s = life_s
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[Spot, float]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: bytes) -> Spot | None:
        """Return where a block is believed to lie."""
        found = self._known.get(key)
        return None if found is None or self._clock() >= found[1] else found[0]

    def last(self, key: bytes) -> Spot | None:
        """Return where a block lay, however long ago that was told."""
        found = self._known.get(key)
        return None if found is None else found[0]

    def note(self, head: ParcelHead) -> None:
        """There is this parcel."""
        until = self._clock() + self._life_s
        rows = zip(head.keys, head.offsets, head.sizes, strict=True)
        with self._lock:
            for key, offset, nbytes in rows:
                self._known.pop(key, None)
                self._known[key] = Spot(head.keys[0], offset, nbytes), until
            while len(self._known) > _MOST:
                self._known.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> set[bytes]:
        """Believe nothing any more of the parcels that these blocks lie in; return what those begin with."""
        parcels = {spot.parcel for spot in map(self.last, keys) if spot is not None}
        if parcels:
            with self._lock:
                for key in [key for key, (spot, _) in self._known.items() if spot.parcel in parcels]:
                    del self._known[key]
        return parcels

    def __len__(self) -> int:
        return len(self._known)
