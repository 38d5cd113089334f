"""What a store knows of its records at one moment, copied out, to be looked at in peace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.residency.block import Block


@dataclass(frozen=True)
class Census:
    """A copy of what a `Ledger` says. indexed: record numbers, rising. replaced: stored records that are to go when a
    newer one is written, or next. paths: of each pinned record, those of its sequence. waiting: (end of life, record)
    as they wait for their time. donors: by member. members: by donor."""

    indexed: npt.NDArray[np.uint64]
    queued: dict[int, Block]
    unwritten: frozenset[int]
    replaced: frozenset[int]
    pinned: frozenset[int]
    kept: frozenset[int]
    paths: dict[int, tuple[int, ...]]
    expiry: dict[int, float]
    waiting: frozenset[tuple[float, int]]
    donors: dict[int, tuple[int, ...]]
    members: dict[int, frozenset[int]]
