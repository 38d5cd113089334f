"""A Bloom filter of keys (Bloom, 1970): what it lacks was never added; of what was not added it has few."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import numpy as np

from kvstore.tiers.remote.names import KEY_BYTES

_PROBES = 7  # best for about ten bits a key, of which one in 120 that was not added seems to be there
_PIECE = 4096


class KeyFilter:
    """Thread-safe: `_lock` guards what is added; who asks needs none.

    Keys are digests, so their own bits say where they belong, and no other hash is needed.

    Args:
        nbytes: memory that it takes, a power of two.

    Example:
        >>> found = KeyFilter(1 << 10)
        >>> found.add([b"a" * 32])
        >>> b"a" * 32 in found, b"b" * 32 in found, len(found)
        (True, False, 1)
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 8 or nbytes & (nbytes - 1):
            raise ValueError(f"nbytes: expected a power of two from 8 on, found {nbytes}")
        self._bits = np.zeros(nbytes, np.uint8)
        self._mask = 8 * nbytes - 1
        self._count = 0
        self._lock = threading.Lock()

    def add(self, keys: Sequence[bytes]) -> None:
        """Add keys."""
        for first in range(0, len(keys), _PIECE):
            some = keys[first : first + _PIECE]
            words = np.frombuffer(b"".join(map(_digest, some)), "<u8").reshape(-1, 2)
            steps = np.arange(_PROBES, dtype=np.uint64)
            places = (words[:, :1] + steps * (words[:, 1:] | np.uint64(1))) & np.uint64(self._mask)
            flat = places.ravel()
            bits = np.uint8(1) << (flat & np.uint64(7)).astype(np.uint8)
            with self._lock:
                np.bitwise_or.at(self._bits, flat >> np.uint64(3), bits)
                self._count += len(some)

    def __contains__(self, key: bytes) -> bool:
        digest, bits, mask = _digest(key), self._bits, self._mask
        place, step = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") | 1
        for _ in range(_PROBES):
            at = place & mask
            if not bits[at >> 3] >> (at & 7) & 1:
                return False
            place += step
        return True

    def __len__(self) -> int:
        return self._count


def _digest(key: bytes) -> bytes:
    """16 bytes that depend on all of the key."""
    return key[:16] if len(key) == KEY_BYTES else hashlib.sha256(key).digest()[:16]
