"""The facade: namespaces, the match it returns, and restoring by namespace."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvstore.trie import UNIFORM_BITS_PER_TOKEN, TrieIndex

pytestmark = pytest.mark.native

HERE, THERE, NEVER = b"h" * 32, b"t" * 32, b"n" * 32


def tokens(n: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.uint32)


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.fixture
def index() -> TrieIndex:
    made = TrieIndex(4)
    made.insert(HERE, tokens(10), u32(4, 8, 10), u64(1, 2, 3))
    return made


def test_namespaces_are_apart_and_an_unknown_one_matches_nothing_and_is_not_made(index: TrieIndex) -> None:
    index.insert(THERE, tokens(4), u32(4), u64(4))
    assert index.longest_prefix(HERE, tokens(10)) == 10
    assert index.longest_prefix(THERE, tokens(10)) == 4
    assert index.longest_prefix(NEVER, tokens(10)) == 0
    assert index.best_match(NEVER, tokens(10)) == (0, 0.0)
    assert index.touch(NEVER, tokens(10)) == 0
    assert index.erase(NEVER, tokens(10)).size == 0
    empty = index.match(NEVER, tokens(10))
    assert (empty.depth, empty.bits, empty.records.size, empty.ends.size) == (0, 0.0, 0, 0)
    with pytest.raises(ValueError, match="not stored"):
        index.pin(NEVER, tokens(1))
    assert index.stats()["namespaces"] == 2
    assert index.path(4)[0] == THERE


def test_a_match_is_frozen_and_says_what_is_usable(index: TrieIndex) -> None:
    found = index.match(HERE, tokens(20))
    assert found.depth == 10
    assert found.bits == 10 * UNIFORM_BITS_PER_TOKEN
    assert found.usable(4) == 10
    assert index.match(HERE, tokens(6)).usable(4) == 6
    index.remove(2)
    assert index.match(HERE, tokens(20)).usable(4) == 4
    index.remove(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.depth = 3  # type: ignore[misc]


def test_the_records_before_a_short_tail_are_usable() -> None:
    index = TrieIndex(4)
    index.insert(HERE, tokens(6), u32(4, 6), u64(1, 2))
    index.insert(HERE, tokens(11), u32(), u64())
    assert index.match(HERE, tokens(11)).usable(4) == 6


def test_pins_are_counted(index: TrieIndex) -> None:
    index.pin(HERE, tokens(10))
    assert index.evict() is None
    index.unpin(HERE, tokens(10))
    assert [index.evict() for _ in range(4)] == [3, 2, 1, None]
    assert 1 not in index


@pytest.mark.parametrize("wrong", [b"short", b"x" * 33, "x" * 32, None])
def test_a_namespace_that_is_no_digest_is_refused(index: TrieIndex, wrong: bytes) -> None:
    for call in (index.longest_prefix, index.best_match, index.match, index.touch, index.erase, index.pin):
        with pytest.raises(ValueError, match="namespace"):
            call(wrong, tokens(3))
    with pytest.raises(ValueError, match="namespace"):
        index.insert(wrong, tokens(3), u32(3), u64(9))
    assert index.stats()["namespaces"] == 1


def test_tokens_are_checked_even_where_nothing_is_stored(index: TrieIndex) -> None:
    for namespace in (HERE, NEVER):
        with pytest.raises(ValueError, match="tokens"):
            index.match(namespace, np.arange(4))


def test_restore_maps_entries_to_namespaces(index: TrieIndex) -> None:
    fresh = TrieIndex(4)
    dropped = fresh.restore(
        [THERE, HERE],
        which=u32(1, 0, 1),
        ids=u64(1, 2, 3),
        starts=u32(0, 0, 4),
        counts=u32(4, 4, 2),
        tags=u64(11, 12, 13),
        parent_tags=u64(0, 0, 12),  # of the other namespace
        bits=np.ones(3, np.float32),
        tokens=np.concatenate([tokens(4), tokens(4), tokens(2)]),
        pinned=np.zeros(3, np.uint8),
    )
    assert dropped.tolist() == [3]
    assert fresh.path(1)[0] == HERE
    assert fresh.path(2)[0] == THERE
    nothing = [
        u32(),
        u64(),
        u32(),
        u32(),
        u64(),
        u64(),
        np.zeros(0, np.float32),
        u32(),
        np.zeros(0, np.uint8),
    ]
    with pytest.raises(ValueError, match="empty"):
        index.restore([HERE], *nothing)
    with pytest.raises(ValueError, match="which"):
        TrieIndex(4).restore([], u32(0), *nothing[1:])
    assert TrieIndex(4).restore([], *nothing).size == 0
