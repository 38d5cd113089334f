"""What goes when a tier is full, and what is left is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from durable import put, stored
from kvcases import SMALL, open_store, quick_directory, tokens

from kvstore import TierConfig
from kvstore.config import KIB, MIB
from kvstore.eviction import PriorGuided

RECORD = 4096  # what one block of `SMALL`, coded raw, takes in memory and on disk
assert 8 * SMALL.bytes_per_token + 512 <= RECORD

MEMORY_ONLY = {"disk": TierConfig(0)}
NO_HOST = {"host": TierConfig(0), "disk": TierConfig(8 * 64 * KIB, "raw")}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with quick_directory() as path:
        yield path


def test_a_full_host_tier_gives_up_the_end_of_the_oldest_prefix_first(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw"), **MEMORY_ONLY) as store:
        old, new = tokens(32), tokens(8, seed=1)
        put(store, old)
        put(store, new)
        assert store.contains(old) == 24
        assert stored(store, old) == 24
        assert stored(store, new) == 8


def test_a_prefix_that_was_used_outlives_one_that_was_not(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw"), **MEMORY_ONLY) as store:
        first, second, third = (tokens(16, seed) for seed in range(3))
        put(store, first)
        put(store, second)
        assert stored(store, first) == 16
        put(store, third)
        assert [stored(store, ids) for ids in (first, second, third)] == [16, 0, 16]


def test_putting_again_counts_as_a_use(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw"), **MEMORY_ONLY) as store:
        first, second, third = (tokens(16, seed) for seed in range(3))
        put(store, first)
        put(store, second)
        put(store, first)
        put(store, third)
        assert [stored(store, ids) for ids in (first, second, third)] == [16, 0, 16]


def test_asking_contains_counts_as_no_use(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw"), **MEMORY_ONLY) as store:
        first, second, third = (tokens(16, seed) for seed in range(3))
        put(store, first)
        put(store, second)
        assert store.contains(first) == 16
        put(store, third)
        assert [store.contains(ids) for ids in (first, second, third)] == [0, 16, 16]


def test_what_no_tier_holds_is_forgotten_by_the_index(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw"), **MEMORY_ONLY) as store:
        for seed in range(20):
            put(store, tokens(16, seed))
        stats = store.stats()
        assert stats["index"]["records"] == stats["host"]["records"] == 4
        assert stats["counters"]["memory_evicted_records"] == 36


def test_a_store_that_evicts_by_what_comes_back_serves_within_its_budget(tmp_path: Path) -> None:
    prompt = tokens(16)
    with open_store(tmp_path, host=TierConfig(6 * RECORD, "raw"), eviction="prior", **MEMORY_ONLY) as store:
        for seed in range(1, 40):
            ids = np.concatenate([prompt, tokens(16, seed)])
            put(store, ids)
            assert stored(store, ids) == 32
            assert store.stats()["host"]["bytes"] <= 6 * RECORD
        stats = store.stats()
        assert stats["index"]["records"] == stats["host"]["records"] == 6
        assert stats["counters"]["memory_evicted_records"] == 2 + 2 * 39 - 6
        assert isinstance(store._residency.host._policy.order, PriorGuided)


def test_a_sequence_larger_than_memory_keeps_its_beginning(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw"), **MEMORY_ONLY) as store:
        ids = tokens(100)
        put(store, ids)
        assert 24 <= stored(store, ids) == store.contains(ids) <= 32
        assert store.stats()["host"]["bytes"] <= 4 * RECORD


def test_what_memory_gave_up_comes_from_disk(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw")) as store:
        sequences = [tokens(16, seed) for seed in range(20)]
        for ids in sequences:
            put(store, ids)
        assert [stored(store, ids) for ids in sequences] == [16] * 20
        assert store.stats()["host"]["bytes"] <= 4 * RECORD
        assert store.stats()["index"]["records"] == 40


def test_what_was_read_from_disk_displaces_the_oldest_in_memory(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw")) as store:
        first, second, third = (tokens(16, seed) for seed in range(3))
        for ids in (first, second, third):
            put(store, ids)
        assert store.get(first).tiers == {"disk": 16}
        assert store.get(first).tiers == {"disk": 16}
        assert store.get(first).tiers == {"host": 16}
        assert store.get(third).tiers == {"host": 16}
        assert store.get(second).tiers == {"disk": 16}


def test_of_what_was_read_from_disk_the_end_goes_first_too(tmp_path: Path) -> None:
    ids = tokens(32)
    with open_store(tmp_path) as store:
        put(store, ids)
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw")) as store:
        assert store.get(ids).tiers == {"disk": 32}
        assert store.get(ids).tiers == {"disk": 32}
        put(store, tokens(8, seed=1))
        assert store.get(ids).tiers == {"host": 24, "disk": 8}


def test_a_prompt_in_memory_outlives_the_ends_that_continue_it(tmp_path: Path) -> None:
    prompt = tokens(16)
    with open_store(tmp_path, host=TierConfig(4 * RECORD, "raw"), **MEMORY_ONLY) as store:
        for seed in range(1, 20):
            ids = np.concatenate([prompt, tokens(8, seed)])
            put(store, ids)
            assert stored(store, ids) == 24


def test_a_full_disk_keeps_the_newest_and_forgets_the_oldest(tmp_path: Path) -> None:
    sequences = [tokens(32, seed) for seed in range(60)]
    with open_store(tmp_path, **NO_HOST) as store:
        for ids in sequences:
            put(store, ids)
        lengths = [stored(store, ids) for ids in sequences]
        assert lengths[-1] == 32
        assert lengths[0] == 0
        assert lengths == sorted(lengths)
        assert store.stats()["index"]["records"] == store.stats()["disk"]["records"]
        assert store.stats()["counters"]["disk_evicted_records"] > 0
    with open_store(tmp_path, **NO_HOST) as store:
        assert [stored(store, ids) for ids in sequences] == lengths


def test_on_a_full_disk_a_prefix_that_is_used_stays(tmp_path: Path) -> None:
    favourite = tokens(32, seed=999)
    with open_store(tmp_path, **NO_HOST) as store:
        put(store, favourite)
        for seed in range(100):
            put(store, tokens(32, seed))
            assert stored(store, favourite) == 32
    with open_store(tmp_path, **NO_HOST) as store:
        assert stored(store, favourite) == 32


def test_eviction_from_disk_goes_from_the_leaves(tmp_path: Path) -> None:
    """Every block that is left has its parents: what contains() says is what get() gives, and nothing is unreachable
    after a restart."""
    prompt = tokens(16)
    sequences = [np.concatenate([prompt, tokens(24, seed)]) for seed in range(1, 50)]
    with open_store(tmp_path, **NO_HOST) as store:
        for ids in sequences:
            put(store, ids)
        lengths = [stored(store, ids) for ids in sequences]
        assert [store.contains(ids) for ids in sequences] == lengths
        assert min(lengths) >= 16  # the prompt they share
    with open_store(tmp_path, **NO_HOST) as store:
        assert store.stats()["counters"].get("unreachable_records", 0) == 0
        assert [stored(store, ids) for ids in sequences] == lengths


def test_evicted_tokens_can_be_put_again(tmp_path: Path) -> None:
    with open_store(tmp_path, **NO_HOST) as store:
        for round_ in range(3):
            for seed in range(40):
                put(store, tokens(32, seed))
            assert stored(store, tokens(32, seed=39)) == 32, round_


def test_what_is_evicted_from_disk_leaves_memory_too(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(16 * MIB, "raw"), disk=TierConfig(8 * 64 * KIB, "raw")) as store:
        for seed in range(60):
            put(store, tokens(32, seed))
        stats = store.stats()
        assert stats["index"]["records"] == stats["disk"]["records"] == stats["host"]["records"]
