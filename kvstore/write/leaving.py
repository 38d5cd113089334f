"""Records that the disk gives up, on their way to the remote tier."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.core.record import DamagedRecord, RecordHeader
from kvstore.metrics import Metric
from kvstore.residency.residency import Residency
from kvstore.residency.whole_record import read_whole
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.host import HostRecord

_TRIES = 8


@dataclass(frozen=True)
class LeavingRecord:
    """A record that the catalog forgets. parent: number of the one before it, 0 for none."""

    record: HostRecord
    parent: int

    @property
    def life_s(self) -> float | None:
        """How long it is of use; None: for ever."""
        expiry = self.record.header.expiry
        return max(1.0, expiry - time.time()) if expiry else None


class LeavingRecords:
    """A bounded queue of them, by key. Thread-safe: `_lock` guards all fields.

    They are read while the disk makes room, by the thread that writes, before anything takes their place: the end of a
    sequence first, as evictions go. Whoever writes them takes a record after those before it.

    Args:
        most_bytes: of records that wait.
        keep_tails: take blocks that are shorter than others, too.
    """

    def __init__(self, residency: Residency, pool: BufferPool, most_bytes: int, keep_tails: bool = False) -> None:
        self._residency = residency
        self._pool = pool
        self._most_bytes = most_bytes
        self._keep_tails = keep_tails
        self._records: OrderedDict[bytes, LeavingRecord] = OrderedDict()
        self._tries: Counter[bytes] = Counter()
        self._continued: Counter[bytes] = Counter()  # how many of them continue a block
        self._bytes = 0
        self._lock = threading.Lock()

    def take(self, entry: Entry) -> bool:
        """Read a record that the disk evicts; False, which is counted, if it cannot be kept."""
        disk, metrics = self._residency.disk, self._residency.metrics
        whole = len(entry.tokens) == self._residency.config.block_tokens
        if disk is None or not (whole or self._keep_tails):
            return False  # tails are replaced by what follows them
        if entry.donors:
            metrics.add(Metric.DROPPED_REMOTE_LEFT)  # what it is coded against goes, too
            return False
        if self._bytes + entry.nbytes > self._most_bytes:
            metrics.add(Metric.DROPPED_REMOTE_QUEUE)
            return False
        try:
            record = read_whole(disk, self._pool, entry)
        except (OSError, DamagedRecord) as error:
            metrics.add(Metric.DROPPED_REMOTE_LEFT, because=error)
            return False
        with self._lock:
            self._remove(record.header.key)  # one of the same block, with other tokens of windows
            self._records[record.header.key] = LeavingRecord(record, entry.parent)
            self._continued[record.header.parent] += 1
            self._bytes += record.nbytes
        return True

    def next(self) -> list[LeavingRecord]:
        """Return a record and those of its sequence that leave before it, root first; [] if none waits. With tails: one
        that none here continues, for those before it are of no use without it."""
        with self._lock:
            chain: list[LeavingRecord] = []
            leaves = (key for key in self._records if not (self._keep_tails and self._continued[key]))
            key = next(leaves, None)
            while key is not None and key in self._records:
                chain.append(self._records[key])
                key = chain[-1].record.header.parent
            return chain[::-1]

    def may_come(self, key: bytes) -> bool:
        """Whether what a record follows may still come: the record waits for it, some times."""
        with self._lock:
            self._tries[key] += 1
            self._records.move_to_end(key)
            return self._tries[key] < _TRIES

    def done(self, leaving: LeavingRecord) -> None:
        """The record is written, or given up."""
        with self._lock:
            self._remove(leaving.record.header.key)
            self._tries.pop(leaving.record.header.key, None)

    def erase(self, keys: Iterable[bytes], namespace: bytes | None) -> list[RecordHeader]:
        """Give up the records of these blocks and what continues them, or those of a namespace; return what they
        were."""
        with self._lock:
            following = defaultdict[bytes, list[bytes]](list)
            for key, leaving in self._records.items():
                following[leaving.record.header.parent].append(key)
            left = [*keys, *(k for k, each in self._records.items() if each.record.header.namespace == namespace)]
            gone: dict[bytes, None] = {}
            while left:
                key = left.pop()
                if key not in gone:
                    gone[key] = None
                    left += following.get(key, [])
            found = [self._records[key].record.header for key in gone if key in self._records]
            for header in found:
                self._remove(header.key)
                self._tries.pop(header.key, None)
            return found

    def _remove(self, key: bytes) -> None:
        found = self._records.pop(key, None)
        if found is None:
            return
        self._bytes -= found.record.nbytes
        parent = found.record.header.parent
        self._continued[parent] -= 1
        if not self._continued[parent]:
            del self._continued[parent]

    def __len__(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self._bytes
