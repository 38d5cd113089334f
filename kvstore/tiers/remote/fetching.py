"""Reads records from the remote tier, each alone or with its neighbours in a parcel, and checks what comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.core.explanation import Reason
from kvstore.core.record import DamagedRecord, parse
from kvstore.core.workers import Task, Workers
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.remote.calls import RemoteCalls
from kvstore.tiers.remote.lives import Lives
from kvstore.tiers.remote.names import KEY_BYTES, RemoteNames, parcel_of
from kvstore.tiers.remote.parcel_read import ParcelRead, neighbours
from kvstore.tiers.remote.parcels import Parcels
from kvstore.tiers.remote.profiles import RemoteProfiles
from kvstore.tiers.remote.record import ExpiredRecord, RemoteRecord
from kvstore.tiers.remote.sealing import Sealer
from kvstore.tiers.remote.spots import Spot


@dataclass(frozen=True)
class Fetched:
    """What came of reading one value: the record, or why there is none. nbytes: of the value."""

    record: RemoteRecord | None
    why: Reason | None = None
    nbytes: int = 0


_HEADERS_BYTES = 1 << 16  # more than the header of a record has
Check = Callable[[Buffer], RemoteRecord]
"""Makes a record of what was read, all of it and nothing else; raises `DamagedRecord`."""


@dataclass(frozen=True)
class RemoteFetcher:
    """Thread-safe: has no state of its own.

    Attributes:
        profiles: what records are coded with.
        parcels: know where blocks lie.
        lives: is told how long values live.
        sealer: opens values; None: they are records as they are.
        clock: what deadlines go by.
    """

    calls: RemoteCalls
    names: RemoteNames
    metrics: Metrics
    pool: BufferPool
    workers: Workers
    profiles: RemoteProfiles
    parcels: Parcels
    lives: Lives
    sealer: Sealer | None
    clock: Callable[[], float]

    def fetch(
        self, keys: Sequence[bytes], deadline: float, checks: Sequence[Check], most_bytes: int
    ) -> list[Task[Fetched]]:
        """Begin to read some records, and return a task for each, in order. They never raise.

        most_bytes: of a value.
        """
        tasks, spots = list[Task[Fetched]](), [self.parcels.spots.last(key) for key in keys]
        for some in neighbours(spots):
            takes = [partial(self._fetched, keys[at], check=checks[at], deadline=deadline) for at in some]
            here = [spot for spot in spots[some.start : some.stop] if spot is not None]
            if here:
                reading = ParcelRead(here, partial(self._read_part, here[0], deadline), self.pool, takes)
                tasks += reading.tasks
                self.workers.start(reading)
            else:
                tasks.append(Task(self._fetch, keys[some.start], deadline, most_bytes, takes[0]))
                self.workers.start(tasks[-1])
        return tasks

    def read(self, key: bytes, most_bytes: int, deadline: float) -> bytes | Reason:
        """Return a small value that is no record; or why it does not come."""
        found = self._opened(key, self._read(key, deadline, most_bytes))
        return bytes(found.view) if isinstance(found, Buffer) else found

    def life(self, key: bytes, deadline: float, most_bytes: int) -> float | None:
        """Read the value of a block, and return when its life ends, 0 for never; None if that cannot be known."""
        spot = self.parcels.spots.last(key)
        if spot is None:
            came = self._read(key, deadline, most_bytes)
        else:  # what is sealed is opened as a whole, of what is not the header is enough
            part = self.pool.take(spot.nbytes if self.sealer is not None else min(spot.nbytes, _HEADERS_BYTES))
            size = self._read_part(spot, deadline, spot.offset, [part.view])
            came = part if size == len(part.view) else Reason.REMOTE_GONE
        found = self._opened(key, came)
        if isinstance(found, Reason):
            return None
        try:
            header = parse(found.view, most_bytes)
        except DamagedRecord:
            return None
        if header.key != key[:KEY_BYTES]:
            return None
        self.lives.note(key, header.expiry)
        return header.expiry

    def _fetch(
        self, key: bytes, deadline: float, most_bytes: int, take: Callable[[Buffer | Reason], Fetched]
    ) -> Fetched:
        return take(self._read(key, deadline, most_bytes))

    def _fetched(self, key: bytes, came: Buffer | Reason, check: Check, deadline: float) -> Fetched:
        """What is made of the bytes that came of a record."""
        buffer, name = self._opened(key, came), self.names.block(key)
        if isinstance(buffer, Reason):
            return Fetched(None, buffer)
        size = len(buffer.view)
        try:
            record = check(buffer)
        except ExpiredRecord as expired:
            self.lives.note(key, expired.expiry)
            self.metrics.add(Metric.REMOTE_EXPIRED, because=f"{name}: {expired}")
            return Fetched(None, Reason.REMOTE_EXPIRED)
        except DamagedRecord as damage:
            self.metrics.add(Metric.REMOTE_DAMAGED, because=f"{name}: {damage}")
            return Fetched(None, Reason.REMOTE_REFUSED)
        if record.header.expiry or self.lives.of(key):
            self.lives.note(key, record.header.expiry)
        why = self.profiles.bring(record.header.codec, record.header.profile, deadline)
        if why is not None:
            self.metrics.add(Metric.UNKNOWN_PROFILE)
            return Fetched(None, why)
        self.metrics.add(Metric.REMOTE_READ_RECORDS)
        self.metrics.add(Metric.REMOTE_READ_BYTES, size)
        return Fetched(record, nbytes=size)

    def _read(self, key: bytes, deadline: float, most_bytes: int) -> Buffer | Reason:
        """What lies under a key, or why there is nothing."""
        if self.clock() >= deadline:
            return Reason.REMOTE_LATE
        buffer = self.pool.take(most_bytes)
        size = self.calls.read(self.names.block(key), buffer.view, deadline)
        if isinstance(size, Reason):
            return size
        buffer.trim(size)
        return buffer

    def _read_part(self, spot: Spot, deadline: float, offset: int, buffers: Sequence[memoryview]) -> int | Reason:
        name = self.names.block(parcel_of(spot.parcel))
        return self.calls.read_part(name, self.parcels.head_bytes + offset, buffers, deadline)

    def _opened(self, key: bytes, came: Buffer | Reason) -> Buffer | Reason:
        """The same, opened if it is sealed."""
        if isinstance(came, Reason) or self.sealer is None:
            return came
        name = self.names.block(key)
        try:
            data = self.sealer.opened(name, came.view)
        except DamagedRecord as damage:
            self.metrics.add(Metric.REMOTE_DAMAGED, because=f"{name}: {damage}")
            return Reason.REMOTE_REFUSED
        came.view[: len(data)] = data
        came.trim(len(data))
        return came
