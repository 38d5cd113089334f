"""The keys and values of donors: what members are coded against, and decoded from."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.codecs import KVView, is_delta
from kvstore.codecs.base import BlockInfo
from kvstore.config import MIB
from kvstore.core.layout import KVLayout
from kvstore.core.record import DamagedRecord, Donor, RecordHeader
from kvstore.core.tokens import Tokens
from kvstore.errors import CodecError, UnknownCodec
from kvstore.metrics import Metric, Metrics
from kvstore.residency.residency import Residency
from kvstore.residency.whole_record import read_whole
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.fs import is_passing
from kvstore.tiers.host import HostRecord
from kvstore.tiers.profiles import Profiles

_CACHE_BYTES = 64 * MIB


class DonorLost(Exception):
    """The donor is gone, damaged, or another block than it was. Internal: its member is a counted miss."""


class DonorUnreadable(Exception):
    """The donor cannot be decoded now: its profile is missing here, or the process lacks what reading takes. Internal:
    nothing is wrong with it, and it stays."""


@dataclass(frozen=True)
class DonorBlock:
    """A decoded donor.

    Attributes:
        key: key of its block.
        start: position of its first token.
        tokens: its token ids, `[n]`.
        view: its keys and values, on the CPU.
    """

    key: bytes
    start: int
    tokens: Tokens
    view: KVView


@dataclass(eq=False)
class DonorReader:
    """Reads and decodes donors. Thread-safe; `_lock` guards the cache.

    Keeps what it decoded last, because neighbouring members share their donors.

    Args:
        any_tier: all tiers hold the same values, because caches are exact; otherwise only the disk is read.
        cache_bytes: raw bytes of decoded donors to keep; one is always kept.
    """

    residency: Residency
    pool: BufferPool
    profiles: Profiles
    metrics: Metrics
    layout: KVLayout
    any_tier: bool
    cache_bytes: int = _CACHE_BYTES

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, DonorBlock] = OrderedDict()
        self._cached = 0

    def of(self, records: Sequence[int], expected: Sequence[Donor] | None = None) -> list[DonorBlock]:
        """Return the decoded donors.

        Args:
            records: their numbers.
            expected: what the member's record says of them; None: compare nothing.

        Raises:
            DonorLost: a donor is gone, damaged (it is quarantined then), or not the expected block.
            DonorUnreadable: the profile of a donor is missing, or reading it failed for a reason that passes.
        """
        found = [self._block(record) for record in records]
        if expected is not None and [block.key for block in found] != [donor.key for donor in expected]:
            raise DonorLost("another block has the donor's number")
        return found

    def start(self, record: int) -> int | None:
        """Return the position of the donor's first token; None if it is gone. Reads no record."""
        queued, held = self.residency.queued(record), self.residency.host.get(record)
        if self.any_tier and queued is not None:
            return queued.start
        if self.any_tier and held is not None:
            return held.header.start
        entry = self.residency.disk.entry(record) if self.residency.disk is not None else None
        return None if entry is None else entry.start

    def forget(self, record: int) -> None:
        """Drop a donor that is gone from the cache."""
        with self._lock:
            block = self._cache.pop(record, None)
            if block is not None:
                self._cached -= block.view.nbytes

    def clear(self) -> None:
        """Give back the memory of the cache."""
        with self._lock:
            self._cache.clear()
            self._cached = 0

    def _block(self, record: int) -> DonorBlock:
        with self._lock:
            block = self._cache.get(record)
            if block is not None:
                self._cache.move_to_end(record)
                return block
        block = self._from_queue(record)
        if block is not None:
            return block
        block = self._from_arrived(record) or self._from_host(record) or self._from_disk(record)
        with self._lock:
            if record not in self._cache:
                self._cache[record] = block
                # Anew each time, and not changed by steps: a call that was interrupted leaves no wrong sum.
                self._cached = sum(kept.view.nbytes for kept in self._cache.values())
            while self._cached > self.cache_bytes and len(self._cache) > 1:
                self._cached -= self._cache.popitem(last=False)[1].view.nbytes
        return block

    def _from_queue(self, record: int) -> DonorBlock | None:
        block = self.residency.queued(record) if self.any_tier else None
        if block is None or block.tensors is None:
            return None
        view = block.fetched().view
        return DonorBlock(block.key, block.start, block.tokens, view)

    def _from_arrived(self, record: int) -> DonorBlock | None:
        """Of a block that waits to be written and came as a record."""
        block = self.residency.queued(record) if self.any_tier else None
        if block is None or block.sealed is None:
            return None
        with contextlib.suppress(CodecError):  # another tier may have it whole
            return self._decoded(record, block.sealed.header, block.sealed.payload)
        return None

    def _from_host(self, record: int) -> DonorBlock | None:
        held: HostRecord | None = self.residency.host.get(record) if self.any_tier else None
        if held is None:
            return None
        try:
            return self._decoded(record, held.header, held.payload)
        except CodecError:
            self.residency.host.remove([record])  # the disk may have it whole
            return None

    def _from_disk(self, record: int) -> DonorBlock:
        disk = self.residency.disk
        entry = disk.locate([record])[0] if disk is not None else None
        if disk is None or entry is None:
            raise DonorLost("the donor is gone")
        try:
            found = read_whole(disk, self.pool, entry)
            return self._decoded(record, found.header, found.payload)
        except OSError as error:
            self.metrics.add(Metric.DISK_READ_ERRORS, because=error)
            if is_passing(error):
                raise DonorUnreadable from error
            return self._from_elsewhere(record, entry, Metric.DAMAGED_UNREADABLE)
        except DamagedRecord as damage:
            return self._from_elsewhere(record, entry, damage.metric)
        except CodecError:
            return self._from_elsewhere(record, entry, Metric.DAMAGED_CODEC)
        finally:
            disk.release([entry])

    def _decoded(self, record: int, header: RecordHeader, payload: memoryview) -> DonorBlock:
        if is_delta(header.codec) or header.donors:
            raise DonorLost("a member has the donor's number")
        try:
            codec = self.profiles.decoder(header.codec, header.profile)
        except UnknownCodec:
            codec = None
        if codec is None:
            raise DonorUnreadable
        info = BlockInfo(self.layout, header.tokens, header.start)
        buffer = self.pool.take(header.count * self.layout.bytes_per_token)
        view = KVView.packed(self.layout, header.count, buffer.address, buffer)
        codec.decode(info, payload, header.layer_sizes, view)
        return DonorBlock(header.key, header.start, header.tokens, view)

    def _from_elsewhere(self, record: int, entry: Entry, why: Metric) -> DonorBlock:
        """What was read is not the record: a writer process has moved it meanwhile, or it is damaged."""
        if self.residency.reject(record, entry, why):
            return self._from_disk(record)
        raise DonorLost(f"the donor is damaged: {why}")
