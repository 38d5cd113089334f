"""How stores end that nobody closes: those that are dropped, and those that are open when the program ends.

Python runs what `atexit` has after it waited for the program's threads, and before it stops the threads of stores,
which are daemons: there every open store is closed. The processes of `multiprocessing` leave that out; there it is
done when their work has ended. Signals that the program handles wait meanwhile. A process that is killed, calls
`os._exit` or executes another program keeps what was written by then.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import parent_process, util

from kvstore.core import late_work
from kvstore.core.held_signals import HeldSignals
from kvstore.core.results import FlushResult
from kvstore.core.workers import Workers
from kvstore.errors import StoreClosed

_log = logging.getLogger(__name__)

# After the time to write is over, the group that is being written is waited for so long.
_GRACE_S = 5.0
_LOOK_S = 0.05  # so often it is looked whether there is a hurry
# Among the last of what `multiprocessing` calls; it must be a number.
_LAST = -100


class Ending:
    """Closes one store, once, on one of its own threads, whoever asks for it. Thread-safe.

    Whoever waits for it may be interrupted, and ask again.

    Args:
        place: the folder of the store, for messages and for `wait_for_dropped`.
        worker: its threads close the store and end then.
        no_more_calls: lets no call begin any more, and waits so many seconds for those under way.
        close: writes what is queued and closes everything; says what became of it.
        abandon: writes nothing any more; returns how many blocks were not written.
        why_dropped: says why blocks were dropped since the store was opened.
        timeout_s: how long the end of the program waits for `close`.
    """

    def __init__(
        self,
        place: str,
        worker: Workers,
        no_more_calls: Callable[[float], bool],
        close: Callable[[], FlushResult],
        abandon: Callable[[], int],
        why_dropped: Callable[[], str],
        timeout_s: float,
    ) -> None:
        self.place = place
        self.pid = os.getpid()
        self.timeout_s = timeout_s
        self._start = worker.starter
        self._no_more_calls = no_more_calls
        self._close = close
        self._abandon = abandon
        self._why_dropped = why_dropped
        self._error: BaseException | None = None
        self._result = FlushResult(0, 0)
        self._open = threading.Lock()  # held until the store is closed
        self._open.acquire()
        self._ending = threading.Lock()  # held by the thread that closes it
        self._store: _Dropped | None = None
        self._given_up = False
        self._say: Callable[[str], None] = _log.warning
        self._asked = False  # whether it was said that a signal waits
        _endings[id(self)] = self

    def watch(self, store: object) -> None:
        """Close the store also when nobody refers to it any more, soon after."""
        # The callback is one call into C: it runs where the last reference goes, and nothing can cut it short there.
        self._store = _Dropped(store, self._start)
        self._store.end = self._end

    def close(self) -> FlushResult:
        """Close the store, and return what became of the blocks since the last flush.

        Raises:
            What closing raised.
        """
        self.begin()
        with self._open:
            error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

    def begin(self) -> None:
        """Let the store be closed, and return at once."""
        self._start(self._end)

    def give_up(self) -> None:
        """Nobody will use the store: let it be closed, and return at once."""
        self._given_up = True
        self.begin()

    def is_over(self, timeout_s: float) -> bool:
        """Return whether the store is closed; wait so long for it."""
        if not self._open.acquire(timeout=max(0.0, timeout_s)):
            return False
        self._open.release()
        return True

    @property
    def is_dropped(self) -> bool:
        """Whether nobody refers to the store any more, or it was given up."""
        return self._given_up or (self._store is not None and weakref.ref.__call__(self._store) is None)

    def finish(self, end: float, held: HeldSignals) -> None:
        """The program ends: close the store until `end`, by `time.monotonic`, or say what was not written.

        held: signals that came meanwhile; two of them say not to wait any longer.
        """
        self._say = _tell
        self._wait(self._no_more_calls, end, held)
        self.begin()
        if self._wait(self.is_over, end, held):
            return
        lost = self._abandon()
        self.is_over(_GRACE_S)
        why = (
            "it was asked again to end"
            if held.in_a_hurry
            else f"{self.timeout_s:g} seconds were too few. Close the store before the program ends, or raise "
            "exit_timeout_s"
        )
        _tell(f"{self.place}: the program ended, and {lost} blocks could not be written and are lost: {why}")

    def _wait(self, is_done: Callable[[float], bool], end: float, held: HeldSignals) -> bool:
        while not is_done(max(0.0, min(_LOOK_S, end - time.monotonic()))):
            if held.in_a_hurry or time.monotonic() >= end:
                return False
            if held.asked_to_end and not self._asked:
                self._asked = True
                _tell(f"{self.place}: what was put is still being written; interrupt again to lose the rest")
        return True

    def _end(self) -> None:
        if not self._ending.acquire(blocking=False):
            return
        try:
            self._result = self._close()
            if self._result.dropped_blocks:
                self._say(
                    f"{self.place}: closed; {self._result.dropped_blocks} blocks could not be written and are lost; "
                    f"counted since it was opened: {self._why_dropped()}"
                )
        except BaseException as error:
            _log.exception("%s: the store could not be closed in order", self.place)
            self._error = error
        finally:
            _endings.pop(id(self), None)
            self._open.release()


class _Dropped(weakref.ref):  # type: ignore[type-arg]
    """Refers to a store; put among the tasks of a worker when the store is gone, and called there."""

    end: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.end is not None:
            self.end()


_endings: dict[int, Ending] = {}  # of stores that are open; in a forked child also those of its parents
_over = False
_watched_by: int | None = None  # the process whose end is watched by way of multiprocessing


def check_may_open(place: str) -> None:
    """Wait for the end of a store in this folder that was dropped, so that it can be opened again.

    Raises:
        StoreClosed: the program is ending, and nothing would close the store.
    """
    global _watched_by
    if _over:
        raise StoreClosed("the program is ending; open stores before its last exit handlers run")
    if parent_process() is not None and _watched_by != os.getpid():
        util.Finalize(None, _end_process, exitpriority=_LAST)
        _watched_by = os.getpid()
    for ending in list(_endings.values()):
        if ending.place == place and ending.pid == os.getpid() and ending.is_dropped:
            ending.is_over(ending.timeout_s)


def _end_process() -> None:
    """The work of a process of `multiprocessing` has ended; its other threads may still use stores."""
    try:
        for thread in threading.enumerate():
            if not thread.daemon and thread not in (threading.current_thread(), threading.main_thread()):
                thread.join()
    finally:
        _end_all()


def _end_all() -> None:
    global _over
    begin = time.monotonic()
    with HeldSignals() as held:
        for ending in list(_endings.values()):
            if ending.pid == os.getpid():
                ending.finish(begin + ending.timeout_s, held)
        _over = True
        late_work.end(_GRACE_S)


def _tell(text: str) -> None:
    """Log an error; where the program does nothing with what is logged, print it: nobody could ask later."""
    logger: logging.Logger | None = _log
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            _log.error("%s", text)
            return
        logger = logger.parent if logger.propagate else None
    if sys.stderr is not None:
        print(f"kvstore: {text}", file=sys.stderr)


def _at_exit() -> None:
    with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of signals that waited: the program ends as it is
        _end_all()


atexit.register(_at_exit)
