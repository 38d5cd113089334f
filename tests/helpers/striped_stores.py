"""Stores whose small records are read in parts, as large ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvcases import kv_of, open_store, tokens
from small_stores import catalog_entries

from kvstore import KVLayout, KVStore, TierConfig
from kvstore.config import KIB, MIB
from kvstore.core.record import parse
from kvstore.read import get, stripes
from kvstore.read.layerwise import LayerDecode
from kvstore.read.stripes import StripeReader
from kvstore.residency import block

LAYOUT = KVLayout.uniform(12, 2, 128, "bfloat16")  # a block of 8 tokens takes 96 KiB
COUNT = 68  # eight blocks and a tail, which is read whole
IDS = tokens(COUNT)
KV = kv_of(IDS, LAYOUT)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small records are read in parts; the model leaves a processor, whatever machine this is."""
    monkeypatch.setattr(get, "free_processors", lambda: 1)
    monkeypatch.setattr(block, "_LEAST_FOR_SUMS", 64 * KIB)
    monkeypatch.setattr(stripes, "_PART_BYTES", 16 * KIB)
    monkeypatch.setattr(stripes, "_LEAST_BYTES", 64 * KIB)
    monkeypatch.setattr(stripes, "_AHEAD_BYTES", 64 * KIB)


def made_readers(monkeypatch: pytest.MonkeyPatch) -> list[StripeReader]:
    """What reads layers later, as it is made."""
    made: list[StripeReader] = []
    init = StripeReader.__init__

    def noted(self: StripeReader, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(StripeReader, "__init__", noted)
    return made


def leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's threads decode no layers: whoever waits for them does."""
    monkeypatch.setattr(LayerDecode, "_line_up", lambda later: None)


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
