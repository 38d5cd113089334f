"""Counters of one store."""

from __future__ import annotations

import threading
from collections import Counter


class Metrics:
    """Named counters that only grow. Thread-safe. Every fallback, drop and damaged entry is counted here."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int | float = 1) -> None:
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]

    def __getitem__(self, name: str) -> int | float:
        with self._lock:
            return self._counts[name]

    def snapshot(self) -> dict[str, int | float]:
        with self._lock:
            return dict(sorted(self._counts.items()))
