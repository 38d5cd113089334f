"""Memory of the content index: bounded a token, used again, and given back."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.trie._content import ContentIndex
from kvstore.trie.reference.content import ReferenceContent

pytestmark = pytest.mark.native

NONE = np.zeros(0, np.uint64)


def put(index: ContentIndex, blocks: np.ndarray, first: int) -> None:
    n, size = blocks.shape
    records = np.arange(first, first + n, dtype=np.uint64)
    columns = np.zeros(n, np.uint32), records, np.zeros(n, np.uint64), np.full(n, size, np.uint32)
    assert index.insert_many(*columns, blocks.ravel()) == n


def random_blocks(n: int, size: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, (n, size), dtype=np.uint32)


@pytest.mark.parametrize("n", [4_000, 7_000, 11_000, 16_000])
def test_a_token_takes_less_than_eight_bytes(n: int) -> None:
    index = ContentIndex(16, 16, 8, 8, 0)
    put(index, random_blocks(n), 1)
    stats = index.stats()
    assert stats["tokens"] == n * 64
    assert 4 * n * 64 < stats["bytes"] <= 8 * n * 64


def test_blocks_that_come_one_by_one_take_no_more() -> None:
    index = ContentIndex(16, 16, 8, 8, 0)
    for record, block in enumerate(random_blocks(5_000), 1):
        index.insert(0, record, record - 1, block)
    assert index.stats()["bytes"] <= 8 * 5_000 * 64


def test_memory_comes_back_when_blocks_leave() -> None:
    index = ContentIndex(16, 16, 8, 8, 0)
    blocks = random_blocks(16_000)
    put(index, blocks, 1)
    full = index.stats()["bytes"]
    for record in range(1, 15_001):
        assert index.remove(record)
    stats = index.stats()
    assert stats["records"] == len(index) == 1_000
    assert stats["bytes"] < full / 4
    for record in range(15_001, 16_001):
        block = blocks[record - 1]
        assert index.tokens(record).tolist() == block.tolist()
        assert index.find(0, block, 0, NONE)[2].tolist() == [record]
    for record in range(15_001, 16_001):
        assert index.remove(record)
    empty = index.stats()
    assert (empty["records"], empty["tokens"], empty["entries"]) == (0, 0, 0)
    assert empty["bytes"] < full / 10
    assert index.find(0, blocks[0], 0, NONE)[0].size == 0


def test_memory_is_used_again_while_blocks_come_and_go() -> None:
    """As in a full store that evicts as much as it takes in, with tails of every length."""
    index = ContentIndex(16, 16, 8, 8, 0)
    rng = np.random.default_rng(0)
    put(index, random_blocks(2_000), 1)
    live = list(range(1, 2_001))
    peak = 0
    for record in range(2_001, 22_001):
        size = 64 if rng.random() < 0.9 else int(rng.integers(16, 64))
        index.insert(0, record, record - 1, rng.integers(0, 50_000, size, dtype=np.uint32))
        at = int(rng.integers(0, len(live)))
        assert index.remove(live[at])
        live[at] = record
        peak = max(peak, index.stats()["bytes"] if record % 100 == 0 else 0)
    assert len(index) == 2_000
    assert index.stats()["entries"] < 2_000 * 8
    assert peak < 16 * 2_000 * 64


def test_rebuilding_keeps_what_the_oracle_keeps() -> None:
    """Repetitive blocks, of which postings are dropped, through several rebuilds."""
    rng = np.random.default_rng(0)
    fast, slow = ContentIndex(4, 3, 2, 1, 9), ReferenceContent(4, 3, 2, 1, 9)
    live: list[int] = []
    smallest = largest = fast.stats()["bytes"]
    for wave in range(3):
        for record in range(wave * 3_000 + 1, wave * 3_000 + 1_501):
            block = (
                rng.integers(0, 3, 12, dtype=np.uint32) if record % 10 == 0 else np.arange(12, dtype=np.uint32) + record
            )
            for index in (fast, slow):
                index.insert(0, record, record - 1, block.astype(np.uint32))
            live.append(record)
        largest = max(largest, fast.stats()["bytes"])
        rng.shuffle(live)
        gone, live = live[: len(live) * 9 // 10], live[len(live) * 9 // 10 :]
        for record in gone:
            assert fast.remove(record)
        for record in gone:
            slow._blocks.pop(record)
        for places in slow._places.values():
            places[:] = [place for place in places if place[0] in slow]
        smallest = fast.stats()["bytes"]
        found, want = fast.stats(), slow.stats()
        assert {name: found[name] for name in want} == want
        for record in live:
            assert fast.tokens(record).tolist() == slow.tokens(record).tolist()
        for _ in range(30):
            query = np.concatenate([slow.tokens(int(rng.choice(live))) for _ in range(4)])
            a, b = fast.find(0, query, 0, NONE), slow.find(0, query, 0, NONE)
            assert [x.tolist() for x in a] == [x.tolist() for x in b]
            assert a[0].size > 0
    assert smallest < largest * 2 / 3  # a positive control: it was rebuilt
