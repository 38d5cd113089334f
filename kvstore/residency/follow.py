"""A reader follows a writer process: what that committed since becomes known here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvstore.core.guard import PUT, Guard
from kvstore.core.tokens import Tokens
from kvstore.metrics import Metric
from kvstore.residency.block import StoredBlock
from kvstore.residency.residency import Residency
from kvstore.tiers.disk.catalog import CatalogError
from kvstore.tiers.disk.entry import Scan
from kvstore.tiers.disk.tier import DiskTier


@dataclass
class Follower:
    """Takes in what a writer process committed. Thread-safe: one thread at a time, the others wait for it.

    What the writer removed is not noticed here, but when it is looked up.
    """

    residency: Residency
    # Guards that blocks arrive in the order of their numbers; a reader has no put that would take it.
    _lock: Guard = field(default_factory=lambda: Guard(PUT))

    def follow(self) -> None:
        """Makes everything findable that the writer committed before this call. A failing catalog is counted."""
        residency, disk = self.residency, self.residency.disk
        if disk is None:
            return
        with self._lock:
            try:
                scan = disk.scan_new()
            except CatalogError as error:
                residency.metrics.add(Metric.CATALOG_ERRORS, because=error)
                return
            if scan is None:
                return
            for block, tokens, bits in self._new_blocks(disk, scan):
                residency.arrive(tokens, [block], bits)

    def _new_blocks(self, disk: DiskTier, scan: Scan) -> Iterator[tuple[StoredBlock, Tokens, float]]:
        """(block, all tokens of its sequence to its end, bits a token) of what has a place and is not known yet.

        A block's place may be behind the one before it, which must have arrived by then.
        """
        residency, rows = self.residency, scan.entries
        names = {number: digest for digest, number in disk.namespaces.items()}
        ends = np.cumsum(rows["count"])
        for row, end in zip(rows, ends.tolist(), strict=True):
            record, parent, start, count = (int(row[name]) for name in ("record", "parent", "start", "count"))
            tokens = np.ascontiguousarray(scan.tokens[end - count : end])
            before = self._tokens_before(parent, start)
            if before is None:
                residency.metrics.add(Metric.UNREACHABLE_RECORDS)
                continue
            namespace = names.get(int(row["namespace"]))
            if namespace is None or record in residency.index:
                continue
            block = StoredBlock(
                record=record,
                parent=parent if start else 0,
                namespace=namespace,
                start=start,
                tokens=tokens,
                expiry=float(row["expiry"]),
                donors=scan.donors.get(record, ()),
            )
            yield block, np.concatenate([before, tokens]), float(row["bits"]) / max(1, count)

    def _tokens_before(self, parent: int, start: int) -> Tokens | None:
        """The `start` tokens up to the end of `parent`; None if that is not known here, or ends elsewhere."""
        if not start:
            return np.zeros(0, np.uint32)
        known = self.residency.whole_path(parent)
        return known[1] if known is not None and len(known[1]) == start else None
