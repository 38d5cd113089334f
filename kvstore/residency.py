"""Where each record is: not yet written, on the device, in host memory, on disk. One record may be in several.

The index (trie) names the records; a record that is in no tier any more is forgotten by the index too.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.admission import SecondRead
from kvstore.block import Block
from kvstore.config import StoreConfig
from kvstore.eviction import LeafFirstLRU
from kvstore.metrics import Metrics
from kvstore.tiers.base import MemoryTier
from kvstore.tiers.device import DeviceBlock, DeviceTier
from kvstore.tiers.disk.catalog import CatalogError, Entry
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.host import HostRecord, HostTier
from kvstore.trie import TrieIndex
from kvstore.trie.index import NO_LIMIT

Source = DeviceBlock | Block | HostRecord | Entry


@dataclass
class Residency:
    """All tiers of one store and the index over them. Thread-safe."""

    config: StoreConfig
    index: TrieIndex
    metrics: Metrics

    def __post_init__(self) -> None:
        self.disk: DiskTier | None = None
        self.pending: dict[int, Block] = {}
        self.pinned: set[int] = set()  # the last records of pinned sequences
        # In memory only, for their write failed: a put of the same tokens writes them again.
        self.unwritten: set[int] = set()
        self._kept: set[int] = set()  # all records of sequences that were pinned since the store was opened
        self._expiry: dict[int, float] = {}
        self._expiry_heap: list[tuple[float, int]] = []
        self._expiry_lock = threading.Lock()
        budgets = self.config
        self.device: DeviceTier = MemoryTier(
            "device", budgets.device.bytes, LeafFirstLRU(), self._may_leave_memory, self._left_memory
        )
        self.host_admission = SecondRead(budgets.host.bytes)
        self.host: HostTier = MemoryTier(
            "host", budgets.host.bytes, LeafFirstLRU(), self._may_leave_memory, self._left_memory
        )

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(self, records: Sequence[int]) -> list[Source | None]:
        """The nearest source of each record, None where it is nowhere. Segments of disk entries are held: the
        caller releases them (`DiskTier.release`)."""
        # Order matters: a block leaves `pending` only after it arrived elsewhere.
        found: list[Source | None] = [self.device.get(r) or self.pending.get(r) or self.host.get(r) for r in records]
        missing = [i for i, source in enumerate(found) if source is None]
        if missing and self.disk is not None:
            for i, entry in zip(missing, self.disk.locate([records[i] for i in missing]), strict=True):
                found[i] = entry
        return found

    def touch(self, records: Sequence[int]) -> None:
        """The records of one prefix, root first, were used."""
        self.device.touch(records)
        self.host.touch(records)

    def path(self, record: int) -> list[int]:
        """The records of the prefix that ends with this one, root first; [] where the index does not know it."""
        try:
            namespace, tokens = self.index.path(record)
        except KeyError:
            return []
        return [r for r in self.index.match(namespace, tokens, touch=False).records.tolist() if r]

    def pin(self, record: int) -> None:
        """The record, and what comes before it, is never evicted."""
        self.index.pin(*self.index.path(record))
        self.pinned.add(record)
        self._kept.update(self.path(record))

    # ---- leaving -------------------------------------------------------------------------------------------------

    def evict_one(self) -> int:
        """The disk is full: the index gives up the record it can best spare, and with it every tier. 0 for none.
        What is not written yet stays: it holds no space on disk."""
        record = self.index.evict(below=min(list(self.pending), default=NO_LIMIT)) or 0
        if record:
            self._forget(record)
        return record

    def drop(self, records: Iterable[int]) -> None:
        """Forgets records in memory and in the index; their catalog entries are the caller's to remove."""
        for record in records:
            self.index.remove(record)
            self._forget(record)

    def quarantine(self, record: int) -> None:
        """A record turned out damaged: it is removed everywhere, and counted."""
        self.metrics.add("quarantined_records")
        self.drop([record])
        if self.disk is not None and not self.disk.read_only:
            try:
                self.disk.remove([record])
            except CatalogError:
                self.metrics.add("catalog_errors")

    def drop_if_nowhere(self, record: int) -> None:
        """Forgets a record that no tier holds any more."""
        if record in self.pending or record in self.device or record in self.host:
            return
        if self.disk is None or not self.disk.holds(record):
            self.drop([record])

    def _forget(self, record: int) -> None:
        self.pending.pop(record, None)
        self.device.remove(record)
        self.host.remove(record)
        self._kept.discard(record)
        self.unwritten.discard(record)
        if record in self.pinned:
            self.pinned.discard(record)
            self._kept = {r for pinned in list(self.pinned) for r in self.path(pinned)}
        with self._expiry_lock:
            self._expiry.pop(record, None)

    def _may_leave_memory(self, record: int) -> bool:
        if record not in self._kept:
            return True
        return self.disk is not None and self.disk.holds(record)

    def _left_memory(self, record: int) -> None:
        self.metrics.add("memory_evicted_records")
        self.drop_if_nowhere(record)

    # ---- expiry --------------------------------------------------------------------------------------------------

    def set_expiry(self, record: int, expiry: float) -> None:
        """expiry: unix seconds; 0 for never."""
        with self._expiry_lock:
            if expiry:
                self._expiry[record] = expiry
                heapq.heappush(self._expiry_heap, (expiry, record))
            else:
                self._expiry.pop(record, None)

    def expiry(self, record: int) -> float:
        return self._expiry.get(record, 0.0) if self._expiry else 0.0

    def is_expired(self, record: int) -> bool:
        expiry = self.expiry(record)
        return expiry != 0.0 and expiry <= time.time()

    def expire(self) -> None:
        """Removes what is past its time, ends of prefixes first."""
        due: list[int] = []
        now = time.time()
        with self._expiry_lock:
            while self._expiry_heap and self._expiry_heap[0][0] <= now:
                expiry, record = heapq.heappop(self._expiry_heap)
                if self._expiry.get(record) == expiry:
                    due.append(record)
        if not due:
            return
        self.drop(sorted(due, reverse=True))
        self.metrics.add("expired_records", len(due))
        if self.disk is not None:
            try:
                self.disk.remove(due)
            except CatalogError:
                self.metrics.add("catalog_errors")
