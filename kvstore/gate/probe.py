"""Times a short read from a storage tier: a few milliseconds at most, unless the storage itself takes longer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from kvstore.config import KIB
from kvstore.tiers.base import Source, StorageTier
from kvstore.tiers.buffers import BufferPool

R = TypeVar("R", bound=Source)
_SIZES = (4 * KIB, 64 * KIB, 512 * KIB)
_ENOUGH_S = 0.001


def timed_reads(tier: StorageTier[R], source: R, pool: BufferPool) -> list[tuple[int, float]]:
    """Read beginnings of a record, each longer than the one before, until a read takes a millisecond.

    Args:
        tier: which has the record.
        source: the record; the caller releases it.
        pool: for the buffers.

    Returns:
        Bytes and seconds of each read; none if the tier cannot be read.
    """
    found: list[tuple[int, float]] = []
    for size in _sizes(source.nbytes):
        buffer = pool.take(size)
        begin = time.perf_counter()
        try:
            tier.read([source], [buffer])
        except OSError:
            return []  # a get will find it out, and count it
        found.append((size, time.perf_counter() - begin))
        if found[-1][1] > _ENOUGH_S:
            break
    return found


def _sizes(nbytes: int) -> Sequence[int]:
    return sorted({min(size, nbytes) for size in _SIZES})
