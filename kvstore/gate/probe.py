"""Times a short read from a storage tier: a few milliseconds at most, unless the storage itself takes longer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from kvstore.config import KIB
from kvstore.tiers.base import Source, StorageTier
from kvstore.tiers.buffers import Buffer, BufferPool

R = TypeVar("R", bound=Source)
_SIZES = (4 * KIB, 64 * KIB, 512 * KIB)
_ENOUGH_S = 0.001


def timed_reads(tier: StorageTier[R], source: R, pool: BufferPool) -> list[tuple[int, float]]:
    """Read beginnings of a record, each longer than the one before, until a read takes a millisecond twice.

    Args:
        tier: which has the record.
        source: the record; the caller releases it.
        pool: for the buffers.

    Returns:
        Bytes of each, and seconds of the quicker of two reads; none if the tier cannot be read.
    """
    found: list[tuple[int, float]] = []
    for size in _sizes(source.nbytes):
        try:
            seconds = _timed(tier, source, pool.take(size))
            if seconds > _ENOUGH_S:  # slow storage, or a processor that was busy with something else
                seconds = min(seconds, _timed(tier, source, pool.take(size)))
        except OSError:
            return []  # a get will find it out, and count it
        found.append((size, seconds))
        if seconds > _ENOUGH_S:
            break
    return found


def _timed(tier: StorageTier[R], source: R, buffer: Buffer) -> float:
    begin = time.perf_counter()
    tier.read([source], [buffer])
    return time.perf_counter() - begin


def _sizes(nbytes: int) -> Sequence[int]:
    return sorted({min(size, nbytes) for size in _SIZES})
