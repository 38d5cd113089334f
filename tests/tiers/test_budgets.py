"""Ten times each budget is put, with pins and times to live: no tier is ever above its budget, and pins hold."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import seeds
import small_stores
from faultfs import FaultFS
from length import FULL

from kvstore import KVLayout, KVStore, StoreConfig, TierConfig
from kvstore.config import MIN_SEGMENT_BYTES, PAGE_BYTES
from kvstore.errors import ConfigError
from kvstore.residency.block import most_bytes
from kvstore.tiers.disk.budget import BESIDE_BYTES, fitted

PINNED = range(1, 9)
RECORD = 4096  # what a record of these tiny blocks takes, in a buffer and on disk


@contextmanager
def watched(store: KVStore, tier: str) -> Iterator[list[int]]:
    """Samples a memory tier from another thread, as often as it can; the samples above the budget are collected."""
    above: list[int] = []
    over = threading.Event()
    watched_tier = getattr(store._residency, tier)

    def watch() -> None:
        while not over.wait(0.0005):
            if watched_tier.nbytes > watched_tier.budget:
                above.append(watched_tier.nbytes)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield above
    finally:
        over.set()
        thread.join()


def flood(store: KVStore, records: int, seed: int = 0) -> None:
    """Puts so many records of all sorts: plain, growing, with a time to live, read again."""
    rng = random.Random(seeds.nth(seed))
    number = 1000
    while records > 0:
        count = rng.choice((4, 9, 16, 40))
        options = rng.choice(({}, {}, {"ttl": 0.02}, {"ttl": 3600.0}))
        small_stores.put(store, small_stores.tokens_of(number, count), **options)
        records -= -(-count // small_stores.BLOCK)
        if rng.random() < 0.2:
            small_stores.put(store, small_stores.tokens_of(rng.randrange(1000, number + 1), 48))
        if rng.random() < 0.2:
            small_stores.stored(store, small_stores.tokens_of(rng.randrange(1000, number + 1), 40))
        if rng.random() < 0.1:
            store.flush()
        number += 1


def pin_some(store: KVStore) -> None:
    for number in PINNED:
        small_stores.put(store, small_stores.tokens_of(number, 9), pin=True)


def pins_hold(store: KVStore) -> None:
    assert {
        number: small_stores.stored(store, small_stores.tokens_of(number, 9)) for number in PINNED
    } == dict.fromkeys(PINNED, 9)


@pytest.mark.parametrize("codec", ["raw", "splitzip", "zstd"])
@pytest.mark.parametrize("segments", [8, 32])
def test_finding_13_the_disk_budget_holds_to_the_byte_at_every_call(tmp_path: Path, segments: int, codec: str) -> None:
    config = small_stores.config(host=1 << 15, disk=segments * small_stores.SEGMENT, codec=codec)
    budget = config.disk.bytes
    above: list[int] = []

    def measure(call: str) -> None:
        if call in ("pwritev", "allocate", "fdatasync") and (tmp_path / "catalog").exists():
            use = small_stores.disk_use(tmp_path)
            if use > budget:
                above.append(use)

    with KVStore(tmp_path, small_stores.IDENTITY, config, fs=FaultFS(before=measure)) as store:
        pin_some(store)
        times = 10 if FULL else 5 if segments == 8 else 3  # how often the budget is filled
        flood(store, times * segments * small_stores.SEGMENT // RECORD)
        store.flush()
        pins_hold(store)
        small_stores.all_is_well(store)
        if segments > 8:  # of so few, pins and the reserve leave little
            assert store.stats()["disk"]["bytes"] > budget // 3, "the budget is not used"
        assert above == []
        disk = store.stats()["disk"]
        assert disk["used_bytes"] == small_stores.disk_use(tmp_path)
        assert disk["utilisation"] == disk["bytes"] / budget
    assert small_stores.disk_use(tmp_path) <= budget
    with KVStore(tmp_path, small_stores.IDENTITY, config) as store:
        pins_hold(store)


def the_budget_holds(store: KVStore, tier: str, records: int) -> None:
    """Of a memory tier, while so many records are put; pins stay, and most of the budget is used."""
    pin_some(store)
    store.flush()
    with watched(store, tier) as above:
        flood(store, records)
        store.flush()
    found = getattr(store._residency, tier)
    assert above == []
    assert found.nbytes == sum(item.nbytes for item in found._items.values()) <= found.budget
    assert found.nbytes > found.budget // 2, "the budget is not used"
    pins_hold(store)


@pytest.mark.parametrize("disk", [0, 16 * small_stores.SEGMENT], ids=["memory-only", "with-disk"])
def test_the_host_budget_holds(tmp_path: Path, disk: int) -> None:
    with KVStore(
        tmp_path, small_stores.IDENTITY, small_stores.config(host=40 * RECORD, disk=disk, pinned_share=0.9)
    ) as store:
        assert store._residency.host.budget == 40 * RECORD
        the_budget_holds(store, "host", 400)


@pytest.mark.parametrize("host", [0, 1 << 20], ids=["device-only", "with-host"])
def test_the_device_budget_holds(tmp_path: Path, host: int) -> None:
    budget = 40 * small_stores.BLOCK * small_stores.LAYOUT.bytes_per_token
    with KVStore(
        tmp_path, small_stores.IDENTITY, small_stores.config(device=budget, host=host, disk=0, pinned_share=0.9)
    ) as store:
        assert store._residency.device.budget == budget
        the_budget_holds(store, "device", 400)


def test_what_is_pinned_beyond_its_share_is_stored_without_a_pin_and_within_the_budget(tmp_path: Path) -> None:
    config = small_stores.config(host=0, disk=6 * small_stores.SEGMENT)
    with KVStore(tmp_path, small_stores.IDENTITY, config) as store:
        pinned = []
        for number in range(60):
            if small_stores.put(store, small_stores.tokens_of(number, 40), pin=True).pinned:
                pinned.append(number)
            assert store.flush().dropped_blocks == 0
            assert small_stores.disk_use(tmp_path) <= config.disk.bytes
        assert 0 < len(pinned) == 60 - store.stats()["counters"]["refused_pins"]
        small_stores.all_is_well(store)
        assert {small_stores.stored(store, small_stores.tokens_of(number, 40)) for number in pinned} == {40}


def test_the_write_queue_is_bounded_and_says_what_it_drops(tmp_path: Path) -> None:
    gate = threading.Event()

    def wait(call: str) -> None:
        if call == "fdatasync" and started:
            gate.wait()

    started: list[bool] = []
    bytes_of_a_put = 40 * small_stores.LAYOUT.bytes_per_token
    config = small_stores.config(write_queue_bytes=4 * bytes_of_a_put, put_timeout_s=0.0, group_bytes=1)
    with KVStore(tmp_path, small_stores.IDENTITY, config, fs=FaultFS(before=wait)) as store:
        small_stores.put(store, small_stores.tokens_of(100, 4))
        store.flush()
        started.append(True)
        results = [small_stores.put(store, small_stores.tokens_of(number, 40)) for number in range(10)]
        assert store.stats()["queue"]["bytes"] <= 4 * bytes_of_a_put
        assert [result.dropped_blocks for result in results] == [0] * 4 + [10] * 6
        assert store.stats()["counters"]["dropped_queue_full"] == 60
        assert small_stores.stored(store, small_stores.tokens_of(0, 40)) == 40
        assert small_stores.stored(store, small_stores.tokens_of(9, 40)) == 0
        gate.set()
        store.flush()
        assert small_stores.put(store, small_stores.tokens_of(9, 40)).dropped_blocks == 0


def test_what_expired_is_gone_and_its_space_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, kept, now = small_stores.tokens_of(1, 40), small_stores.tokens_of(2, 9), time.time
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()) as store:
        small_stores.put(store, tokens, ttl=100)
        small_stores.put(store, kept, ttl=3600)
        store.flush()
        assert small_stores.stored(store, tokens) == 40
        monkeypatch.setattr(time, "time", lambda: now() + 200)
        assert small_stores.stored(store, tokens) == 0
        small_stores.put(store, kept)  # which makes room first
        store.flush()
        assert store.contains(tokens) == 0
        assert store.stats()["disk"]["records"] == 3
        assert small_stores.stored(store, kept) == 9
        small_stores.all_is_well(store)


def test_a_store_that_is_opened_with_a_smaller_budget_shrinks_to_it(tmp_path: Path) -> None:
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(disk=64 * small_stores.SEGMENT)) as store:
        flood(store, 500)
    small = small_stores.config(disk=16 * small_stores.SEGMENT)
    with KVStore(tmp_path, small_stores.IDENTITY, small) as store:
        assert small_stores.disk_use(tmp_path) <= small.disk.bytes  # at once
        assert store.stats()["disk"]["records"] > 100
        flood(store, 500, seed=1)
        store.flush()
        small_stores.all_is_well(store)
        assert small_stores.disk_use(tmp_path) <= small.disk.bytes


def test_a_reopened_store_holds_what_it_held(tmp_path: Path) -> None:
    """Opening evicts only where files are above the budget."""
    config = small_stores.config(host=0, disk=12 * small_stores.SEGMENT)
    held = -1
    for seed in range(6):
        with KVStore(tmp_path, small_stores.IDENTITY, config) as store:
            records = store.stats()["disk"]["records"]
            assert held in (-1, records)
            flood(store, 200, seed)
            store.flush()
            held = store.stats()["disk"]["records"]
        assert small_stores.disk_use(tmp_path) <= config.disk.bytes


@pytest.mark.parametrize(("refused", "left", "found"), [(0, 5, 9), (1, 4, 12), (2, 4, 16)])
def test_what_a_part_of_a_put_takes_the_place_of_goes_if_that_part_is_stored(
    tmp_path: Path, refused: int, left: int, found: int
) -> None:
    config = small_stores.config(host=0)
    ids = small_stores.tokens_of(1, 20)
    with KVStore(tmp_path, small_stores.IDENTITY, config) as store:
        small_stores.put(store, ids[:9])
        store.flush()
        disk = store._residency.disk
        assert disk is not None
        place, asked = disk._place, itertools.count()
        disk._place = lambda *wanted: place(*wanted) if next(asked) != refused else None
        small_stores.put(store, ids)  # its third block, the first that is new, takes the place of a tail
        assert store.flush().dropped_blocks == 1
        assert store.stats()["disk"]["records"] == left
        small_stores.all_is_well(store)
    with KVStore(tmp_path, small_stores.IDENTITY, config) as store:
        assert store.stats()["disk"]["records"] == left
        assert "unreachable_records" not in store.stats()["counters"]
        assert small_stores.stored(store, ids) == found
        small_stores.put(store, ids)
        assert small_stores.stored(store, ids) == 20
        small_stores.all_is_well(store)


def test_finding_13_a_segment_above_2_gib_takes_records(tmp_path: Path) -> None:
    class Sparse(FaultFS):
        def allocate(self, fd: int, nbytes: int) -> None:
            self.truncate(fd, nbytes)

    size = (1 << 32) - small_stores.SEGMENT
    config = small_stores.config(host=0, disk=1000 * size, segment_bytes=size)
    with KVStore(tmp_path, small_stores.IDENTITY, config, fs=Sparse()) as store:
        small_stores.put(store, small_stores.tokens_of(1, 9))
        store.flush()
        disk = store._residency.disk
        assert disk is not None
        assert disk.segments.current is not None
        disk.segments.current.end = size - 2 * RECORD  # the last places of it
        disk.segments._fill(disk.segments.current)
        small_stores.put(store, small_stores.tokens_of(2, 9))
        assert store.flush().dropped_blocks == 0
        assert len(disk.segments.by_number) == 2
    with KVStore(tmp_path, small_stores.IDENTITY, config, fs=Sparse()) as store:
        assert [small_stores.stored(store, small_stores.tokens_of(number, 9)) for number in (1, 2)] == [9, 9]
        small_stores.all_is_well(store, deep=True)


def test_a_budget_that_no_store_fits_is_refused(tmp_path: Path) -> None:
    config = StoreConfig(disk=TierConfig(4 * small_stores.SEGMENT, "raw"), segment_bytes=small_stores.SEGMENT)
    with pytest.raises(ConfigError, match=r"disk\.bytes: 262144 is below 3 segments of 65536 bytes and 262144 bytes"):
        KVStore(tmp_path / "store", small_stores.IDENTITY, config)
    assert not (tmp_path / "store").exists()


def test_a_budget_of_few_blocks_has_segments_that_fit(tmp_path: Path) -> None:
    """With the default size of segments it would have been refused."""
    layout = small_stores.IDENTITY.layout
    budget = 3 * MIN_SEGMENT_BYTES + BESIDE_BYTES
    settings = StoreConfig(disk=TierConfig(budget, "raw"), block_tokens=4)
    assert fitted(settings, layout).segment_bytes == MIN_SEGMENT_BYTES
    with pytest.raises(ConfigError, match=f"set it to {budget} or more"):
        fitted(replace(settings, disk=TierConfig(budget - 1, "raw")), layout)
    with KVStore(tmp_path, small_stores.IDENTITY, settings) as store:
        small_stores.put(store, small_stores.tokens_of(1, 32))
        assert store.flush().dropped_blocks == 0
        assert small_stores.stored(store, small_stores.tokens_of(1, 32)) == 32
    large = KVLayout.uniform(30, 3, 64)  # a block is about 2.9 MB
    assert (
        fitted(StoreConfig(disk=TierConfig(10 << 20, "raw")), large).segment_bytes >= most_bytes(large, 64) + PAGE_BYTES
    )


def test_a_budget_that_is_too_small_for_the_store_that_is_there_is_refused(tmp_path: Path) -> None:
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(disk=1 << 22)) as store:
        small_stores.put(store, small_stores.tokens_of(1, 32))
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"keeps the segment_bytes that it was made with; disk\.bytes: 65536 "):
        KVStore(tmp_path, small_stores.IDENTITY, StoreConfig(disk=TierConfig(1 << 16, "raw")))
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("block_tokens", [64, 4096])
@pytest.mark.parametrize("budget", [8 << 30, 1 << 30, 1 << 28])
def test_finding_13_small_budgets_have_small_segments(budget: int, block_tokens: int) -> None:
    """Whole records behind the first page: of a 128th of the budget, but eight at least, and no more than is set."""
    layout = KVLayout.uniform(2, 1, 16)
    config = StoreConfig(disk=TierConfig(budget, "raw"), block_tokens=block_tokens)
    record = most_bytes(layout, block_tokens)
    wanted = PAGE_BYTES + max(8, budget // 128 // record) * record
    assert fitted(config, layout).segment_bytes == min(64 << 20, wanted)
