"""The engine of one store, and whom of its servers may be asked now."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from kvstore.core.waiting import Bell
from kvstore.core.workers import Task, Workers
from kvstore.errors import ConfigError, RemoteError, RemoteFull, RemoteTimeout, RemoteTooLarge, RemoteUnavailable
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.remote.breaker import Breaker
from kvstore.tiers.remote.engine import RemoteEngine

T = TypeVar("T")
Way = Literal["read", "write"]

# A call that had less time than this says nothing of the server if the time runs out.
_FAIR_S = 0.05
_TRIAL_S = 0.5
_LOOK_S = 0.05
_CLOSING_S = 1.0  # threads that an engine holds for longer are left to it; they are daemons


class Skipped(RemoteUnavailable):
    """The call was not made: the server did not answer before."""


class RemoteLink:
    """Makes the calls of an engine, each through the breaker of its server; opens the engine as soon as that can be.

    A server that does not answer is not asked any more, for reading and writing apart, until a trial of a thread of
    this object's own succeeds: no get pays for trials. Thread-safe.

    Args:
        open_it: opens the engine. If it raises `RemoteError`, or takes long, it is tried again.
        wait_s: how long to wait for it now.

    Raises:
        ConfigError: the settings of the engine do not fit.
    """

    def __init__(
        self,
        open_it: Callable[[], RemoteEngine],
        metrics: Metrics,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_it = open_it
        self._metrics = metrics
        self._clock = clock
        self._engine: RemoteEngine | None = None
        self._opening = Breaker(clock)
        self._breakers: dict[tuple[str, Way], tuple[Breaker, str]] = {}  # with a key that the server holds
        self._lock = threading.Lock()  # guards additions to _breakers
        self._closing = False
        self._wake = Bell()
        self._thread = Workers(1, "kvstore-remote-trial")
        first: Task[None] = Task(self._open)
        self._thread.start(first)
        if first.is_done(wait_s):
            try:
                first.result()
            except ConfigError:
                self._thread.close()
                raise
        self._thread.start(self._watch)

    def call(self, way: Way, key: str, function: Callable[[RemoteEngine, float], T], timeout_s: float) -> T:
        """Make a call of the engine for the server that holds `key`.

        Raises:
            RemoteError: the call failed, or is not made because the server did not answer before.
        """
        engine = self._engine
        if engine is None:
            raise Skipped("the remote tier could not be opened yet")
        endpoint = engine.endpoint(key)
        breaker = self._breaker(endpoint, way, key)
        if breaker.is_open:
            raise Skipped(f"{endpoint} did not answer before; it is tried again soon")
        return self._through(breaker, endpoint, engine, function, timeout_s)

    def engine(self) -> RemoteEngine | None:
        """Return the engine; None while it could not be opened."""
        return self._engine

    def is_up(self, way: Way) -> bool:
        """Return whether any server may be asked."""
        if self._engine is None:
            return False
        mine = [breaker.is_open for (_, which), (breaker, _) in list(self._breakers.items()) if which == way]
        return not mine or not all(mine)

    def stats(self) -> Mapping[str, float]:
        """Return the counters of the engine, and how many breakers are open."""
        found = {f"engine_{name}": value for name, value in (self._engine.stats() if self._engine else {}).items()}
        for way in ("read", "write"):
            found[f"{way}_open"] = sum(b.is_open for (_, which), (b, _) in list(self._breakers.items()) if which == way)
        return {"opened": int(self._engine is not None), **found}

    def close(self) -> None:
        """Close the engine, and end the thread, if it does not hang. Idempotent."""
        self._closing = True
        self._wake.ring()
        if self._engine is not None:
            self._engine.close()
        self._thread.close(timeout_s=_CLOSING_S)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            engine = self._open_it()
        except RemoteError as error:
            if self._opening.failed():
                self._metrics.add(Metric.REMOTE_BREAKS, because=error)
            return
        self._opening.succeeded()
        self._engine = engine
        if self._closing:
            engine.close()

    def _breaker(self, endpoint: str, way: Way, key: str) -> Breaker:
        found = self._breakers.get((endpoint, way))
        if found is None:
            with self._lock:
                found = self._breakers.setdefault((endpoint, way), (Breaker(self._clock), key))
        return found[0]

    def _through(
        self,
        breaker: Breaker,
        endpoint: str,
        engine: RemoteEngine,
        function: Callable[[RemoteEngine, float], T],
        timeout_s: float,
    ) -> T:
        begin = self._clock()
        try:
            result = function(engine, timeout_s)
        except (RemoteTooLarge, RemoteFull):
            breaker.succeeded()  # it answered
            raise
        except Exception as error:
            wrapped = error if isinstance(error, RemoteError) else RemoteUnavailable(f"the engine failed: {error!r}")
            if not (isinstance(error, RemoteTimeout) and timeout_s < _FAIR_S) and breaker.failed(begin):
                self._metrics.add(Metric.REMOTE_BREAKS, because=f"{endpoint}: {error}")
                self._wake.ring()
            raise wrapped from error
        if breaker.succeeded():
            self._metrics.add(Metric.REMOTE_MENDS)
        return result

    def _watch(self) -> None:
        """Makes the trials, while something is open."""
        while not self._closing:
            if not self._wake.wait_for(lambda: self._closing or self._has_trials()):
                continue
            if self._engine is None and not self._closing:
                self._try_to_open()
            for (endpoint, _), (breaker, key) in list(self._breakers.items()):
                if breaker.is_due() and not self._closing and self._engine is not None:
                    self._try(breaker, endpoint, key, self._engine)
            self._wake.wait_for(lambda: self._closing, _LOOK_S)

    def _has_trials(self) -> bool:
        return self._engine is None or any(breaker.is_open for breaker, _ in list(self._breakers.values()))

    def _try_to_open(self) -> None:
        while not (self._opening.is_open or self._closing):
            self._open()  # until it is open, or failed often enough
            if self._engine is not None:
                return
        if self._opening.is_due():
            self._open()

    def _try(self, breaker: Breaker, endpoint: str, key: str, engine: RemoteEngine) -> None:
        with contextlib.suppress(RemoteError):  # the breaker knows
            self._through(breaker, endpoint, engine, lambda e, timeout_s: e.exist([key], timeout_s), _TRIAL_S)
