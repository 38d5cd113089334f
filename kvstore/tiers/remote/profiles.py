"""Profiles on their way: to the remote tier before the first record that needs one, and from there when one is met."""

from __future__ import annotations

import threading
import time

from kvstore.codecs.profile import NO_PROFILE
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
        self._there = Beliefs(ttl_s / 2 if ttl_s else 1e9, 0.0)
        self._tasks: dict[bytes, tuple[Task[bool], float]] = {}  # profiles that are asked for, or were in vain
        self._lock = threading.Lock()  # guards _tasks
        self._worker = Workers(1, "kvstore-remote-profile")

    def bring(self, codec: int, profile: bytes, deadline: float) -> bool:
        """Return whether records of this codec and profile can be decoded here, by `time.monotonic` at the latest; what
        is on its way then comes all the same, for the next get."""
        if profile == NO_PROFILE or self._profiles.knows(codec, profile):
            return True
        now = time.monotonic()
        with self._lock:
            task, begun = self._tasks.get(profile, (None, 0.0))
            if task is None or (now - begun > _AGAIN_S and task.is_done(0.0)):
                task = Task(self._bring, profile)
                self._tasks[profile] = task, now
                self._worker.start(task)
        return task.is_done(max(0.0, deadline - now)) and task.result() and self._profiles.knows(codec, profile)

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
        name, ttl_s = self._names.profile(profile), self._ttl_s or None
        parts = [data] if self._sealer is None else self._sealer.seal(name, data)
        try:
            if self._link.call("write", name, lambda e, left: e.exist([name], left), self._timeout_s)[0]:
                if ttl_s is not None:
                    self._link.call("write", name, lambda e, left: e.touch([name], ttl_s, left), self._timeout_s)
            elif self._link.call(
                "write", name, lambda e, left: e.put_if_absent(name, parts, left, ttl_s), self._timeout_s
            ):
                self._metrics.add(Metric.REMOTE_WRITTEN_PROFILES)
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_WRITE_ERRORS, because=error)
            return False
        self._there.note([profile], True)
        return True

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._worker.close(cancel=True, timeout_s=_CLOSING_S)
