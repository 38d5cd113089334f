"""Where each record is: not yet written, on the device, in host memory, on disk. One record may be in several.

A record that is in no tier any more is forgotten by the index too. `states` has the table of what a record may be, and
`check` holds a store against it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.config import PAGE_BYTES
from kvstore.core.explanation import Reason
from kvstore.core.keys import namespace_digest
from kvstore.core.record import NO_KEY, key_tag
from kvstore.core.workers import Workers
from kvstore.metrics import Metric
from kvstore.residency.block import Block
from kvstore.residency.departures import BlockName
from kvstore.residency.disk_eviction import DiskEviction
from kvstore.tiers.admission import SecondRead
from kvstore.tiers.base import Source, StorageTier
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.shared_host import SharedHost


@dataclass
class Residency(DiskEviction):
    """All tiers of one store, and its `Ledger` of records.

    Thread-safe: the tiers are constant; the ledger's lock guards what the ledger says, and each tier has its own lock,
    which is taken below that one.

    Args:
        open_disk: opens the disk tier of this residency, which the tier asks what may go when space runs out; None for
            a store in memory. If it raises, nothing is left open.

    Attributes:
        device, host, disk: the tiers; `disk` is None for a store in memory.
        own: threads on which records leave when a get finds them gone or damaged, so that an interrupt of the get does
            not leave them half gone; without threads that happens on the caller's.
        host_admission: decides which records that were read from disk the host tier keeps.

    Example:
        >>> from kvstore import StoreConfig
        >>> from kvstore.metrics import Metrics
        >>> from kvstore.trie import TrieIndex
        >>> Residency(StoreConfig(), TrieIndex(64), Metrics()).find([7])
        [None]
    """

    open_disk: InitVar[Callable[[Residency], DiskTier] | None] = None
    own: Workers = field(default_factory=lambda: Workers(0, "kvstore-own"))

    def __post_init__(self, open_disk: Callable[[Residency], DiskTier] | None) -> None:
        super().__post_init__()
        self._put_again: tuple[Callable[[Sequence[int], int], None], ...] = ()
        self._used: tuple[Callable[[Sequence[int], int], None], ...] = ()  # replaced as a whole, and so are the next
        self._evicted: tuple[Callable[[Sequence[Entry]], None], ...] = ()
        self._done: tuple[Callable[[Sequence[Block]], None], ...] = ()
        self._digests: dict[int, bytes] = {}  # of namespaces, by number; replaced as a whole
        self._damaged: set[int] = set()  # records that a thread is about to quarantine; guarded by _lock
        self._unreadable: set[int] = set()  # records that could not be decoded here; guarded by _lock
        self._unsure: dict[int, Reason] = {}  # records that may be nowhere, and why that would be; guarded by _lock
        budget, policy = self.config.device.bytes, self._new_policy
        self.device: DeviceTier = MemoryTier(
            "device", budget, policy(), self._may_leave_memory, self._left_memory, policy
        )
        self.host_admission = SecondRead(self.config.host.bytes)
        self.host: HostTier = self._new_host()
        if open_disk is not None:
            self.disk = open_disk(self)
        self._keeps_holes = self.disk is not None and not self.disk.read_only

    def _new_host(self) -> HostTier:
        budget, policy = self.config.host.bytes, self._new_policy
        shares = {
            namespace_digest(name): (tenant.host_quota_bytes, tenant.host_reserved_bytes)
            for name, tenant in self.config.tenants.items()
            if tenant.host_quota_bytes is not None or tenant.host_reserved_bytes
        }
        if shares:
            return SharedHost(budget, policy, shares, self._may_leave_memory, self._left_memory)
        return MemoryTier("host", budget, policy(), self._may_leave_memory, self._left_memory, policy)

    def close(self) -> None:
        """Close the disk tier, and give back the memory of the others. Idempotent."""
        if self.disk is not None:
            self.disk.close()
        self.host.clear()
        self.device.clear()

    def load_content(
        self,
        namespaces: Sequence[bytes],
        which: npt.NDArray[np.uint32],
        records: npt.NDArray[np.uint64],
        parents: npt.NDArray[np.uint64],
        counts: npt.NDArray[np.uint32],
    ) -> None:
        """Lets others find these records as donors, at open; their tokens are in the index. See
        `ContentIndex.insert_many`."""
        with self._lock:
            if self.content is not None:
                self.content.insert_many(namespaces, which, records, parents, counts, None)

    # ---- finding -------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> dict[str, StorageTier[Any]]:
        """The tiers whose records must be read, by name, the nearest first. Each has sources of its own kind."""
        return {} if self.disk is None else {self.disk.name: self.disk}

    def find(self, records: Sequence[int]) -> list[Source | None]:
        """The nearest source of each record, None where it is nowhere. The caller releases them (`release`)."""
        # No lock, but the order matters: a block leaves the queue only after it arrived elsewhere.
        found: list[Source | None] = [self.device.get(r) or self._pending.get(r) or self.host.get(r) for r in records]
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
        self.savings.count_use()
        self.device.touch(records)
        self.host.touch(records)
        if self._disk_order is not None:
            self.own.run(self._touch_disk, records)

    def use(self, records: Sequence[int], end: int = 0, put: bool = False) -> None:
        """The records of one prefix, root first, were used by somebody who put or gets it: `touch`, and with members
        their donors. Whoever listens is told.

        Args:
            end: where the prefix ends, in the last record; 0: where that does.
            put: it was put, and its end was stored before.
        """
        self.touch(records)
        self.use_donors_of(records)
        for listener in (*self._used, *(self._put_again if put else ())):
            listener(records, end)

    def on_use(self, listener: Callable[[Sequence[int], int], None]) -> None:
        """Call this from now on with the records of each prefix that is used, and where it ends (`use`), on any thread;
        it must not raise."""
        self._used = (*self._used, listener)

    def on_put_again(self, listener: Callable[[Sequence[int], int], None]) -> None:
        """Call this from now on as `on_use` does, but only for what was put and whose end was stored before."""
        self._put_again = (*self._put_again, listener)

    def on_written(self, listener: Callable[[Sequence[Block]], None]) -> None:
        """Call this from now on with the blocks of each put that are not queued any more; it must not raise."""
        self._done = (*self._done, listener)

    def on_evicted(self, listener: Callable[[Sequence[Entry]], None]) -> None:
        """Call this from now on with what the disk evicts, before anything is written in its place, on a thread that
        holds the disk's write lock; it must not raise."""
        self._evicted = (*self._evicted, listener)

    def _touch_disk(self, records: Sequence[int]) -> None:
        with self._lock:
            if self._disk_order is not None:
                self._disk_order.touch(records)

    def use_donors(self, records: Iterable[int]) -> None:
        """These donors were used: a donor that is used no later than its members outlives them.

        With a donor what stands before it was used, and what that is coded against: a member in its beginning would
        otherwise leave together with an old donor, and the donor could be reached no more.
        """
        needed = dict.fromkeys(records, 0)  # donors, by when a member of theirs was used last
        waiting = sorted(-record for record in needed)
        used: dict[int, int] = {}
        now = 0
        while waiting:  # the highest number first: what it needs is older, and of one sequence the deepest comes first
            record = -heapq.heappop(waiting)
            known = self.whole_path(record) if used.get(record, -1) < needed[record] else None
            if known is None:
                continue
            now += 1
            path = [r for r in self.index.match(*known, touch=True).records.tolist() if r]
            self.touch(path)
            used.update(dict.fromkeys(path, now))
            for donor in (d for r in path for d in self._families.donors(r)):
                if donor not in needed:
                    heapq.heappush(waiting, -donor)
                needed[donor] = now

    def use_donors_of(self, records: Iterable[int]) -> None:
        """The members among these records were used, and with them their donors."""
        if len(self._families):
            self.use_donors(dict.fromkeys(d for r in records for d in self._families.donors(r)))

    # ---- writing and leaving ------------------------------------------------------------------------------------

    def written(self, blocks: Sequence[Block], on_disk: set[int]) -> int:
        """The blocks of one put were written as far as that was possible: those `on_disk` are durable, the others are
        in memory only, or gone. Returns how many of them are wanted and could not be written."""
        with self._lock:
            lost = self._left_queue(blocks, on_disk)
            for block in blocks:
                self._pins.resize(block.record)
            self._order_written(blocks, on_disk)
            refused = self._refused.intersection(lost)
            self._refused.difference_update(block.record for block in blocks)
        self._drop(refused)
        for record in set(lost) - refused:
            self.drop_if_nowhere(record, Reason.DROPPED)
            if self.disk is None and record not in self.index:
                self.metrics.add(Metric.DROPPED_NO_MEMORY)
        self._look_again()
        self.write_holes()
        for listener in self._done:
            listener(blocks)
        return len(lost) if self.disk is not None else 0

    def write_holes(self) -> None:
        """Blocks that could not be written may stand before others that are on disk: the catalog learns of them."""
        if self.holes.due:
            self._remove_entries([])

    def quarantine(self, record: int) -> None:
        """A record turned out damaged: it is removed everywhere, with what is coded against it, and counted. What is
        not written yet needs no donor to be read, and stays."""
        self.own.run(self._quarantine, record)

    def _quarantine(self, record: int) -> None:
        with self._lock:
            members = self._written_members(record)
            gone = self._forget_all([*members, record], Reason.DAMAGED)
        self._tell(self._forgotten, [*members, record])
        if members:
            self.metrics.add(Metric.DAMAGED_DONOR, len(members))
        self.metrics.add(Metric.QUARANTINED_RECORDS, len(members) + 1)
        self._remove_entries(gone)

    def reject(self, record: int, source: Source, why: Metric) -> bool:
        """What `source` gave is not the record: it is quarantined, unless a writer process reused the space since it
        was looked up, or another thread removed the record: that is not damage, only too late.

        Returns:
            Whether the record may lie elsewhere by now: then it stays, and can be looked up and read again.
        """
        return self.own.run(self._reject, record, source, why)

    def _reject(self, record: int, source: Source, why: Metric) -> bool:
        if not record:  # a block from the remote tier: none of this store's records
            self.metrics.add(Metric.REMOTE_DAMAGED, because=why.meaning)
            return False
        if record not in self.index:
            self.metrics.add(Metric.STALE_READS)
            return False
        tier = self.storage.get(source.tier)
        if tier is not None and not tier.is_current(source):
            self.metrics.add(Metric.STALE_READS)
            if tier.lacks(record):
                self.forget([record], Reason.EVICTED)
                return False
            return True
        with self._lock:
            if record not in self.index or record in self._damaged:
                self.metrics.add(Metric.STALE_READS)
                return False
            self._damaged.add(record)
        try:
            self.metrics.add(why, because=f"record {record} in the {source.tier} tier")
            self.quarantine(record)
        finally:
            with self._lock:
                self._damaged.discard(record)
        return False

    def note_unreadable(self, record: int) -> None:
        """A record is whole and could not be decoded here: something that it needs is missing. It stays until a put
        brings its tokens, or somebody brings what is missing."""
        with self._lock:
            if record in self.index:
                self._unreadable.add(record)

    def note_readable(self, record: int) -> None:
        """A record was decoded."""
        if record in self._unreadable:  # hardly ever
            with self._lock:
                self._unreadable.discard(record)

    @property
    def has_unreadable(self) -> bool:
        """Whether there are records that could not be decoded when they were read last."""
        return bool(self._unreadable)

    def unreadable_among(self, records: Iterable[int]) -> frozenset[int]:
        """Those that could not be decoded when they were read last."""
        return frozenset(self._unreadable.intersection(records) if self._unreadable else ())

    def drop_members(self, donors: Iterable[int]) -> None:
        """What is coded against these records, which cannot be decoded here, cannot be decoded, either: it is removed
        everywhere, and counted. What is not written yet needs no donor, and stays."""
        self.own.run(self._drop_members, donors)

    def _drop_members(self, donors: Iterable[int]) -> None:
        with self._lock:
            members = sorted({member for donor in donors for member in self._written_members(donor)})
            gone = self._forget_all(members, Reason.DROPPED)
        self._tell(self._forgotten, members)
        self.metrics.add(Metric.DROPPED_MEMBERS, len(members))
        self._remove_entries(gone)

    def may_be_there(self, record: int) -> bool:
        """Return whether a record that no tier found is one that a tier may have: it cannot be asked, or could not."""
        return record in self.index and not all(tier.lacks(record) for tier in self.storage.values())

    def _look_again(self) -> None:
        """Forgets records that are nowhere, and of which that could not be known when they left memory."""
        with self._lock:
            unsure = list(self._unsure.items())
        for record, reason in unsure:
            with self._lock:
                self._unsure.pop(record, None)
            if record in self.index:
                self.drop_if_nowhere(record, reason)
            if record in self._unsure:
                return  # the others cannot be asked for, either

    def drop_if_nowhere(self, record: int, reason: Reason) -> bool:
        """Forgets a record that no tier holds any more, and says whether it did. reason: why that is so."""
        return self.own.run(self._drop_if_nowhere, record, reason)

    def _drop_if_nowhere(self, record: int, reason: Reason) -> bool:
        with self._lock:
            if record in self._pending or record in self.device or record in self.host:
                return False
            lacks = [tier.lacks(record) for tier in self.storage.values()]
            if not all(lacks):
                if None in lacks:
                    self._unsure[record] = reason
                return False
            self._abandoned += [old for old in self._forget_all([record], reason) if old != record]
            self.holes.release(record)  # the catalog may have a hole since it is in memory alone
        self._tell(self._forgotten, [record])
        return True

    def drop_late(self, records: Iterable[int]) -> None:
        """Frees what the memory tiers took of records that left while they were on their way there."""
        with self._lock:
            for record in records:
                if record not in self.index and record not in self._pending:
                    self.device.remove([record])
                    self.host.remove([record])

    def _forget(self, record: int) -> None:
        super()._forget(record)
        self._unreadable.discard(record)
        self.device.remove([record])
        self.host.remove([record])
        if self._disk_order is not None:
            self._disk_order.forget(record)

    def _no_longer_kept(self, records: Sequence[int]) -> None:
        if self._disk_order is not None and records:
            self._disk_order.unpinned(records)

    def size_of(self, record: int) -> int:
        if (known := super().size_of(record)) or self.disk is None:
            source = self.host.get(record) or self.device.get(record)
            return known or (source.nbytes if source is not None else 0)
        entry = self.disk.entry(record)
        return entry.nbytes if entry is not None else 0

    def can_hold(self) -> int:
        """The most bytes of records that the store can hold: on disk, or in the larger tier of a store without one."""
        return self.disk.capacity if self.disk is not None else max(self.host.budget, self.device.budget)

    def most_new_records(self) -> int:
        """The most records that fit beside those that pins keep: what `put` can know before it codes them."""
        free = max(0, self.can_hold() - self.pinned_bytes)
        return free // PAGE_BYTES if self.holds_pages else free

    @property
    def pin_budget(self) -> int:
        """The most bytes that pins may keep: a share of what is not reserved."""
        most = self.disk.usual_capacity if self.disk is not None else self.can_hold()
        reserved = sum(tenant.reserved_bytes for tenant in self.config.tenants.values())
        return int(self.config.pinned_share * (most - reserved))

    def pin_stats(self) -> dict[str, int]:
        """sequences: pinned ones. bytes: of the records that they keep. budget: the most that these may take."""
        return {**super().pin_stats(), "budget": self.pin_budget}

    def entries_leave(self, entries: Sequence[Entry]) -> None:
        """The catalog gives up the entries of records that were forgotten: they say which blocks those were."""
        found = [entry for entry in entries if self.departures.expects(entry.record)]
        evicted = [entry for entry in found if self.departures.expects(entry.record, Reason.EVICTED)]
        for listener in self._evicted if evicted else ():
            listener(evicted)
        if self.disk is None or not found:
            return
        if not all(entry.namespace in self._digests for entry in found):
            self._digests = {number: digest for digest, number in self.disk.namespaces.items()}
        names = []
        for entry in found:
            after = entry.parent_tag if entry.start else key_tag(self._digests.get(entry.namespace, NO_KEY))
            names.append((entry.record, BlockName(entry.tokens.tobytes(), entry.tag, after)))
        self.departures.found(names)

    def _remove_entries(self, records: Sequence[int]) -> None:
        if self.disk is None:
            return
        if self.disk.read_only:  # its writer process removes them
            self.entries_leave([entry for entry in map(self.disk.entry, records) if entry is not None])
            return
        self.will_remove(records)
        try:
            self.disk.remove(records)
        except CatalogError as error:
            self.metrics.add(Metric.CATALOG_ERRORS, because=error)
        finally:
            self.has_removed(records)

    def _may_leave_memory(self, record: int) -> bool:
        # Called by a memory tier that holds its own lock: nothing here may ask for the lock of residency.
        if not self._pins.is_kept(record):
            return True
        return self._is_stored(record)

    def _is_stored(self, record: int) -> bool:
        return any(tier.holds(record) for tier in self.storage.values())

    def _left_memory(self, record: int) -> None:
        self.metrics.add(Metric.MEMORY_EVICTED_RECORDS)
        if self._is_stored(record):
            return  # needs no lock: whoever takes it from the disk, too, forgets it
        self.drop_if_nowhere(record, Reason.DROPPED if record in self._unwritten else Reason.EVICTED)

    def expire(self) -> None:
        """Removes what is past its time, ends of prefixes first."""
        if self._expiry.is_due():
            self.own.run(self._expire)

    def _expire(self) -> None:
        with self._lock:
            due = sorted(self._expiry.due(), reverse=True)
            gone = self._forget_all(due, Reason.EXPIRED)
        if due:
            self._tell(self._forgotten, due)
            self.metrics.add(Metric.EXPIRED_RECORDS, len(due))
            self._remove_entries(gone)
