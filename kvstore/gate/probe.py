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
_LEAST_SIZES = 2  # one alone does not tell latency from bandwidth
_TRIES, _PATIENCE_S = 5, 0.01  # a processor that is busy with something else may hold up several reads


def timed_reads(tier: StorageTier[R], source: R, pool: BufferPool) -> list[tuple[int, float]]:
    """Read beginnings of a record, each longer than the one before, until reads take a millisecond; two at least.

    Args:
        tier: which has the record.
        source: the record; the caller releases it.
        pool: for the buffers.

    Returns:
        Bytes of each, and seconds of the quickest of the reads, which are repeated while they take a millisecond,
        twice at least and for no more than some; none if the tier cannot be read.
    """
    found: list[tuple[int, float]] = []
    for size in _sizes(source.nbytes):
        try:
            seconds = _quickest(tier, source, pool.take(size))
        except OSError:
            return []  # a get will find it out, and count it
        found.append((size, seconds))
        if seconds > _ENOUGH_S and len(found) >= _LEAST_SIZES:
            break
    return found


def _quickest(tier: StorageTier[R], source: R, buffer: Buffer) -> float:
    took = [_timed(tier, source, buffer)]
    while min(took) > _ENOUGH_S and (len(took) < 2 or (len(took) < _TRIES and sum(took) < _PATIENCE_S)):
        took.append(_timed(tier, source, buffer))
    return min(took)


def _timed(tier: StorageTier[R], source: R, buffer: Buffer) -> float:
    begin = time.perf_counter()
    tier.read([source], [buffer])
    return time.perf_counter() - begin


def _sizes(nbytes: int) -> Sequence[int]:
    return sorted({min(size, nbytes) for size in _SIZES})
