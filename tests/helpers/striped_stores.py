"""Stores whose small records are read in parts, as large ones are."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from kvcases import kv_of, open_store, tokens
from small_stores import catalog_entries
from threadruns import HANGS_S

from kvstore import KVLayout, KVStore, TierConfig
from kvstore.config import MIB
from kvstore.core.record import parse

LAYOUT = KVLayout.uniform(12, 2, 128, "bfloat16")  # a block of 8 tokens takes 96 KiB
COUNT = 68  # eight blocks and a tail, which is read whole
IDS = tokens(COUNT)
KV = kv_of(IDS, LAYOUT)


def opened(path: Path, codec: str = "entropy", **settings: Any) -> KVStore:
    disk = TierConfig(16 * MIB, codec)
    store = open_store(path, LAYOUT, disk=disk, segment_bytes=MIB, **settings)
    if not store.stats()["disk"]["direct_io"]:
        store.close()
        pytest.skip("this file system has no O_DIRECT")
    return store


def filled(path: Path, codec: str = "entropy", **settings: Any) -> KVStore:
    """A store whose records are all on disk."""
    with opened(path, codec) as store:
        store.put(IDS, KV)
    return opened(path, codec, **settings)


def counter(store: KVStore, name: str) -> int:
    return int(store.stats()["counters"].get(name, 0))


def flip(store: KVStore, path: Path, number: int, layer: int) -> None:
    """Changes a byte of a layer of a record, on disk."""
    extent = catalog_entries(store)[number].extent
    with open(path / "segments" / f"{extent.segment:08x}.seg", "r+b") as file:
        file.seek(extent.offset)
        header = parse(memoryview(file.read(extent.nbytes)), extent.nbytes)
        assert header.has_sums
        at = extent.offset + header.payload_offset + sum(header.layer_sizes[:layer]) + header.layer_sizes[layer] // 2
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def threads_are_done(store: KVStore) -> None:
    """Returns when the threads that decode have done what was given to them so far: all are here at once."""
    workers = store._engine.getter.fetcher.executor
    together = threading.Barrier(len(workers._threads))
    for here in [workers.submit(together.wait, HANGS_S) for _ in workers._threads]:
        here.result()
