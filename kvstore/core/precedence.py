"""Short work that a caller waits for goes before long work of the store's own threads."""

from __future__ import annotations

import threading

# So long at most a step of long work waits; short work takes a tenth of it, and a caller may be stopped in a debugger.
_WAIT_S = 0.004


class Precedence:
    """Where every core encodes, a put that hands its change to another thread would wait for a core, and for the
    interpreter, twice. So what takes long gives way to it between two of its steps. Thread-safe.

    Attributes:
        short: held during short work. To be taken by a `with` alone: an interrupt then never leaves it held.

    Example:
        >>> precedence = Precedence()
        >>> with precedence.short:
        ...     precedence.give_way()  # waits, but not for long
        >>> precedence.give_way()
    """

    __slots__ = ("short",)

    def __init__(self) -> None:
        self.short = threading.Lock()

    def give_way(self) -> None:
        """Wait until short work that is under way has ended, but not for long."""
        if self.short.locked() and self.short.acquire(timeout=_WAIT_S):
            self.short.release()
