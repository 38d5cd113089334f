"""What the owner of a store took from this process and has not made durable yet, as far as this process knows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvstore.core.tokens import Tokens

_MOST = 1024  # sequences that are remembered by their tokens


class Promised:
    """Puts since the last flush. If the owner dies before, some of them may be lost, and `flush` has to say so.

    Thread-safe.

    Example:
        >>> import numpy as np
        >>> promised = Promised()
        >>> promised.add(np.arange(3, dtype=np.uint32), b"", 1)
        >>> promised.owner_died(lambda tokens, namespace: 0)
        >>> promised.take_lost(), promised.take_lost()
        (1, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By number, rising; guarded by _lock, and so is the rest.
        self._puts: deque[tuple[int, Tokens, str | bytes, int]] = deque()
        self._last = 0
        self._older = 0  # blocks of puts that were forgotten, all before those
        self._lost = 0

    def add(self, tokens: Tokens, namespace: str | bytes, blocks: int) -> None:
        """Remember a put that the owner took, with so many new blocks."""
        with self._lock:
            self._last += 1
            self._puts.append((self._last, tokens, namespace, blocks))
            if len(self._puts) > _MOST:
                self._older += self._puts.popleft()[3]

    @property
    def last(self) -> int:
        """The number of the last put: a flush that begins now covers it and all before."""
        return self._last

    def flushed(self, last: int) -> None:
        """Everything is durable, up to the put of this number."""
        with self._lock:
            if not self._puts or self._puts[0][0] <= last + 1:
                self._older = 0
            while self._puts and self._puts[0][0] <= last:
                self._puts.popleft()

    def owner_died(self, contains: Callable[[Tokens, str | bytes], int]) -> None:
        """Look which puts survived their owner; those that did not count as lost.

        Args:
            contains: how many leading tokens of a sequence in a namespace are stored now.
        """
        with self._lock:
            puts, self._puts = self._puts, deque()
            self._lost += self._older
            self._older = 0
        lost = sum(blocks for _, tokens, namespace, blocks in puts if contains(tokens, namespace) < len(tokens))
        with self._lock:
            self._lost += lost

    def take_lost(self) -> int:
        """Return how many blocks were lost since this was asked last."""
        with self._lock:
            lost, self._lost = self._lost, 0
            return lost
