"""Where each record is: not yet written, on the device, in host memory, on disk. One record may be in several.

The index (trie) names the records; a record that is in no tier any more is forgotten by the index too.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.admission import SecondRead
from kvstore.block import Block
from kvstore.config import StoreConfig
from kvstore.eviction import EvictionPolicy, LeafFirstLRU
from kvstore.eviction.prior import PriorGuided
from kvstore.families.kinship import Families
from kvstore.metrics import Metrics
from kvstore.tiers.base import Source, StorageTier
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.disk.catalog import CatalogError
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import MemoryTier
from kvstore.trie import TrieIndex
from kvstore.trie.content import ContentIndex
from kvstore.trie.index import NO_LIMIT


@dataclass
class Residency:
    """All tiers of one store and the indexes over them. Thread-safe. content: of the blocks that others may be coded
    against, None where none may. arrived, forgotten: told of every record that is put, and that is gone."""

    config: StoreConfig
    index: TrieIndex
    metrics: Metrics
    content: ContentIndex | None = None

    def __post_init__(self) -> None:
        self.families = Families()
        self.arrived: list[Callable[[int], None]] = []
        self.forgotten: list[Callable[[int], None]] = []
        self.disk: DiskTier | None = None
        self.pending: dict[int, Block] = {}
        self.pinned: set[int] = set()  # the last records of pinned sequences
        # In memory only, for their write failed: a put of the same tokens writes them again.
        self.unwritten: set[int] = set()
        # Stored records that a newer one was to replace and has not yet, by that one: they go when it does.
        self.replaced: dict[int, list[int]] = {}
        self._kept: set[int] = set()  # all records of sequences that were pinned since the store was opened
        self._expiry: dict[int, float] = {}
        self._expiry_heap: list[tuple[float, int]] = []
        self._expiry_lock = threading.Lock()
        budgets = self.config
        policy: Callable[[], EvictionPolicy] = PriorGuided if budgets.eviction == "prior" else LeafFirstLRU
        self.device: DeviceTier = MemoryTier(
            "device", budgets.device.bytes, policy(), self._may_leave_memory, self._left_memory
        )
        self.host_admission = SecondRead(budgets.host.bytes)
        self.host: HostTier = MemoryTier(
            "host", budgets.host.bytes, policy(), self._may_leave_memory, self._left_memory
        )

    # ---- finding -------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> dict[str, StorageTier[Any]]:
        """The tiers whose records must be read, by name, the nearest first. Each has sources of its own kind."""
        return {} if self.disk is None else {self.disk.name: self.disk}

    def find(self, records: Sequence[int]) -> list[Source | None]:
        """The nearest source of each record, None where it is nowhere. The caller releases them (`release`)."""
        # Order matters: a block leaves `pending` only after it arrived elsewhere.
        found: list[Source | None] = [self.device.get(r) or self.pending.get(r) or self.host.get(r) for r in records]
        for tier in self.storage.values():
            missing = [i for i, source in enumerate(found) if source is None]
            if missing:
                for i, source in zip(missing, tier.locate([records[i] for i in missing]), strict=True):
                    found[i] = source
        return found

    def release(self, sources: Iterable[Source | None]) -> None:
        """Lets go of sources that `find` gave and that will not be read."""
        given = [source for source in sources if source is not None]
        for name, tier in self.storage.items():
            held = [source for source in given if source.tier == name]
            if held:
                tier.release(held)

    def touch(self, records: Sequence[int]) -> None:
        """The records of one prefix, root first, were used."""
        self.device.touch(records)
        self.host.touch(records)

    def use_donors(self, records: Iterable[int]) -> None:
        """These donors were used: a donor that is used no later than its members outlives them."""
        done: set[int] = set()
        for record in sorted(records, reverse=True):  # mostly the deepest first: what is above is done with it
            if record in done:
                continue
            try:
                namespace, tokens = self.index.path(record)
            except KeyError:
                continue
            path = [r for r in self.index.match(namespace, tokens, touch=True).records.tolist() if r]
            self.touch(path)
            done.update(path)

    def use_donors_of(self, records: Iterable[int]) -> None:
        """The members among these records were used, and with them their donors."""
        if len(self.families):
            self.use_donors(dict.fromkeys(d for r in records for d in self.families.donors(r)))

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

    def is_kept(self, record: int) -> bool:
        """Whether the record, or one that continues it, was pinned."""
        return record in self._kept

    # ---- leaving -------------------------------------------------------------------------------------------------

    def evict(self) -> list[int]:
        """The disk is full: the index gives up the record it can best spare, and with it every tier; before it go the
        members that are coded against it, which were used no later. [] for none. What is not written yet stays: it
        holds no space on disk, and a member among it is dropped, and said to be, when it is to be written."""
        record = self.index.evict(below=min(list(self.pending), default=NO_LIMIT))
        if record is None:
            return []
        members = self._written_members(record)
        self.drop(members)
        self._forget(record)
        if members:
            self.metrics.add("dropped_members", len(members))
        return self.with_replaced([*members, record])

    def drop(self, records: Iterable[int]) -> None:
        """Forgets records in memory and in the index; their catalog entries are the caller's to remove."""
        for record in records:
            self.index.remove(record)
            self._forget(record)

    def quarantine(self, record: int) -> None:
        """A record turned out damaged: it is removed everywhere, with what is coded against it, and counted. What is
        not written yet needs no donor to be read, and stays."""
        members = self._written_members(record)
        records = [*members, record]
        if members:
            self.metrics.add("damaged_donor", len(members))
        self.metrics.add("quarantined_records", len(records))
        self.drop(records)
        if self.disk is not None and not self.disk.read_only:
            try:
                self.disk.remove(self.with_replaced(records))
            except CatalogError:
                self.metrics.add("catalog_errors")

    def with_replaced(self, records: Sequence[int]) -> list[int]:
        """The records, and those on disk that they were to replace."""
        return [*(old for record in records for old in self.replaced.pop(record, ())), *records]

    def reject(self, record: int, source: Source, why: str) -> None:
        """What `source` gave is not the record: it is quarantined, unless a writer process reused the space since it
        was looked up, or another thread removed the record: that is not damage, only too late."""
        if record not in self.index:
            self.metrics.add("stale_reads")
            return
        tier = self.storage.get(source.tier)
        if tier is not None and not tier.is_current(source):
            self.metrics.add("stale_reads")
            self.drop([record])
            return
        self.metrics.add(f"damaged_{why}")
        self.quarantine(record)

    def drop_if_nowhere(self, record: int) -> None:
        """Forgets a record that no tier holds any more."""
        if record in self.pending or record in self.device or record in self.host:
            return
        if self.disk is None or not self.disk.holds(record):
            self.drop([record])

    def _written_members(self, record: int) -> list[int]:
        return [member for member in self.families.members(record) if member not in self.pending]

    def _forget(self, record: int) -> None:
        self.pending.pop(record, None)
        self.device.remove([record])
        self.host.remove([record])
        self._kept.discard(record)
        self.unwritten.discard(record)
        self.families.remove(record)
        if self.content is not None:
            self.content.remove(record)
        for told in self.forgotten:
            told(record)
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
                self.disk.remove(self.with_replaced(due))
            except CatalogError:
                self.metrics.add("catalog_errors")
