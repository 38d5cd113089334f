"""What a store says through Python's `logging` while it runs: losses, damage, fallbacks, slow calls.

Nothing is said while all is well. Every event has a logger of its own, `kvstore.<event>`, below the logger "kvstore": a
program can silence one, or all of them. Which events there are, and their words, says `kvstore.metrics`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# One line an event and minute is enough to notice, and never a burden.
INTERVAL_S = 60.0


@dataclass(frozen=True)
class Notice:
    """What is said of an event. Immutable.

    Attributes:
        level: of `logging`: INFO where only time or space is lost, WARNING where stored blocks are, ERROR where nothing
            is stored any more.
        advice: what the reader of the line can do.

    Example:
        >>> Notice(logging.WARNING, "raise disk.bytes").level
        30
    """

    level: int
    advice: str


@dataclass
class _Heard:
    """An event so far. said: how much of `total` was logged; next: when it may be logged again."""

    notice: Notice
    meaning: str
    total: float = 0
    said: float = 0
    next: float = 0.0


class EventLog:
    """Logs the first occurrence of an event at once, and from then on at most one line an interval, with the count.

    Thread-safe: `_lock` guards `_heard` and is not held while a line is logged. The caller may hold locks of the store,
    so a handler must not call the store. A handler that raises is ignored.

    Args:
        store: the path of the store; every line names it.
        interval_s: seconds between two lines of one event.
        clock: gives the time in seconds.

    Example:
        >>> log = EventLog("/var/kv")
        >>> log.note("dropped_no_space", Notice(logging.INFO, "raise disk.bytes"), "blocks that found no space", 2)
        >>> log.close()
    """

    def __init__(
        self, store: str = "", interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[str, _Heard] = {}  # guarded by _lock

    def note(self, event: str, notice: Notice, meaning: str, amount: float, because: object = None) -> None:
        """Say that an event occurred, or only count it if it was logged a moment ago.

        Args:
            event: its name.
            notice: what to say of it.
            meaning: what the amount counts, as words that can follow a number.
            amount: how often it occurred.
            because: an error, or other words that say more; None for nothing.
        """
        now = self._clock()
        with self._lock:
            heard = self._heard.setdefault(event, _Heard(notice, meaning, next=now))
            heard.total += amount
            if now < heard.next:
                return
            line = self._line(event, heard, because)
            heard.said, heard.next = heard.total, now + self._interval_s
        _log(event, notice.level, line)

    def close(self) -> None:
        """Say what was counted and not logged yet."""
        with self._lock:
            late = [(event, heard) for event, heard in self._heard.items() if heard.total > heard.said]
            lines = [(event, heard.notice.level, self._line(event, heard, None)) for event, heard in late]
            for _, heard in late:
                heard.said = heard.total
        for event, level, line in lines:
            _log(event, level, line)

    def _line(self, event: str, heard: _Heard, because: object) -> str:
        new, total = heard.total - heard.said, heard.total
        count = f"{new:g} {heard.meaning}" + (f" ({total:g} since the store was opened)" if heard.said else "")
        cause = "" if because is None else f" [{type(because).__name__}: {because}]"
        if isinstance(because, str):
            cause = f" [{because}]"
        where = f"store {self._store}: " if self._store else ""
        return f"{where}{event}: {count}{cause}; {heard.notice.advice}"


def _log(event: str, level: int, line: str) -> None:
    with contextlib.suppress(Exception):  # a handler's fault must not become the store's
        logging.getLogger(f"kvstore.{event}").log(level, "%s", line)
