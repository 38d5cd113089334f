"""Signals that wait until something is over that they must not cut short."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_ENDS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})  # which ask a program to end
_PATIENCE = 2  # so many of those wait


class HeldSignals:
    """A context in which the program's own handlers of signals are not called; they are called when it is left.

    The second signal that asks the program to end waits, too, and says that there is a hurry. From the third one on
    the program's handlers are called at once. Signals that Python does not handle do what they always do. On another
    thread than the main one, where Python calls no handlers, nothing is held.

    Example:
        >>> with HeldSignals() as held:
        ...     held.in_a_hurry
        False
    """

    def __init__(self) -> None:
        self._own: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: dict[int, None] = {}
        self._ends = 0

    @property
    def asked_to_end(self) -> bool:
        """Whether a signal waits that asks the program to end."""
        return self._ends > 0

    @property
    def in_a_hurry(self) -> bool:
        """Whether there were two of them."""
        return self._ends >= _PATIENCE

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._own[number] = handler
                    signal.signal(number, self._hold)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._own.items():
            signal.signal(number, handler)
        if error is None:
            for number in self._came:
                self._own[number](number, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self.in_a_hurry and number in _ENDS:
            self._own[number](number, frame)
            return
        self._came[number] = None
        self._ends += number in _ENDS
