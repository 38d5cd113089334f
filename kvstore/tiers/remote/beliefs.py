"""What is believed of the remote tier: which values are there. Never proof: who reads checks what comes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

_MOST = 1 << 16  # of about 200 bytes each


class Beliefs:
    """Which keys are there, and which are not, each for some seconds. Thread-safe: `_lock` guards `_known`.

    Args:
        there_s: what is there is taken to be there for so long.
        gone_s: what is not there is taken not to be there for so long.

    Example:
        >>> beliefs = Beliefs(30, 2)
        >>> beliefs.note([b"a"], True), beliefs.note([b"b"], False)
        (None, None)
        >>> [beliefs.of(key) for key in (b"a", b"b", b"c")]
        [True, False, None]
    """

    def __init__(self, there_s: float, gone_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lives = {True: there_s, False: gone_s}
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: bytes) -> bool | None:
        """Return whether a key is there; None if that is not known."""
        found = self._known.get(key)
        return None if found is None or self._clock() >= found[1] else found[0]

    def note(self, keys: Iterable[bytes], there: bool, life_s: float | None = None) -> None:
        """Take keys to be there, or not to be, for `life_s` or as long as usual."""
        until = self._clock() + (self._lives[there] if life_s is None else life_s)
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
                self._known[key] = (there, until)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)

    def lost(self, keys: Sequence[bytes]) -> None:
        """The first of these keys, which follow each other, turned out not to be there: nothing is believed any more of
        those behind it."""
        self.note(keys[:1], False)
        with self._lock:
            for key in keys[1:]:
                self._known.pop(key, None)

    def forget(self, keys: Iterable[bytes] | None) -> None:
        """Believe nothing of these keys any more; None: of any."""
        with self._lock:
            if keys is None:
                self._known.clear()
                return
            for key in keys:
                self._known.pop(key, None)

    def __len__(self) -> int:
        return len(self._known)
