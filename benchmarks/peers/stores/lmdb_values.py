"""The payloads inside LMDB, as values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lmdb

from benchmarks.peers.stores import Ring


class LmdbValues:
    """Default flags (durable), one commit a group."""

    name = "lmdb"

    def __init__(self, folder: Path, record: int, capacity: int) -> None:
        folder.mkdir(parents=True)
        self._env = lmdb.open(str(folder), map_size=4 * record * capacity, lib_version=0)
        self._ring = Ring(capacity)

    def write(self, values: Sequence[memoryview]) -> None:
        new, gone = self._ring.take(len(values))
        with self._env.begin(write=True) as txn:
            for number in gone:
                txn.delete(number.to_bytes(8, "big"))
            for number, value in zip(new, values, strict=True):
                txn.put(number.to_bytes(8, "big"), value, append=True)

    def read(self, number: int, out: memoryview) -> None:
        with self._env.begin(buffers=True) as txn:
            out[:] = txn.get(number.to_bytes(8, "big"))

    def close(self) -> None:
        self._env.close()
