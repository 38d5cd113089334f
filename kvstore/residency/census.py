"""What a store knows of its records at one moment, copied so that it does not change while it is compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.residency.block import Block


@dataclass(frozen=True)
class Census:
    """A copy of what a `Ledger` says.

    Attributes:
        indexed: record numbers in the index, rising.
        queued: blocks that wait to be written, by record.
        unwritten: records whose write failed.
        replaced: stored records that are to go when a newer one is written, or with the next commit.
        leaving: forgotten records that a call is about to remove from the catalog.
        holes: records that left holes in the index.
        holes_due: records whose holes the catalog does not have yet.
        released: holes that nothing is behind any more, and that the next commit removes.
        pinned: the last records of pinned sequences.
        kept: all records of those sequences, with their bytes.
        pinned_bytes: what the ledger counts of those.
        paths: all records of the sequence that ends with a pinned record, by that record.
        expiry: end of life in unix seconds, by record.
        waiting: (end of life, record), as the queue of ends of life has them.
        donors: by member.
        members: by donor.
    """

    indexed: npt.NDArray[np.uint64]
    queued: dict[int, Block]
    unwritten: frozenset[int]
    replaced: frozenset[int]
    leaving: frozenset[int]
    holes: frozenset[int]
    holes_due: frozenset[int]
    released: frozenset[int]
    pinned: frozenset[int]
    kept: dict[int, int]
    pinned_bytes: int
    paths: dict[int, tuple[int, ...]]
    expiry: dict[int, float]
    waiting: frozenset[tuple[float, int]]
    donors: dict[int, tuple[int, ...]]
    members: dict[int, frozenset[int]]
