"""What every tier and every source promises, over all there are. mypy holds the signatures (`Tier`, `Source`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcases import BLOCK, SMALL, kv_of, open_store, random_kv, same_kv, tokens

from kvstore import KVStore, TierConfig
from kvstore.codecs import KVView, codec_by_id, codec_by_name
from kvstore.codecs.base import BlockInfo
from kvstore.config import MIB
from kvstore.core.explanation import Reason
from kvstore.core.record import parse
from kvstore.residency.block import Block
from kvstore.tiers.base import Source, StorageTier, TensorSource, Tier
from kvstore.tiers.buffers import Buffer
from kvstore.tiers.device import DeviceBlock
from kvstore.tiers.disk.catalog import Entry
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.host import HostRecord
from kvstore.tiers.memory import MemoryTier

IDS = tokens(3 * BLOCK)
NAMES = ["device", "host", "disk"]


@contextmanager
def opened(path: Path, name: str) -> Iterator[KVStore]:
    """A store that keeps three blocks in this tier, and only there."""
    none: dict[str, Any] = {tier: TierConfig(0) for tier in NAMES}
    with open_store(path, **{**none, name: TierConfig(1 * MIB, "splitzip" if name == "device" else "zstd")}) as store:
        store.put(IDS, kv_of(IDS))
        store.flush()
        yield store


def tier_of(store: KVStore, name: str) -> Tier[Any]:
    residency = store._residency
    tiers: list[Tier[Any]] = [residency.device, residency.host, *residency.storage.values()]
    return {tier.name: tier for tier in tiers}[name]


def tensors_of(store: KVStore, source: Source, tokens: int) -> Any:
    """What the source gives, in the ways that it offers."""
    out = random_kv(tokens, SMALL, seed=7)
    target = KVView.of_layers(SMALL, out)
    if source.tensors is not None:
        source.tensors.copy_to(target)
        return out
    record = source.sealed
    if record is not None:
        header, payload = record.header, record.payload
    else:
        tier, buffer = store._residency.storage[source.tier], store._engine.pool.take(source.nbytes)
        tier.read([source], [buffer])
        header = parse(buffer.view, len(buffer.view))
        payload = HostRecord(header, buffer).payload
    info = BlockInfo(SMALL, header.tokens, header.start)
    codec_by_id(header.codec).decode(info, payload, header.layer_sizes, target)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_tier_gives_what_it_was_given(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, name) as store:
        tier = tier_of(store, name)
        found = tier.locate([1, 2, 3])
        for i, source in enumerate(found):
            assert source is not None
            expected = [(k[:, i * BLOCK :], v[:, i * BLOCK :]) for k, v in kv_of(IDS)]
            for count in (1, 5, BLOCK):
                assert same_kv(tensors_of(store, source, count), expected, count)
        tier.release(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_tier_says_what_it_does_not_have(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, name) as store:
        tier = tier_of(store, name)
        found = tier.locate([9, 2, 8])
        assert [source is None for source in found] == [True, False, True]
        tier.release(source for source in found if source is not None)


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_a_tier_agree(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, name) as store:
        tier = tier_of(store, name)
        stats = tier.stats()
        assert (stats["bytes"], stats["budget"], stats["records"]) == (tier.nbytes, tier.budget, 3)
        found = tier.locate([1, 2, 3])
        assert sum(source.nbytes for source in found) == tier.nbytes <= tier.budget
        tier.release(found)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_removed_is_gone_and_costs_nothing(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, name) as store:
        tier = tier_of(store, name)
        before = tier.nbytes
        assert tier.remove([3, 9]) == 1
        assert tier.locate([3]) == [None]
        assert 0 < tier.nbytes < before
        assert tier.remove([1, 2, 3]) == 2
        assert (tier.nbytes, tier.stats()["records"]) == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_source_outlives_its_stay_in_the_tier(tmp_path: Path, name: str) -> None:
    """A reader that looked a block up can still read it, until it releases the source."""
    with opened(tmp_path, name) as store:
        tier = tier_of(store, name)
        found = tier.locate([1])
        tier.remove([1])
        for seed in range(1, 5):
            store.put(tokens(3 * BLOCK, seed), kv_of(tokens(3 * BLOCK, seed)))
        store.flush()
        assert same_kv(tensors_of(store, found[0], BLOCK), kv_of(IDS), BLOCK)
        tier.release(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_source_says_where_it_is_and_how_it_is_had(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, name) as store:
        (source,) = store._residency.find([2])
        assert source is not None
        is_read = source.tier in store._residency.storage
        assert source.tier == name
        assert source.nbytes > 0
        assert [source.tensors is not None, source.sealed is not None, is_read].count(True) == 1
        assert (source.codec_id is None) == (source.tensors is not None)
        assert source.codec_id in (None, codec_by_name("zstd").id)
        store._residency.release([source, None])


def test_blocks_that_wait_to_be_written_are_a_source() -> None:
    kv = kv_of(tokens(5))
    ids = tokens(5)
    block = Block(1, 0, b"", b"", b"", 0, ids, KVView.of_layers(SMALL, kv), 0.0, 0.0, False)
    source: Source = block
    assert (source.tier, source.codec_id, source.nbytes) == ("queue", None, 5 * SMALL.bytes_per_token)
    assert source.tensors is block
    assert block.fetched() is block  # it is in host memory
    assert not block.reaches(torch.device("cuda", 0))
    out = random_kv(3, SMALL)
    block.copy_to(KVView.of_layers(SMALL, out))
    assert same_kv(out, kv, 3)


@pytest.mark.parametrize("make", [DeviceBlock.raw, DeviceBlock.coded], ids=["raw", "coded"])
def test_a_fetched_block_gives_the_same(make: Any) -> None:
    kv = kv_of(tokens(9))
    block = make(BlockInfo(SMALL, np.arange(9, dtype=np.uint32), 0), KVView.of_layers(SMALL, kv))
    out = random_kv(7, SMALL)
    block.fetched().copy_to(KVView.of_layers(SMALL, out))
    assert same_kv(out, kv, 7)


def test_storage_says_which_records_lie_together_and_which_moved(tmp_path: Path) -> None:
    with opened(tmp_path, "disk") as store:
        (tier,) = store._residency.storage.values()
        found = tier.locate([1, 2, 3])
        assert tier.follows(found[0], found[1])
        assert not tier.follows(found[0], found[2])
        assert not tier.follows(found[1], found[0])
        assert all(map(tier.is_current, found))
        tier.remove([2])
        assert [tier.is_current(source) for source in found] == [True, False, True]
        tier.release(found)


# ---- a tier that the engine has not heard of -------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteRecord(Source):
    """Where a record lies in `RemoteTier`."""

    record: int
    data: bytes
    codec: int

    @property
    def tier(self) -> str:
        return "remote"

    @property
    def codec_id(self) -> int | None:
        return self.codec

    @property
    def nbytes(self) -> int:
        return len(self.data)


class RemoteTier(StorageTier[RemoteRecord]):
    """Sealed records somewhere else, one call each. In `leaving` is what becomes of records as soon as they are read:
    others have their place, and they themselves lie elsewhere, or nowhere (None)."""

    name, budget, nbytes = "remote", 1 * MIB, 0

    def __init__(self, records: dict[int, HostRecord]) -> None:
        self.records = {
            number: RemoteRecord(number, bytes(record.buffer.view), record.header.codec)
            for number, record in records.items()
        }
        self.leaving: dict[int, list[RemoteRecord | None]] = {}
        self.held = 0

    def locate(self, records: Sequence[int]) -> list[RemoteRecord | None]:
        found = [self.records.get(record) for record in records]
        self.held += sum(source is not None for source in found)
        return found

    def release(self, sources: Iterable[RemoteRecord]) -> None:
        self.held -= len(list(sources))

    def follows(self, before: RemoteRecord, source: RemoteRecord) -> bool:
        return False

    def read(self, sources: Sequence[RemoteRecord], buffers: Sequence[Buffer]) -> None:
        for source, buffer in zip(sources, buffers, strict=True):
            if not self.leaving.get(source.record):
                buffer.view[:] = source.data[: len(buffer.view)]
                continue
            elsewhere = self.leaving[source.record].pop(0)
            buffer.view[:] = bytes(len(buffer.view))
            self.records.pop(source.record)
            if elsewhere is not None:
                self.records[source.record] = elsewhere

    def holds(self, record: int) -> bool:
        return record in self.records

    def lacks(self, record: int) -> bool:
        return record not in self.records

    def is_current(self, source: RemoteRecord) -> bool:
        return self.records.get(source.record) is source

    def remove(self, records: Sequence[int]) -> int:
        return sum(self.records.pop(record, None) is not None for record in records)

    def stats(self) -> dict[str, int]:
        return {"bytes": self.nbytes, "budget": self.budget, "records": len(self.records)}


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[KVStore, RemoteTier]]:
    """A store whose blocks are in another tier than its own."""
    with opened(tmp_path, "host") as store:
        tier = RemoteTier(store._residency.host._items)
        monkeypatch.setattr(type(store._residency), "storage", {"remote": tier})
        store._residency.host.clear()
        yield store, tier


def test_a_tier_that_the_engine_does_not_know_is_read(remote: tuple[KVStore, RemoteTier]) -> None:
    store, tier = remote
    for count in (3 * BLOCK, BLOCK + 3):
        hit = store.get(IDS[:count])
        assert hit is not None
        assert hit.tiers == {"remote": count}
        assert same_kv(hit.layers, kv_of(IDS), count)
    assert tier.held == 0
    assert store.stats()["remote"]["records"] == 3
    store.get(IDS)
    assert store.get(IDS).tiers == {"host": 3 * BLOCK}  # what is read again is promoted
    assert tier.held == 0


def test_what_only_such_a_tier_holds_stays_when_memory_gives_it_up(remote: tuple[KVStore, RemoteTier]) -> None:
    store, tier = remote
    store.get(IDS)
    store.get(IDS)
    assert store.get(IDS).tiers == {"host": 3 * BLOCK}
    for other in range(1, 400):
        if all(record not in store._residency.host for record in (1, 2, 3)):
            break
        more = tokens(40 * BLOCK, seed=other)
        store.put(more, kv_of(more))
        store.flush()
    assert store.get(IDS).tiers == {"remote": 3 * BLOCK}
    assert store.explain(IDS).tokens == 3 * BLOCK  # it reads the records' headers alone
    assert tier.held == 0


def test_what_it_damages_is_quarantined_and_what_it_moved_is_read_elsewhere(remote: tuple[KVStore, RemoteTier]) -> None:
    store, tier = remote
    tier.records[3] = replace(tier.records[3], data=bytes(tier.records[3].nbytes))
    hit = store.get(IDS)
    assert hit is not None
    assert (hit.tokens, hit.tiers) == (2 * BLOCK, {"remote": 2 * BLOCK})
    assert store.stats()["counters"]["quarantined_records"] == 1
    tier.leaving[2] = [replace(tier.records[2]) for _ in range(3)]
    hit = store.get(IDS)
    assert hit is not None
    assert (hit.tokens, hit.tiers) == (2 * BLOCK, {"remote": 2 * BLOCK})
    assert same_kv(hit.layers, kv_of(IDS), 2 * BLOCK)
    counters = store.stats()["counters"]
    assert (counters["quarantined_records"], counters["stale_reads"]) == (1, 3)
    assert tier.held == 0


def test_what_it_moves_again_and_again_is_missed_and_stays(remote: tuple[KVStore, RemoteTier]) -> None:
    store, tier = remote
    tier.leaving[2] = [replace(tier.records[2]) for _ in range(4)]
    assert [store.get(IDS).tokens for _ in range(2)] == [BLOCK, 3 * BLOCK]
    assert store.stats()["counters"]["stale_reads"] == 4
    assert tier.held == 0


def test_what_it_removed_is_forgotten(remote: tuple[KVStore, RemoteTier]) -> None:
    store, tier = remote
    tier.leaving[2] = [None]
    assert store.get(IDS).tokens == BLOCK
    counters = store.stats()["counters"]
    assert (counters["stale_reads"], counters.get("quarantined_records", 0)) == (1, 0)
    assert store.explain(IDS).blocks[1].reason == Reason.EVICTED
    assert tier.held == 0


def test_every_tier_and_source_names_its_contract() -> None:
    """So that mypy, which sees the whole package, compares them."""
    assert StorageTier in DiskTier.__mro__
    assert Tier in MemoryTier.__mro__
    assert all(Source in kind.__mro__ for kind in (Entry, HostRecord, DeviceBlock, Block, TensorSource))
