"""The remote tier: records that stores of one identity share, read within a deadline, written in the background.

It is no `StorageTier`. That one is asked by record number, for blocks that the index knows; the remote tier is asked by
key, for blocks that this store has never seen, and may take its time. So a get looks there itself (`read.remote`), and
what it brings goes on as records in memory, checked before anybody sees them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.core.explanation import Reason
from kvstore.core.record import DamagedRecord
from kvstore.core.workers import Task, Workers
from kvstore.errors import RemoteError, RemoteTimeout, RemoteTooLarge
from kvstore.metrics import Metric, Metrics
from kvstore.remote_config import RemoteConfig
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.remote.beliefs import Beliefs
from kvstore.tiers.remote.link import RemoteLink, Skipped
from kvstore.tiers.remote.listing import Listing
from kvstore.tiers.remote.names import RemoteNames
from kvstore.tiers.remote.profiles import RemoteProfiles
from kvstore.tiers.remote.record import TIER, RemoteRecord
from kvstore.tiers.remote.sealing import Sealer
from kvstore.tiers.remote.search import leading

_CLOSING_S = 1.0  # see `RemoteLink`
_SEAL_BYTES = 1 << 10  # more than sealing adds


@dataclass(frozen=True)
class Fetched:
    """What came of reading one value: the record, or why there is none. nbytes: of the value."""

    record: RemoteRecord | None
    why: Reason | None = None
    nbytes: int = 0


Check = Callable[[Buffer], RemoteRecord]
"""Makes a record of what was read, all of it and nothing else; raises `DamagedRecord`."""


class RemoteTier:
    """Reads and writes the values of one identity. Thread-safe. No call raises what a server does wrong.

    Args:
        most_bytes: of a value; a larger one is a miss.
        sealer: seals values; None: they are records as they are.
        beliefs: which blocks are there, where others note that, too.
        listing: which are not; None: each is asked for.

    Attributes:
        config: the settings.
        profiles: what records are coded with.
        beliefs: which blocks are there, by key.
        listing: which were not there when they were listed; None where that is not done.
    """

    def __init__(
        self,
        config: RemoteConfig,
        names: RemoteNames,
        link: RemoteLink,
        metrics: Metrics,
        pool: BufferPool,
        profiles: RemoteProfiles,
        most_bytes: int,
        sealer: Sealer | None = None,
        clock: Callable[[], float] = time.monotonic,
        beliefs: Beliefs | None = None,
        listing: Listing | None = None,
    ) -> None:
        self.config = config
        self.profiles = profiles
        self.beliefs = Beliefs(config.belief_s, config.miss_s, clock) if beliefs is None else beliefs
        self.clock = clock
        self._fresh = Beliefs(config.ttl_s / 2, 0.0, clock)  # whose life was renewed not long ago
        self._names = names
        self._link = link
        self._metrics = metrics
        self._pool = pool
        self._most_bytes = most_bytes
        self._sealer = sealer
        self.listing = listing
        self._workers = Workers(config.in_flight, "kvstore-remote")

    @property
    def name(self) -> str:
        """What metrics and hits call the tier."""
        return TIER

    # ---- reading -------------------------------------------------------------------------------------------------

    def leading(self, keys: Sequence[bytes], deadline: float) -> int:
        """Return how many of the first of these keys, which follow each other, seem to be there.

        deadline: by `clock`; what is not known by then does not count.
        """
        if not self._link.is_up("read"):
            self._metrics.add(Metric.REMOTE_SKIPPED, len(keys))
            return 0
        engine = self._link.engine()
        batch = engine.limits.exist_batch if engine is not None else 1
        return leading(keys, self._believed, lambda asked: self._exist(asked, deadline), batch)

    def there(self, keys: Sequence[bytes], deadline: float, sure: bool = False) -> list[bool | None]:
        """Return for each key whether its value seems to be there, asking for all that is not known at once; None where
        that cannot be known in time. sure: ask also for what is believed not to be there."""
        known = [(self.beliefs.of(key) or None) if sure else self._believed(key) for key in keys]
        unknown = [key for key, there in zip(keys, known, strict=True) if there is None]
        if not unknown:
            return known
        if not self._link.is_up("read"):
            self._metrics.add(Metric.REMOTE_SKIPPED, len(unknown))
            return known
        asked = iter(self._exist(unknown, deadline))
        return [next(asked) if there is None else there for there in known]

    def _believed(self, key: bytes) -> bool | None:
        """Whether a value is there, if that need not be asked."""
        known = self.beliefs.of(key)
        if known is None and self.listing is not None and self.listing.lacks(key):
            self._metrics.add(Metric.REMOTE_UNLISTED)
            return False
        return known

    def fetch(
        self, keys: Sequence[bytes], deadline: float, checks: Sequence[Check], more_bytes: int = 0
    ) -> list[Task[Fetched]]:
        """Begin to read the values of some keys, and return a task for each, in order. They never raise.

        more_bytes: so much larger than others the values may be.
        """
        most = self._most_bytes + more_bytes
        tasks = [Task(self._fetch, key, deadline, check, most) for key, check in zip(keys, checks, strict=True)]
        for task in tasks:
            self._workers.start(task)
        return tasks

    def read(self, key: bytes, most_bytes: int, deadline: float) -> bytes | Reason:
        """Return a small value that is no record; or why it does not come."""
        found = self._read(key, deadline, most_bytes + _SEAL_BYTES)
        return bytes(found.view) if isinstance(found, Buffer) else found

    def _fetch(self, key: bytes, deadline: float, check: Check, most_bytes: int) -> Fetched:
        buffer, name = self._read(key, deadline, most_bytes), self._names.block(key)
        if isinstance(buffer, Reason):
            return Fetched(None, buffer)
        size = len(buffer.view)
        try:
            record = check(buffer)
        except DamagedRecord as damage:
            self._metrics.add(Metric.REMOTE_DAMAGED, because=f"{name}: {damage}")
            return Fetched(None, Reason.REMOTE_REFUSED)
        if not self.profiles.bring(record.header.codec, record.header.profile, deadline):
            self._metrics.add(Metric.UNKNOWN_PROFILE)
            return Fetched(None, Reason.REMOTE_LATE)
        self._metrics.add(Metric.REMOTE_READ_RECORDS)
        self._metrics.add(Metric.REMOTE_READ_BYTES, size)
        return Fetched(record, nbytes=size)

    def _read(self, key: bytes, deadline: float, most_bytes: int) -> Buffer | Reason:
        """What lies under a key, opened if it is sealed; or why there is nothing."""
        left = deadline - self.clock()
        if left <= 0:
            return Reason.REMOTE_LATE
        buffer, name = self._pool.take(most_bytes), self._names.block(key)
        try:
            size = self._link.call("read", name, lambda e, timeout_s: e.get_into(name, buffer.view, timeout_s), left)
        except Skipped:
            self._metrics.add(Metric.REMOTE_SKIPPED)
            return Reason.REMOTE_FAILED
        except RemoteTooLarge as error:
            self._metrics.add(Metric.REMOTE_DAMAGED, because=error)
            return Reason.REMOTE_REFUSED
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_READ_ERRORS, because=error)
            return Reason.REMOTE_LATE if isinstance(error, RemoteTimeout) else Reason.REMOTE_FAILED
        if size is None:
            return Reason.REMOTE_GONE
        if self._sealer is not None:
            try:
                data = self._sealer.opened(name, buffer.view[:size])
            except DamagedRecord as damage:
                self._metrics.add(Metric.REMOTE_DAMAGED, because=f"{name}: {damage}")
                return Reason.REMOTE_REFUSED
            size = len(data)
            buffer.view[:size] = data
        buffer.trim(size)
        return buffer

    def _exist(self, keys: Sequence[bytes], deadline: float) -> list[bool | None]:
        """Whether each is there; None where that cannot be known in time. One call for each server."""
        engine = self._link.engine()
        if engine is None:
            return [None] * len(keys)
        names = [self._names.block(key) for key in keys]
        groups: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            groups.setdefault(engine.endpoint(name), []).append(i)
        tasks = [(which, Task(self._ask, [names[i] for i in which], deadline)) for which in groups.values()]
        for _, task in tasks:
            self._workers.start(task)
        found: list[bool | None] = [None] * len(keys)
        for which, task in tasks:
            if not task.is_done(max(0.0, deadline - self.clock())):
                task.cancel()
                continue
            for i, answer in zip(which, task.result(), strict=True):
                found[i] = answer
        for there in (True, False):
            self.beliefs.note([key for key, answer in zip(keys, found, strict=True) if answer is there], there)
        return found

    def _ask(self, names: Sequence[str], deadline: float) -> Sequence[bool | None]:
        left_s = deadline - self.clock()
        if left_s <= 0:
            return [None] * len(names)
        try:
            return self._link.call("read", names[0], lambda e, timeout_s: e.exist(names, timeout_s), left_s)
        except Skipped:
            self._metrics.add(Metric.REMOTE_SKIPPED, len(names))
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_READ_ERRORS, because=error)
        return [None] * len(names)

    # ---- writing: for one thread ---------------------------------------------------------------------------------

    def absent(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """Return those of the keys that are not known to be there, asking for all of them at once; None if the servers
        may not be asked now."""
        unknown = [key for key in keys if self.beliefs.of(key) is not True]
        if not unknown:
            return []
        found = self._exist(unknown, self.clock() + self.config.write_timeout_s)
        if None in found:
            return None
        return [key for key, there in zip(unknown, found, strict=True) if not there]

    def write(self, key: bytes, record: memoryview, profile: bytes, life_s: float | None = None) -> bool:
        """Write a record, unless there is one; return whether it is there now. What fails is counted.

        profile: what it needs; it is written first.
        life_s: how long it is of use; None: for ever.
        """
        if not self.profiles.send(profile):
            return False
        lives = [seconds for seconds in (self.config.ttl_s or None, life_s) if seconds is not None]
        done = self._put(self._names.block(key), record, min(lives, default=None))
        if self.listing is not None:
            self.listing.add([key])  # after: one that began meanwhile may have passed it. It may be there if it failed
        if not done:
            return False
        self.beliefs.note([key], True)
        self._fresh.note([key], True)
        return True

    def renew(self, keys: Sequence[bytes]) -> None:
        """Let values that were used live on, unless that was done not long ago."""
        engine, ttl_s = self._link.engine(), self.config.ttl_s
        old = [key for key in keys if self._fresh.of(key) is None]
        if not old or engine is None or not ttl_s or not self.takes_writes:
            return
        if not (engine.limits.has_ttl or engine.limits.keeps_use):
            return
        self._fresh.note(old, True)  # also where it fails: it is tried again after as long
        groups: dict[str, list[str]] = {}
        for name in map(self._names.block, old):
            groups.setdefault(engine.endpoint(name), []).append(name)
        for names in groups.values():
            self._renew(names, ttl_s)

    def renew_soon(self, keys: Sequence[bytes]) -> None:
        """What `renew` does, on a thread of the tier."""
        if self.config.ttl_s and not self.config.read_only and any(self._fresh.of(key) is None for key in keys):
            self._workers.start(Task(self.renew, keys))

    def recall_soon(self, key: bytes, most_bytes: int) -> None:
        """Read a small value that was only asked for, on a thread of the tier: a server that gives up what was not read
        for long knows nothing of that."""
        deadline = self.clock() + self.config.write_timeout_s
        self._workers.start(Task(self.read, key, most_bytes, deadline))

    def _renew(self, names: Sequence[str], ttl_s: float) -> None:
        timeout_s = self.config.write_timeout_s
        try:
            self._link.call("write", names[0], lambda e, left: e.touch(names, ttl_s, left), timeout_s)
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_WRITE_ERRORS, because=error)
        else:
            self._metrics.add(Metric.REMOTE_TOUCHED, len(names))

    def delete(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Remove records; return how many were removed, and of how many that is not known."""
        engine = self._link.engine()
        if engine is None or not keys:
            return 0, len(keys)
        removed = left = 0
        groups: dict[str, list[bytes]] = {}
        for key in keys:
            groups.setdefault(engine.endpoint(self._names.block(key)), []).append(key)
        for group in groups.values():
            for start in range(0, len(group), engine.limits.exist_batch):
                part = group[start : start + engine.limits.exist_batch]
                done = self._delete([self._names.block(key) for key in part])
                if done is None:
                    left += len(part)
                    continue
                removed += done
                self.beliefs.note(part, False)
        self._metrics.add(Metric.REMOTE_ERASED, removed)
        return removed, left

    def _delete(self, names: Sequence[str]) -> int | None:
        timeout_s = self.config.write_timeout_s
        try:
            return self._link.call("write", names[0], lambda e, left_s: e.delete(names, left_s), timeout_s)
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_WRITE_ERRORS, because=error)
            return None

    def _put(self, name: str, data: memoryview, ttl_s: float | None) -> bool:
        timeout_s, parts = self.config.write_timeout_s, [data]
        if self._sealer is not None:
            parts = [memoryview(part) for part in self._sealer.seal(name, data)]
        try:
            new = self._link.call("write", name, lambda e, left: e.put_if_absent(name, parts, left, ttl_s), timeout_s)
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_WRITE_ERRORS, because=error)
            return False
        if new:
            self._metrics.add(Metric.REMOTE_WRITTEN_RECORDS)
            self._metrics.add(Metric.REMOTE_WRITTEN_BYTES, len(data))
        else:
            self._metrics.add(Metric.REMOTE_PRESENT)
        return True

    @property
    def takes_writes(self) -> bool:
        """Whether a server may be written to now."""
        return not self.config.read_only and self._link.is_up("write")

    # ---- the rest ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Return plain numbers: what is believed, which breakers are open, and the counters of the engine."""
        listing = {} if self.listing is None else self.listing.stats()
        return {"believed": len(self.beliefs), **listing, **self._link.stats()}

    def close(self) -> None:
        """Close the engine, and end the threads that do not hang in it. Idempotent."""
        if self.listing is not None:
            self.listing.close()
        self._link.close()
        self._workers.close(cancel=True, timeout_s=_CLOSING_S)
        self.profiles.close()
