"""A store of few segments: a put that fits finds room, whatever lies where."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import small_stores
from small_stores import SEGMENT, tokens_of

from kvstore import FlushResult, KVStore


@pytest.mark.parametrize("seed", [19, 20, 33, 35])
def test_a_put_of_most_of_a_segment_is_never_dropped(tmp_path: Path, seed: int) -> None:
    """A group was placed in the segment that was filled, then in the one to which others had been moved for it; with
    three segments none was left that could be emptied for its last record."""
    chance, kept = random.Random(seed), []
    settings = small_stores.config(host=1 << 14, disk=3 * SEGMENT)
    with KVStore(tmp_path / "store", small_stores.IDENTITY, settings) as store:
        for number in range(60):
            kept.append(tokens_of(number, small_stores.BLOCK * chance.randint(1, 10)))
            put = small_stores.put(store, kept[-1])
            assert put.dropped_blocks == 0
            assert store.flush() == FlushResult(put.new_blocks, 0), number
            for _ in range(chance.randint(0, 3)):
                small_stores.stored(store, chance.choice(kept[-20:]))
        assert store.stats()["counters"]["disk_evicted_records"] > 0
        small_stores.all_is_well(store)
