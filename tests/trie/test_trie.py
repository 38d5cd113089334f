"""What each operation of the trie promises, one behaviour a test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.trie._trie import Trie
from kvstore.trie.reference.trie import ReferenceTrie

pytestmark = pytest.mark.native


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def path(*parts: Any) -> np.ndarray:
    """Tokens from numbers and ranges."""
    return np.concatenate([np.atleast_1d(np.array(part, np.uint32)) for part in parts])


@pytest.fixture(params=[Trie, ReferenceTrie])
def trie(request: pytest.FixtureRequest) -> Any:
    made = request.param(4)
    assert made.new_root() == 0
    return made


def matched(trie: Any, tokens: np.ndarray, touch: bool = False, root: int = 0) -> tuple[int, list[int], list[int]]:
    depth, _, records, ends = trie.match(root, tokens, touch)
    assert records.dtype == np.uint64
    assert ends.dtype == np.uint32
    return depth, records.tolist(), ends.tolist()


def test_match_is_exact_to_the_token(trie: Any) -> None:
    trie.insert(0, path(range(10)), 1.0, u32(4, 8, 10), u64(1, 2, 3))
    for n in range(11):
        query = path(range(n), 99)
        assert trie.longest_prefix(0, query) == n
        assert trie.match(0, query, False)[0] == n


def test_roots_share_nothing(trie: Any) -> None:
    other = trie.new_root()
    trie.insert(0, path(range(4)), 1.0, u32(4), u64(1))
    assert matched(trie, path(range(4)), root=other) == (0, [], [])
    assert trie.path(1)[0] == 0


def test_a_partial_last_block_is_covered_by_a_longer_record_of_the_same_path(trie: Any) -> None:
    trie.insert(0, path(range(8)), 1.0, u32(4, 8), u64(1, 2))
    assert matched(trie, path(range(6))) == (6, [1, 2], [4, 8])


def test_a_partial_last_block_is_covered_by_a_record_in_a_branch_below(trie: Any) -> None:
    trie.insert(0, path(range(6), 50, 51), 1.0, u32(4, 8), u64(1, 2))
    trie.insert(0, path(range(6), 60), 1.0, u32(7), u64(3))
    assert matched(trie, path(range(6), 70)) == (6, [1, 3], [4, 7])  # the newest branch first


def test_without_a_covering_record_the_longest_tail_on_the_path_is_given(trie: Any) -> None:
    trie.insert(0, path(range(5)), 1.0, u32(4, 5), u64(1, 2))
    trie.insert(0, path(range(7)), 1.0, u32(), u64())  # tokens without a record
    assert matched(trie, path(range(7))) == (7, [1, 2], [4, 5])


def test_a_hole_is_zero_and_what_lies_beyond_is_still_found(trie: Any) -> None:
    trie.insert(0, path(range(12)), 1.0, u32(4, 8, 12), u64(1, 2, 3))
    assert trie.remove(2)
    assert matched(trie, path(range(12))) == (12, [1, 0, 3], [4, 0, 12])


def test_growth_supersedes_the_tail(trie: Any) -> None:
    trie.insert(0, path(range(6)), 1.0, u32(4, 6), u64(1, 2))
    assert trie.insert(0, path(range(7)), 1.0, u32(7), u64(3)).tolist() == [2]
    assert trie.insert(0, path(range(9)), 1.0, u32(8, 9), u64(4, 5)).tolist() == [3]
    assert not trie.contains(2)
    assert not trie.contains(3)
    assert matched(trie, path(range(9))) == (9, [1, 4, 5], [4, 8, 9])


def test_a_tail_of_another_branch_is_not_superseded(trie: Any) -> None:
    trie.insert(0, path(range(5), 90), 1.0, u32(6), u64(1))
    assert trie.insert(0, path(range(8)), 1.0, u32(4, 8), u64(2, 3)).tolist() == []
    assert trie.contains(1)


def test_a_replaced_record_is_superseded(trie: Any) -> None:
    trie.insert(0, path(range(6)), 1.0, u32(4, 6), u64(1, 2))
    assert trie.insert(0, path(range(6)), 1.0, u32(4, 6), u64(3, 4)).tolist() == [1, 2]


def test_a_pinned_tail_survives_growth_and_the_eviction_of_what_grew(trie: Any) -> None:
    trie.insert(0, path(range(6)), 1.0, u32(4, 6), u64(1, 2))
    trie.pin(0, path(range(6)), 1)
    assert trie.insert(0, path(range(8)), 1.0, u32(8), u64(3)).tolist() == []
    assert [trie.evict(), trie.evict()] == [3, None]
    assert matched(trie, path(range(6))) == (6, [1, 2], [4, 6])


def test_bits_accumulate_and_are_linear_inside_an_edge(trie: Any) -> None:
    bits = np.array([1, 2, 3, 4, 0, 0, 4, 4], np.float32)
    trie.insert(0, path(range(4)), bits[:4], u32(4), u64(1))
    trie.insert(0, path(range(8)), bits, u32(8), u64(2))
    assert trie.match(0, path(range(4)), False)[:2] == (4, 10.0)
    assert trie.match(0, path(range(8)), False)[:2] == (8, 18.0)
    assert trie.match(0, path(range(6), 99), False)[:2] == (6, 14.0)
    trie.insert(0, path(range(6), 99), 3.0, u32(7), u64(3))  # the split keeps the value, and only new tokens count
    assert trie.match(0, path(range(6), 99), False)[:2] == (7, 17.0)
    assert trie.match(0, path(99), False)[:2] == (0, 0.0)


def test_eviction_takes_the_oldest_leaf_from_its_end(trie: Any) -> None:
    trie.insert(0, path(range(10)), 1.0, u32(4, 8, 10), u64(1, 2, 3))
    trie.insert(0, path(range(4), 50, 51), 1.0, u32(6), u64(4))
    assert [trie.evict() for _ in range(5)] == [3, 2, 4, 1, None]
    assert trie.stats()["tokens"] == 0


def test_eviction_below_a_record_passes_over_leaves_that_end_with_later_ones(trie: Any) -> None:
    trie.insert(0, path(range(10)), 1.0, u32(4, 8, 10), u64(1, 2, 7))
    trie.insert(0, path(range(4), 50, 51), 1.0, u32(6), u64(4))
    assert [trie.evict(below) for below in (4, 5, 7, 8, 8)] == [None, 4, None, 7, 2]


def test_touch_and_a_touching_match_postpone_eviction(trie: Any) -> None:
    for first in range(3):
        trie.insert(0, path(first, 7, 7, 7), 1.0, u32(4), u64(first + 1))
    assert trie.touch(0, path(0, 7)) == 2
    matched(trie, path(1, 7, 7), touch=True)
    assert [trie.evict() for _ in range(3)] == [3, 1, 2]


def test_a_look_up_without_touch_leaves_the_order(trie: Any) -> None:
    for first in range(2):
        trie.insert(0, path(first, 7, 7, 7), 1.0, u32(4), u64(first + 1))
    matched(trie, path(0, 7, 7, 7))
    trie.longest_prefix(0, path(0, 7, 7, 7))
    assert trie.evict() == 1


def test_a_touching_match_also_touches_the_covering_record(trie: Any) -> None:
    trie.insert(0, path(range(5), 50), 1.0, u32(4, 6), u64(1, 2))
    trie.insert(0, path(range(5), 60), 1.0, u32(6), u64(3))
    trie.insert(0, path(9, 9), 1.0, u32(2), u64(4))
    assert matched(trie, path(range(5)), touch=True) == (5, [1, 3], [4, 6])
    assert [trie.evict() for _ in range(3)] == [2, 4, 3]


def test_a_pinned_path_is_not_evicted_until_unpinned(trie: Any) -> None:
    trie.insert(0, path(range(8)), 1.0, u32(4, 8), u64(1, 2))
    trie.pin(0, path(range(8)), 1)
    trie.pin(0, path(range(8)), 1)
    trie.pin(0, path(range(8)), -1)
    assert trie.evict() is None
    trie.pin(0, path(range(8)), -1)
    assert [trie.evict(), trie.evict(), trie.evict()] == [2, 1, None]


def test_a_pin_inside_an_edge_keeps_only_what_is_above(trie: Any) -> None:
    trie.insert(0, path(range(12)), 1.0, u32(4, 8, 12), u64(1, 2, 3))
    trie.pin(0, path(range(8)), 1)
    assert [trie.evict(), trie.evict()] == [3, None]


def test_unpinning_is_a_touch(trie: Any) -> None:
    for first in range(2):
        trie.insert(0, path(first, 7, 7, 7), 1.0, u32(4), u64(first + 1))
    trie.pin(0, path(0, 7, 7, 7), 1)
    trie.pin(0, path(0, 7, 7, 7), -1)
    assert [trie.evict(), trie.evict()] == [2, 1]


def test_only_a_stored_path_can_be_pinned_and_only_a_pinned_one_unpinned(trie: Any) -> None:
    trie.insert(0, path(range(4)), 1.0, u32(4), u64(1))
    for tokens, delta in [(path(range(5)), 1), (u32(), 1), (path(range(4)), -1), (path(range(4)), 2)]:
        with pytest.raises(ValueError):
            trie.pin(0, tokens, delta)
    assert trie.evict() == 1


def test_removing_the_last_record_trims_past_earlier_holes(trie: Any) -> None:
    trie.insert(0, path(range(12)), 1.0, u32(4, 8, 12), u64(1, 2, 3))
    assert trie.remove(2)
    assert trie.longest_prefix(0, path(range(12))) == 12
    assert trie.remove(3)
    assert trie.longest_prefix(0, path(range(12))) == 4
    assert not trie.remove(3)


def test_erase_takes_a_sequence_with_all_that_continues_it_and_leaves_what_others_share(trie: Any) -> None:
    trie.insert(0, path(range(8)), 1.0, u32(4, 8), u64(1, 2))
    trie.insert(0, path(range(14)), 1.0, u32(12, 14), u64(3, 4))
    trie.insert(0, path(range(4), 50, 51, 52, 53), 1.0, u32(8), u64(5))
    assert trie.erase(0, path(range(7))).tolist() == [2, 3, 4]
    assert matched(trie, path(range(8))) == (4, [1], [4])
    assert trie.erase(0, path(range(4), 50, 51, 52, 53)).tolist() == [1, 5]
    assert trie.stats()["tokens"] == 0


def test_erase_drops_pins_below_and_stops_at_a_pinned_ancestor(trie: Any) -> None:
    trie.insert(0, path(range(4)), 1.0, u32(4), u64(1))
    trie.insert(0, path(range(12)), 1.0, u32(8, 12), u64(2, 3))
    trie.pin(0, path(range(4)), 1)
    trie.pin(0, path(range(12)), 1)
    assert trie.erase(0, path(range(10))).tolist() == [2, 3]
    assert matched(trie, path(range(12))) == (4, [1], [4])
    assert trie.evict() is None
    trie.pin(0, path(range(4)), -1)
    assert trie.evict() == 1


def test_erase_of_a_path_that_is_not_stored_in_full_does_nothing(trie: Any) -> None:
    trie.insert(0, path(range(6)), 1.0, u32(4, 6), u64(1, 2))
    assert trie.erase(0, path(range(7))).tolist() == []
    assert trie.erase(0, u32()).tolist() == []
    assert trie.stats()["records"] == 2


def test_path_gives_the_tokens_up_to_the_end_of_the_record(trie: Any) -> None:
    tokens = path(range(10))
    trie.insert(0, tokens, 1.0, u32(4, 8, 10), u64(11, 12, 13))
    trie.insert(0, path(range(6), 60, 61), 1.0, u32(8), u64(14))  # splits the edge
    for record, n in [(11, 4), (12, 8), (13, 10)]:
        root, found = trie.path(record)
        assert (root, found.tolist(), found.dtype) == (0, list(range(n)), np.uint32)
    assert trie.path(14)[1].tolist() == [*range(6), 60, 61]
    with pytest.raises(KeyError):
        trie.path(15)


@pytest.mark.parametrize(
    ("tokens", "bits", "ends", "ids"),
    [
        (u32(), 1.0, u32(), u64()),
        (path(range(6)), 1.0, u32(5), u64(9)),
        (path(range(6)), 1.0, u32(0), u64(9)),
        (path(range(6)), 1.0, u32(8), u64(9)),
        (path(range(6)), 1.0, u32(6, 4), u64(9, 10)),
        (path(range(6)), 1.0, u32(4, 4), u64(9, 10)),
        (path(range(6)), 1.0, u32(4, 6), u64(9)),
        (path(range(6)), 1.0, u32(4, 6), u64(9, 9)),
        (path(range(6)), 1.0, u32(4), u64(0)),
        (path(range(6)), 1.0, u32(4), u64(1)),
        (path(range(6)), -1.0, u32(4), u64(9)),
        (path(range(6)), float("nan"), u32(4), u64(9)),
        (path(range(6)), float("inf"), u32(4), u64(9)),
        (path(range(6)), np.full(5, 1, np.float32), u32(4), u64(9)),
        (path(range(6)), np.array([1, 1, 1, 1, 1, np.nan], np.float32), u32(4), u64(9)),
        (path(range(6)), np.array([1, 1, 1, 1, 1, -1], np.float32), u32(4), u64(9)),
    ],
)
def test_a_refused_insert_changes_nothing(trie: Any, tokens: Any, bits: Any, ends: Any, ids: Any) -> None:
    trie.insert(0, path(90, 91, 92, 93), 1.0, u32(4), u64(1))
    before = trie.stats()
    with pytest.raises(ValueError):
        trie.insert(0, tokens, bits, ends, ids)
    assert {name: trie.stats()[name] for name in ("nodes", "tokens", "records")} == {
        name: before[name] for name in ("nodes", "tokens", "records")
    }
    assert trie.longest_prefix(0, path(range(6))) == 0


def test_unknown_roots_are_refused(trie: Any) -> None:
    with pytest.raises(ValueError, match="root"):
        trie.longest_prefix(1, path(1))
    with pytest.raises(ValueError, match="root"):
        trie.insert(7, path(1), 1.0, u32(1), u64(1))


@pytest.mark.parametrize(
    "wrong",
    [
        [1, 2, 3],
        np.arange(4, dtype=np.int64),
        np.arange(4, dtype=np.int32),
        np.arange(4, dtype=np.uint64),
        np.arange(4, dtype=">u4"),
        np.arange(4, dtype=np.float32),
        np.arange(8, dtype=np.uint32)[::2],
        np.arange(4, dtype=np.uint32).reshape(2, 2),
        np.frombuffer(bytes(17), np.uint8)[1:].view(np.uint32),
    ],
)
def test_arrays_of_another_kind_are_refused_by_name(wrong: Any) -> None:
    trie = Trie(4)
    trie.new_root()
    with pytest.raises(ValueError, match="tokens"):
        trie.longest_prefix(0, wrong)
    with pytest.raises(ValueError, match="tokens"):
        trie.insert(0, wrong, 1.0, u32(4), u64(1))


def test_block_tokens_must_be_positive() -> None:
    for kind in (Trie, ReferenceTrie):
        with pytest.raises(ValueError, match="block_tokens"):
            kind(0)
    assert Trie(7).block_tokens == 7


def test_the_arena_is_compacted_by_itself_once_half_of_it_is_garbage() -> None:
    rng = np.random.default_rng(0)
    trie = Trie(64)
    trie.new_root()
    kept = {}
    for i in range(400):
        kept[i + 1] = rng.integers(0, 2**32, 640, dtype=np.uint32)
        trie.insert(0, kept[i + 1], 1.0, u32(640), u64(i + 1))
    before = trie.stats()
    assert before["arena_tokens"] == 400 * 640
    for _ in range(300):
        del kept[trie.evict()]
    after = trie.stats()
    assert after["garbage_tokens"] <= after["arena_tokens"] / 2
    assert after["arena_tokens"] < before["arena_tokens"] / 2
    assert after["bytes"] < before["bytes"] / 2
    assert len(kept) == 100
    for record, tokens in kept.items():
        assert trie.path(record)[1].tolist() == tokens.tolist()


def test_tokens_take_two_bytes_where_all_of_an_edge_are_below_65536() -> None:
    rng, sizes = np.random.default_rng(0), []
    for top in (2**16, 2**16 + 1, 2**32):
        tokens = rng.integers(0, 2**16, 1 << 20, dtype=np.uint32)
        tokens[1000] = top - 1
        trie = Trie(64)
        trie.new_root()
        trie.insert(
            0, tokens, 1.0, np.arange(64, (1 << 20) + 1, 64, dtype=np.uint32), np.arange(1, 16385, dtype=np.uint64)
        )
        assert trie.path(16384)[1].tolist() == tokens.tolist()
        assert trie.longest_prefix(0, tokens) == 1 << 20
        sizes.append(trie.stats()["bytes"])
    assert sizes[0] < 3.2 * (1 << 20) < sizes[1] == sizes[2]


@pytest.mark.parametrize("n", [(1 << 20) - 15, (1 << 20) - 1])
def test_an_array_of_almost_4_mib_grows_like_any_other(n: int) -> None:
    """From 4 MiB on arrays are mapped; what is allocated for one of a few bytes less is as large."""
    tokens = np.full(n, 1 << 16, np.uint32)
    trie = Trie(64)
    trie.new_root()
    trie.insert(0, tokens, 1.0, u32(n), u64(1))
    other = tokens + u32(1)
    trie.insert(0, other, 1.0, u32(n), u64(2))
    assert trie.path(1)[1].tobytes() == tokens.tobytes()
    assert trie.path(2)[1].tobytes() == other.tobytes()


def test_wide_and_narrow_edges_live_side_by_side() -> None:
    """An edge is split, goes on with tokens of the other width, is compacted, and comes back as it was."""
    trie, stored = Trie(4), []
    trie.new_root()
    narrow = np.arange(1, 41, dtype=np.uint32)
    wide = narrow.copy()
    wide[10:] += np.uint32(1 << 16)  # shares ten tokens
    for tokens in (narrow, wide, np.concatenate([wide, narrow]), np.concatenate([narrow, wide])):
        stored.append(tokens)
        trie.insert(0, tokens, 1.0, u32(len(tokens)), u64(len(stored)))
    for _ in range(2):
        for record, tokens in enumerate(stored, 1):
            assert trie.path(record)[1].tolist() == tokens.tolist()
            assert trie.longest_prefix(0, tokens) == len(tokens)
            other = tokens.copy()
            other[-1] ^= np.uint32(1 << 16)  # the same in the lower 16 bits
            assert trie.longest_prefix(0, other) == len(tokens) - 1
        trie.compact()
        assert trie.stats()["garbage_tokens"] == 0


def test_a_million_tokens_in_one_sequence_need_no_recursion() -> None:
    n = 1_000_000
    tokens = np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32)
    trie = Trie(64)
    trie.new_root()
    ends = np.arange(64, n + 1, 64, dtype=np.uint32)
    trie.insert(0, tokens, 1.0, ends, np.arange(1, len(ends) + 1, dtype=np.uint64))
    assert trie.longest_prefix(0, tokens) == n
    depth, bits, records, found = trie.match(0, tokens[:999_999], True)
    assert (depth, bits) == (999_999, 999_999.0)
    assert found.tolist() == ends.tolist()
    assert records[-1] == len(ends)
    assert trie.path(len(ends))[1].tobytes() == tokens.tobytes()
    assert len(trie.erase(0, tokens)) == len(ends)
    assert trie.stats()["tokens"] == 0


def test_a_chain_of_a_hundred_thousand_nodes_needs_no_recursion() -> None:
    n = 100_000
    tokens = np.arange(n, dtype=np.uint32)
    trie = Trie(1)
    trie.new_root()
    trie.insert(0, tokens, 1.0, np.arange(1, n + 1, dtype=np.uint32), np.arange(1, n + 1, dtype=np.uint64))
    for depth in range(n - 1, 0, -1):  # from below: each split leaves a node of one token
        if depth < n - 300 and depth % 50:
            continue
        trie.pin(0, tokens[:depth], 1)
    assert trie.stats()["nodes"] > 2000
    assert trie.match(0, tokens, True)[0] == n
    assert [trie.evict(), trie.evict()] == [n, None]
    trie.erase(0, tokens[:1])
    assert trie.stats()["nodes"] == 0
