"""Profiles on their way: to the remote tier before the first record that needs one, and from there when one is met."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial

from kvstore.codecs.profile import NO_PROFILE
from kvstore.core.explanation import Reason
from kvstore.core.record import DamagedRecord
from kvstore.core.workers import Task, Workers
from kvstore.errors import RemoteError
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.profiles import Profiles
from kvstore.tiers.remote.beliefs import Beliefs
from kvstore.tiers.remote.link import RemoteLink
from kvstore.tiers.remote.names import RemoteNames
from kvstore.tiers.remote.sealing import Sealer

_MOST_BYTES = 1 << 28
_TIMES = 6  # a profile may take so much longer than a record
_AGAIN_S = 10.0  # one that could not be had is asked for again
# A server loses profiles as it loses records: when it is restarted, or has no room. Whoever writes a record that needs
# one asks for it as often as this, and whoever reads one as often as that, for those that will read it.
_WRITER_S, _READER_S = 1.0, 60.0
_CLOSING_S = 1.0


class RemoteProfiles:
    """Brings and sends the profiles of one identity. Thread-safe.

    Args:
        timeout_s: what a record may take.
        ttl_s: values may be removed so long after their last use; 0: when the server likes.
        sealer: seals values; None: they are files as they are.
    """

    def __init__(
        self,
        link: RemoteLink,
        names: RemoteNames,
        profiles: Profiles,
        metrics: Metrics,
        timeout_s: float,
        ttl_s: float,
        sealer: Sealer | None,
    ) -> None:
        self._link = link
        self._names = names
        self._profiles = profiles
        self._metrics = metrics
        self._timeout_s = _TIMES * timeout_s
        self._ttl_s = ttl_s
        self._sealer = sealer
        self._there = Beliefs(_WRITER_S, 0.0)
        self._seen = Beliefs(_READER_S, 0.0)  # by readers
        self._fresh = Beliefs(ttl_s / 2, 0.0)  # whose life was renewed not long ago
        self._tasks: dict[bytes, tuple[Task[bool], float]] = {}  # profiles that are asked for, or were in vain
        self._lock = threading.Lock()  # guards _tasks
        self._worker = Workers(1, "kvstore-remote-profile")

    def bring(self, codec: int, profile: bytes, deadline: float) -> Reason | None:
        """Return why records of this codec and profile cannot be decoded here, by `time.monotonic` at the latest; None
        if they can. What is on its way then comes all the same, for the next get."""
        if profile == NO_PROFILE or self._profiles.knows(codec, profile):
            return None
        task = self._task(profile)
        if not task.is_done(max(0.0, deadline - time.monotonic())):
            return Reason.REMOTE_LATE
        return None if task.result() and self._profiles.knows(codec, profile) else Reason.REMOTE_PROFILE

    def bring_soon(self, profile: bytes) -> None:
        """Bring a profile that a record of this store needs, and the store lacks, for the next get."""
        self._task(profile)

    def _task(self, profile: bytes) -> Task[bool]:
        """What brings a profile, or did a moment ago."""
        now = time.monotonic()
        with self._lock:
            task, begun = self._tasks.get(profile, (None, 0.0))
            if task is None or (now - begun > _AGAIN_S and task.is_done(0.0)):
                task = Task(self._bring, profile)
                self._tasks[profile] = task, now
                self._worker.start(task)
        return task

    def _bring(self, profile: bytes) -> bool:
        name, buffer = self._names.profile(profile), bytearray(_MOST_BYTES)  # pages that are not written take no memory
        try:
            size = self._link.call(
                "read", name, lambda e, left: e.get_into(name, memoryview(buffer), left), self._timeout_s
            )
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_READ_ERRORS, because=error)
            return False
        if size is None:
            return False
        value = memoryview(buffer)[:size]
        try:
            data = bytes(value) if self._sealer is None else self._sealer.opened(name, value)
        except DamagedRecord as damage:
            self._metrics.add(Metric.REMOTE_DAMAGED, because=f"{name}: {damage}")
            return False
        if not self._profiles.take_in(profile, data):
            self._metrics.add(Metric.REMOTE_DAMAGED, because=f"{name} is not this profile")
            return False
        self._metrics.add(Metric.REMOTE_READ_PROFILES)
        return True

    def send(self, profile: bytes) -> bool:
        """Write a profile that this store has, unless it is there; return whether it is there now."""
        if profile == NO_PROFILE or self._there.of(profile):
            return True
        data = self._profiles.data(profile)
        if data is None:
            return False
        try:
            self._write(self._names.profile(profile), profile, data)
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_WRITE_ERRORS, because=error)
            return False
        self._there.note([profile], True)
        return True

    def _write(self, name: str, profile: bytes, data: bytes | memoryview) -> None:
        """Raises `RemoteError`."""
        call, ttl_s = partial(self._link.call, "write", name, timeout_s=self._timeout_s), self._ttl_s or None
        if call(lambda e, left: e.exist([name], left))[0]:
            if ttl_s is None or self._fresh.of(profile):
                return
            call(lambda e, left: e.touch([name], ttl_s, left))
        else:
            parts = [data] if self._sealer is None else self._sealer.seal(name, data)
            if call(lambda e, left: e.put(name, parts, left, ttl_s)):
                self._metrics.add(Metric.REMOTE_WRITTEN_PROFILES)
        self._fresh.note([profile], True)

    def unseen(self, profiles: Iterable[bytes]) -> list[bytes]:
        """Return those with which records were read, and which nobody here looked for lately; they count as seen."""
        found = [profile for profile in set(profiles) if profile != NO_PROFILE and self._seen.of(profile) is None]
        self._seen.note(found, True)
        return found

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._worker.close(cancel=True, timeout_s=_CLOSING_S)
