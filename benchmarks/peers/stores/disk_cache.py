"""The diskcache library: SQLite, with large values as files beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import diskcache

from benchmarks.peers.stores import Ring


class DiskCache:
    """Default settings. It syncs nothing itself, so one sync of the file system ends each group."""

    name = "diskcache"

    def __init__(self, folder: Path, record: int, capacity: int) -> None:
        folder.mkdir(parents=True)
        self._cache = diskcache.Cache(str(folder), size_limit=2 * record * capacity, eviction_policy="none")
        self._ring = Ring(capacity)

    def write(self, values: Sequence[memoryview]) -> None:
        new, gone = self._ring.take(len(values))
        for number in gone:
            del self._cache[number]
        for number, value in zip(new, values, strict=True):
            self._cache[number] = bytes(value)
        os.sync()

    def read(self, number: int, out: memoryview) -> None:
        out[:] = self._cache[number]

    def close(self) -> None:
        self._cache.close()
