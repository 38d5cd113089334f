"""What a connector counts, by name; the stats of vLLM carry it from the worker to the log and to Prometheus."""

from __future__ import annotations

import logging
import threading

_log = logging.getLogger(__name__)
_MOST_LINES = 100

NAMES = {
    "loaded_tokens": "tokens loaded from the store into vLLM's memory",
    "load_seconds": "seconds that loads took, summed over threads",
    "failed_loads": "requests of which less was loaded than the index had; vLLM computes the rest",
    "failed_blocks": "blocks of vLLM that were to be loaded and were not",
    "saved_tokens": "tokens that were copied for the store",
    "save_seconds": "seconds that steps of the engine took longer for these copies",
    "stored_tokens": "tokens among them that the store did not have",
    "dropped_saves": "copies that were not made, for too many waited to be stored",
    "lost_saves": "copies that the store did not take: what comes before them had left, or it refused",
    "lookup_errors": "lookups that failed; the request was computed",
    "requests_not_served": "requests with adapters, images or embeddings, which are not stored",
}


class Counters:
    """Sums since they were last taken. Thread-safe.

    Example:
        >>> counters = Counters()
        >>> counters.add("loaded_tokens", 512)
        >>> counters.take(), counters.take()
        ({'loaded_tokens': 512}, {})
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._logged: set[str] = set()

    def add(self, name: str, count: float = 1) -> None:
        """Add to a counter of `NAMES`."""
        if name not in NAMES:
            raise KeyError(name)
        with self._lock:
            self._sums[name] = self._sums.get(name, 0) + count

    def log(self, what: str, error: BaseException) -> None:
        """Log an error that the engine does not see: each that differs once, and not more than a hundred."""
        line = f"{what} failed: {type(error).__name__}: {error}"
        with self._lock:
            is_new = line not in self._logged and len(self._logged) < _MOST_LINES
            if is_new:
                self._logged.add(line)
        if is_new:
            _log.warning("%s", line)

    def take(self) -> dict[str, float]:
        """Return the sums, without those that are 0, and begin anew."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: value for name, value in sums.items() if value}
