"""What each namespace takes on disk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstore.config import PAGE_BYTES
from kvstore.core.distinct import distinct
from kvstore.tiers.disk.entry import Entry, Scan


class Use(NamedTuple):
    """Records of one namespace: how many, their tokens, and their bytes in whole pages."""

    records: int = 0
    tokens: int = 0
    bytes: int = 0


class Usage:
    """Records, tokens and bytes by the number of the namespace. Guarded by whoever owns it.

    Example:
        >>> from kvstore.tiers.disk.entry import ENTRY
        >>> usage = Usage(Scan.of(np.zeros(0, ENTRY), np.zeros(0, np.uint32)))
        >>> usage.snapshot()
        {}
    """

    def __init__(self, scan: Scan) -> None:
        """Count what the catalog has."""
        rows = scan.entries
        numbers, which = distinct(rows["namespace"])
        columns = (
            np.bincount(which, minlength=len(numbers)),
            np.bincount(which, rows["count"], len(numbers)).astype(np.int64),
            np.bincount(which, rows["pages"], len(numbers)).astype(np.int64) * PAGE_BYTES,
        )
        counts = zip(*(column.tolist() for column in columns), strict=True)
        self._by_number = {n: list(found) for n, found in zip(numbers.tolist(), counts, strict=True)}

    def count(self, entry: Entry, sign: int) -> None:
        """Count an entry that comes (1) or goes (-1)."""
        found = self._by_number.setdefault(entry.namespace, [0, 0, 0])
        found[0] += sign
        found[1] += sign * len(entry.tokens)
        found[2] += sign * entry.extent.nbytes
        if not found[0]:
            del self._by_number[entry.namespace]

    def snapshot(self) -> dict[int, Use]:
        """Return what every namespace with records takes."""
        return {number: Use(*found) for number, found in self._by_number.items()}
