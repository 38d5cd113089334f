"""Calls of the remote tier's engine that never raise: what fails is counted, and said."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from kvstore.core.explanation import Reason
from kvstore.errors import RemoteError, RemoteTimeout, RemoteTooLarge
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.remote.engine import RangedEngine, RemoteEngine
from kvstore.tiers.remote.link import RemoteLink, Skipped

T = TypeVar("T")
Part = memoryview | bytes


class RemoteCalls:
    """Thread-safe: has no state of its own.

    Args:
        write_timeout_s: what a call may take that writes.
        clock: what deadlines go by.
    """

    def __init__(
        self,
        link: RemoteLink,
        metrics: Metrics,
        write_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._metrics = metrics
        self._timeout_s = write_timeout_s
        self._clock = clock

    def read(self, name: str, buffer: memoryview, deadline: float) -> int | Reason:
        """Read a value into the start of a buffer; return how many bytes it has, or why it does not come."""
        return self._read(name, deadline, lambda e, left_s: e.get_into(name, buffer, left_s))

    def read_part(self, name: str, offset: int, buffers: Sequence[memoryview], deadline: float) -> int | Reason:
        """Read a value from `offset` on; see `RangedEngine.get_parts_into`."""
        return self._read(
            name, deadline, lambda e, left_s: cast(RangedEngine, e).get_parts_into(name, offset, buffers, left_s)
        )

    def _read(self, name: str, deadline: float, function: Callable[[RemoteEngine, float], int | None]) -> int | Reason:
        left = deadline - self._clock()
        if left <= 0:
            return Reason.REMOTE_LATE
        try:
            size = self._link.call("read", name, function, left)
        except Skipped:
            self._metrics.add(Metric.REMOTE_SKIPPED)
            return Reason.REMOTE_FAILED
        except RemoteTooLarge as error:
            self._metrics.add(Metric.REMOTE_DAMAGED, because=error)
            return Reason.REMOTE_REFUSED
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_READ_ERRORS, because=error)
            return Reason.REMOTE_LATE if isinstance(error, RemoteTimeout) else Reason.REMOTE_FAILED
        return Reason.REMOTE_GONE if size is None else size

    def exist(self, names: Sequence[str], deadline: float) -> Sequence[bool | None]:
        """Return for each name of one server whether a value is there; None where that is not known in time."""
        left = deadline - self._clock()
        if left <= 0:
            return [None] * len(names)
        try:
            return self._link.call("read", names[0], lambda e, left_s: e.exist(names, left_s), left)
        except Skipped:
            self._metrics.add(Metric.REMOTE_SKIPPED, len(names))
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_READ_ERRORS, because=error)
        return [None] * len(names)

    def put(self, name: str, parts: Sequence[Part], ttl_s: float | None, over: bool = False) -> bool | None:
        """Write a value, unless there is one, which `over` replaces; return whether it was, None if that failed."""
        return self._write(name, lambda e, left_s: e.put(name, parts, left_s, ttl_s, over))

    def touch(self, names: Sequence[str], ttl_s: float) -> bool:
        """Let values of one server live on; return whether that was done."""

        def touch(engine: RemoteEngine, left_s: float) -> bool:
            engine.touch(names, ttl_s, left_s)
            return True

        return self._write(names[0], touch) is not None

    def delete(self, names: Sequence[str]) -> int | None:
        """Remove values of one server; return how many there were, None if that is not known."""
        return self._write(names[0], lambda e, left_s: e.delete(names, left_s))

    def _write(self, name: str, function: Callable[[RemoteEngine, float], T]) -> T | None:
        try:
            return self._link.call("write", name, function, self._timeout_s)
        except RemoteError as error:
            self._metrics.add(Metric.REMOTE_WRITE_ERRORS, because=error)
            return None
