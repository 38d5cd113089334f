"""What was not in the remote tier when it was listed last: it is not asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvstore.core.waiting import Bell
from kvstore.core.workers import Workers
from kvstore.errors import RemoteTimeout
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.remote.key_filter import KeyFilter
from kvstore.tiers.remote.link import RemoteLink
from kvstore.tiers.remote.names import RemoteNames

_BYTES = 8 << 20  # enough for 6 million keys; with more, more of them seem to be there
_SOME = 4096
_CLOSING_S = 1.0
_LOOK_S = 0.2


class Listing:
    """Lists the names of one identity from time to time, and says of which keys there was no value. Thread-safe.

    It says so for twice as long as it is from one listing to the next, counted from the beginning of a listing, and of
    nothing that this store wrote, or that it was told of, since then. What others write meanwhile is at worst a miss.
    Before the first listing, and after one that failed or takes longer than that, it says nothing.

    Args:
        every_s: from the beginning of one listing to that of the next.
        timeout_s: of each step of a listing.
    """

    def __init__(
        self,
        link: RemoteLink,
        names: RemoteNames,
        metrics: Metrics,
        every_s: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._names = names
        self._metrics = metrics
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._found: tuple[KeyFilter, float] | None = None  # and until when it holds; replaced as a whole
        self._making: KeyFilter | None = None
        self._next = clock()
        self._begun = self._ended = self._asked = 0  # listings, by number
        self._closing = False
        self._wake = Bell()
        self._worker = Workers(1, "kvstore-remote-list")
        self._worker.start(self._run)

    def lacks(self, key: bytes) -> bool:
        """Return whether there was no value, by a listing that still holds."""
        found = self._found
        return found is not None and self._clock() < found[1] and key not in found[0]

    def add(self, keys: Iterable[bytes] | None) -> None:
        """There may be values of these keys now; None: of any."""
        if keys is None:
            self._found = self._making = None
            return
        some = list(keys)
        for one in (self._making, self._found[0] if self._found is not None else None):
            if one is not None:
                one.add(some)

    def refresh(self) -> None:
        """List now, and return when that is done, well or not; a listing under way is waited for, too."""
        mine = self._begun + 1
        self._asked = mine
        self._wake.ring()
        self._wake.wait_for(lambda: self._ended >= mine or self._closing)

    def stats(self) -> dict[str, float]:
        """Return plain numbers: how many listings were made, and how many keys the one has that holds."""
        found = self._found
        return {"listings": self._ended, "listed": 0 if found is None else len(found[0])}

    def close(self) -> None:
        """End the thread, if it does not hang. Idempotent."""
        self._closing = True
        self._wake.ring()
        self._worker.close(timeout_s=_CLOSING_S)

    def _run(self) -> None:
        while not self._closing:
            if self._is_due():
                self._begun += 1
                self._next = self._clock() + self._every_s
                self._list()
                self._ended = self._begun
                self._wake.ring()
            self._wake.wait_for(lambda: self._closing or self._is_due(), _LOOK_S)

    def _is_due(self) -> bool:
        return (self._clock() >= self._next or self._asked > self._begun) and self._link.is_up("read")

    def _list(self) -> None:
        engine, until = self._link.engine(), self._clock() + 2 * self._every_s
        if engine is None:
            return
        self._making = making = KeyFilter(_BYTES)
        try:
            names = iter(engine.list(self._names.prefix, self._timeout_s))
            while (some := list(islice(names, _SOME))) and not self._closing:
                making.add(self._keys(some))
                if self._clock() >= until:
                    raise RemoteTimeout(f"the listing takes longer than 2 * list_s, {2 * self._every_s:g} s")
        except Exception as error:  # of the server, mostly; and nothing may end this thread
            self._metrics.add(Metric.REMOTE_READ_ERRORS, because=error)
            self._making = None
            return
        if self._making is making and not self._closing:  # else anything may have changed meanwhile
            self._found = making, until
        self._making = None

    def _keys(self, names: Sequence[str]) -> list[bytes]:
        return [key for key in map(self._names.key, names) if key is not None]
