"""Other ways to keep the same records on the same disk, behind one interface.

A peer holds `capacity` records, numbered from 0 in the order they were written; writing more drops the oldest. It is
handed its records as ready bytes, so it is spared what the store does to a cache: taking it apart, checksums, an
index of prefixes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class Peer(Protocol):
    name: str

    def write(self, values: Sequence[memoryview]) -> None:
        """Writes one group of records, drops as many of the oldest; durable on return."""

    def read(self, number: int, out: memoryview) -> None:
        """Copies the record `number` into `out`, which has its size."""

    def close(self) -> None: ...


class Ring:
    """Which records a peer holds: `oldest` to `newest`, at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.oldest = self.newest = 0

    def take(self, count: int) -> tuple[range, range]:
        """The numbers of `count` new records, and of those that they push out."""
        new = range(self.newest, self.newest + count)
        gone = range(self.oldest, max(self.oldest, new.stop - self.capacity))
        self.oldest, self.newest = gone.stop, new.stop
        return new, gone


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def peers() -> dict[str, Callable[[Path, int, int], Peer]]:
    """Constructors (folder, record bytes, capacity in records) by name; only those whose library is installed."""
    from importlib.util import find_spec

    from benchmarks.peers.stores.files import FilePerValue

    found: dict[str, Callable[[Path, int, int], Peer]] = {"file": FilePerValue}
    if find_spec("lmdb"):
        from benchmarks.peers.stores.lmdb_values import LmdbValues

        found["lmdb"] = LmdbValues
    if find_spec("safetensors"):
        from benchmarks.peers.stores.files import SafetensorsFiles

        found["safetensors"] = SafetensorsFiles
    if find_spec("diskcache"):
        from benchmarks.peers.stores.disk_cache import DiskCache

        found["diskcache"] = DiskCache
    return found
