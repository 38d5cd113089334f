"""Bulk rebuild from catalog columns: what is trusted, what is dropped, and that nothing crashes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part

from kvstore.trie._trie import Trie
from kvstore.trie.reference.trie import ReferenceTrie

pytestmark = pytest.mark.native

BLOCK = 4
# id, start, tokens, tag, parent tag
Row = tuple[int, int, list[int], int, int]


def columns(rows: list[Row], pinned: tuple[int, ...] = ()) -> list[np.ndarray]:
    return [
        np.zeros(len(rows), np.uint32),
        np.array([row[0] for row in rows], np.uint64),
        np.array([row[1] for row in rows], np.uint32),
        np.array([len(row[2]) for row in rows], np.uint32),
        np.array([row[3] for row in rows], np.uint64),
        np.array([row[4] for row in rows], np.uint64),
        np.full(len(rows), 8.0, np.float32),
        np.array([token for row in rows for token in row[2]], np.uint32),
        np.array([row[0] in pinned for row in rows], np.uint8),
    ]


@pytest.fixture(params=[Trie, ReferenceTrie])
def trie(request: pytest.FixtureRequest) -> Any:
    made = request.param(BLOCK)
    made.new_root()
    return made


A: Row = (1, 0, [1, 2, 3, 4], 100, 0)
B: Row = (2, 4, [5, 6, 7, 8], 200, 100)
C: Row = (3, 8, [9, 10], 300, 200)


def test_blocks_come_back_as_one_path_in_any_order(trie: Any) -> None:
    assert trie.restore(*columns([C, A, B])).tolist() == []
    depth, bits, records, ends = trie.match(0, np.arange(1, 11, dtype=np.uint32), False)
    assert (depth, bits, records.tolist(), ends.tolist()) == (10, 24.0, [1, 2, 3], [4, 8, 10])
    assert trie.stats()["nodes"] == 1


@pytest.mark.parametrize(
    ("rows", "dropped"),
    [
        ([A, C], [3]),  # the parent is missing
        ([B, C], [2, 3]),  # and so is everything below it
        ([A, (2, 8, [5], 200, 100)], [2]),  # starts where the parent does not end
        ([A, (2, 4, [], 200, 100)], [2]),
        ([A, (2, 4, [5] * 5, 200, 100)], [2]),  # longer than a block
        ([(1, 0, [1, 2], 100, 0), (2, 2, [3], 200, 100)], [2]),  # starts inside a block
        ([(1, 0, [1, 2, 3, 4], 100, 7)], [1]),  # a first block with a parent
        ([A, (2, 4, [5], 200, 0)], [2]),  # a later block without one
        ([A, (2, 0, [1, 2, 3, 4], 100, 0)], [1]),  # the same path: the higher id stays
        ([A, (2, 0, [1, 2, 3, 9], 100, 0)], [2]),  # the same tag for another path
        ([A, B, (4, 4, [5, 6], 400, 100)], []),  # a newer tail
        ([A, (2, 4, [5, 6], 400, 100), (3, 4, [5, 6, 7, 8], 200, 100)], [2]),  # a tail inside a newer block
        ([(0, 0, [1], 100, 0)], [0]),
        ([(2**63 - 1, 0, [1], 2**64 - 1, 0)], []),
        ([(2**63, 0, [1], 2**64 - 1, 0)], [2**63]),
        ([(7, 0, [1, 2, 3, 4], 100, 0), B, (1, 8, [9, 10], 300, 200)], []),  # in no order of numbers
    ],
)
def test_what_cannot_be_is_dropped(trie: Any, rows: list[Row], dropped: list[int]) -> None:
    assert trie.restore(*columns(rows)).tolist() == dropped
    for row in rows:
        assert trie.contains(row[0]) == (row[0] not in dropped)


def test_children_of_a_replaced_duplicate_stay(trie: Any) -> None:
    twin: Row = (9, 0, [1, 2, 3, 4], 100, 0)
    assert trie.restore(*columns([A, twin, B])).tolist() == [1]
    assert trie.match(0, np.arange(1, 9, dtype=np.uint32), False)[2].tolist() == [9, 2]


@pytest.mark.parametrize(
    ("rows", "holes", "dropped", "records"),
    [
        ([A, B, C], {1}, [], [0, 2, 3]),
        ([C, B, A], {1, 2}, [], [0, 0, 3]),
        ([A, B, C], {2, 3}, [2, 3], [1]),  # nothing is behind them; a tail is no hole
        ([A, B], {1, 2}, [1, 2], []),
        ([A, B, (9, 0, [1, 2, 3, 4], 100, 0)], {1}, [1], [9, 2]),  # filled: the record stays
        ([A, B, (9, 0, [1, 2, 3, 4], 100, 0)], {9}, [9], [1, 2]),  # whatever the numbers are
        ([A, B, (9, 0, [1, 2, 3, 4], 100, 0)], {1, 9}, [9], [0, 2]),
        ([A, B, (9, 0, [1, 2], 400, 0)], {1}, [], [9, 2]),  # a tail inside a hole
    ],
)
def test_what_is_behind_a_hole_comes_back(
    trie: Any, rows: list[Row], holes: set[int], dropped: list[int], records: list[int]
) -> None:
    marks = np.array([row[0] in holes for row in rows], np.uint8)
    assert trie.restore(*columns(rows), None, marks).tolist() == dropped
    left = sorted(holes - set(dropped))
    assert trie.holes()[0].tolist() == left
    assert trie.stats()["holes"] == len(left)
    assert not any(trie.contains(hole) for hole in holes)
    assert trie.match(0, np.arange(1, 11, dtype=np.uint32), False)[2].tolist() == records
    while trie.evict() is not None:
        pass
    assert trie.take_released().tolist() == left
    assert trie.stats() | {"bytes": 0, "arena_tokens": 0, "garbage_tokens": 0} == {
        **dict.fromkeys(("nodes", "tokens", "records", "holes", "bytes", "arena_tokens", "garbage_tokens"), 0)
    }


def test_recency_follows_the_ids(trie: Any) -> None:
    rows: list[Row] = [(5, 0, [1], 1, 0), (3, 0, [2], 2, 0), (9, 0, [3, 3, 3, 3], 3, 0), (4, 4, [3], 4, 3)]
    trie.restore(*columns(rows))
    assert [trie.evict() for _ in range(5)] == [3, 5, 4, 9, None]


def test_pins_come_back(trie: Any) -> None:
    trie.restore(*columns([A, B, C], pinned=(2,)))
    assert [trie.evict(), trie.evict()] == [3, None]
    trie.pin(0, np.arange(1, 9, dtype=np.uint32), -1)
    assert [trie.evict(), trie.evict()] == [2, 1]


def test_only_an_empty_trie_is_restored_and_the_columns_must_fit(trie: Any) -> None:
    short = columns([A, B])
    short[7] = short[7][:-1]
    with pytest.raises(ValueError, match="tokens"):
        trie.restore(*short)
    trie.restore(*columns([A]))
    with pytest.raises(ValueError, match="empty"):
        trie.restore(*columns([A]))


def test_columns_of_unequal_length_are_refused() -> None:
    for i in set(range(9)) - {1, 7}:
        trie = Trie(BLOCK)
        trie.new_root()
        wrong = columns([A, B])
        wrong[i] = wrong[i][:1]
        with pytest.raises(ValueError):
            trie.restore(*wrong)


def test_tokens_may_lie_anywhere() -> None:
    rows, rng = [A, B, C, (4, 0, [70_000, 2, 3], 400, 0)], np.random.default_rng(0)
    plain = columns(rows)
    ends = np.cumsum(plain[3])
    tokens, at = np.full(100, 9, np.uint32), np.array([50, 20, 97, 3], np.uint64)
    for place, begin, end in zip(at.tolist(), ends - plain[3], ends, strict=True):
        tokens[place : place + end - begin] = plain[7][begin:end]
    for _ in range(5):
        order = rng.permutation(len(rows))
        moved, usual = Trie(BLOCK), Trie(BLOCK)
        for trie in (moved, usual):
            trie.new_root()
        shuffled = [column[order] if i != 7 else tokens for i, column in enumerate(plain)]
        assert moved.restore(*shuffled, None, None, False, at[order]).size == 0
        assert usual.restore(*plain).size == 0
        for record in (1, 2, 3, 4):
            assert moved.path(record)[1].tolist() == usual.path(record)[1].tolist()
        assert moved.stats() == usual.stats()


@pytest.mark.parametrize("at", [[97, 0], [2**64 - 1, 0], [101, 0], [0]])
def test_places_beyond_the_tokens_are_refused(at: list[int]) -> None:
    trie = Trie(BLOCK)
    trie.new_root()
    data = columns([A, B])
    data[7] = np.zeros(100, np.uint32)
    with pytest.raises(ValueError, match="token_at"):
        trie.restore(*data, None, None, False, np.array(at, np.uint64))
    assert trie.stats()["records"] == 0


small = st.integers(0, 12)
wild = st.one_of(small, st.integers(0, 2**32 - 1))
wilder = st.one_of(small, st.integers(0, 2**64 - 1))


@settings(max_examples=part(300), deadline=None)
@given(
    st.lists(
        st.tuples(
            small,
            st.one_of(st.integers(0, 12), wilder),
            st.one_of(st.sampled_from([0, 0, 4, 4, 8]), wild),
            st.integers(0, 6),
            wilder,
            wilder,
            st.one_of(st.just(1.0), st.floats(width=32)),
        ),
        max_size=30,
    ),
    st.randoms(use_true_random=False),
)
def test_hostile_columns_agree_with_the_oracle(rows: list[Any], random: Any) -> None:
    types = ["uint32", "uint64", "uint32", "uint32", "uint64", "uint64", "float32"]
    data = [np.array([row[i] for row in rows], kind) for i, kind in enumerate(types)]
    tokens = np.array([random.randrange(2) for _ in range(int(data[3].sum()))], np.uint32)
    pinned = np.array([random.randrange(2) for _ in rows], np.uint8)
    holes = np.array([random.randrange(3) == 0 for _ in rows], np.uint8)
    outcomes = []
    for kind in (Trie, ReferenceTrie):
        trie: Any = kind(BLOCK)
        trie.new_root()
        dropped = trie.restore(*data, tokens, pinned, None, holes).tolist()
        evicted, left = [], trie.holes()[0].tolist()
        while (gone := trie.evict()) is not None:
            evicted.append((gone, trie.take_released().tolist()))
        counts = {name: trie.stats()[name] for name in ("nodes", "tokens", "records", "holes")}
        outcomes.append((dropped, left, evicted, counts))
    assert outcomes[0] == outcomes[1]


def test_large_random_columns_never_crash() -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        m = 3000
        counts = rng.integers(0, BLOCK + 2, m, dtype=np.uint32)
        high = [8, 50, 2**32, 2**63][seed % 4]
        starts = (rng.integers(0, 5, m) * BLOCK).astype(np.uint32)
        trie = Trie(BLOCK)
        trie.new_root()
        dropped = trie.restore(
            rng.integers(0, 2, m, dtype=np.uint32),
            rng.integers(0, 2**62 if seed % 2 else 5000, m, dtype=np.uint64),
            starts,
            counts,
            rng.integers(0, high, m, dtype=np.uint64),
            np.where(starts > 0, rng.integers(0, high, m, dtype=np.uint64), 0).astype(np.uint64),
            np.ones(m, np.float32),
            rng.integers(0, 2, int(counts.sum()), dtype=np.uint32),
            np.zeros(m, np.uint8),
        )
        kept = trie.stats()["records"]
        assert 0 < kept < m
        assert len(dropped) <= m - kept
        evicted = 0
        while trie.evict() is not None:
            evicted += 1
        assert evicted == kept
        assert trie.stats()["tokens"] == 0


def test_a_restored_trie_equals_the_one_it_was_saved_from() -> None:
    rng = np.random.default_rng(1)
    first = Trie(64)
    first.new_root()
    prompts = [rng.integers(0, 1000, n, dtype=np.uint32) for n in (100, 200, 300)]
    sequences, next_id, rows = [], 1, []
    known: dict[bytes, int] = {b"": 0}
    for i in range(300):
        tokens = np.concatenate([prompts[i % 3], rng.integers(0, 1000, int(rng.integers(1, 400)), dtype=np.uint32)])
        sequences.append(tokens)
        n = len(tokens)
        ends = [e for e in [*range(64, n, 64), n] if tokens[:e].tobytes() not in known]
        ids = list(range(next_id, next_id + len(ends)))
        next_id += len(ends)
        assert first.insert(0, tokens, 2.0, np.array(ends, np.uint32), np.array(ids, np.uint64)).size == 0
        for end, record in zip(ends, ids, strict=True):
            start = (end - 1) // 64 * 64
            known[tokens[:end].tobytes()] = record
            rows.append((record, start, tokens[start:end].tolist(), record, known[tokens[:start].tobytes()]))
    second = Trie(64)
    second.new_root()
    data = columns(rows)
    data[6] = (data[3] * 2.0).astype(np.float32)
    assert second.restore(*data).size == 0
    for tokens in sequences:
        a, b = first.match(0, tokens, False), second.match(0, tokens, False)
        assert a[:2] == b[:2]
        assert a[2].tolist() == b[2].tolist()
        assert a[3].tolist() == b[3].tolist()
    for name in ("tokens", "records"):
        assert first.stats()[name] == second.stats()[name]
    # The block in which the sequences of a prompt part begins a node of its own.
    assert second.stats()["nodes"] == first.stats()["nodes"] + len(prompts)


def test_a_restored_trie_takes_what_its_tokens_need_and_grows_from_there() -> None:
    blocks, paths = 64, 1100  # 9 MB of tokens: memory that is mapped, and ends within a huge page
    ids = np.arange(1, blocks * paths + 1, dtype=np.uint64)
    starts = np.tile(np.arange(blocks, dtype=np.uint32) * 64, paths)
    tokens = np.random.default_rng(2).integers(0, 50_000, 64 * len(ids), dtype=np.uint32)
    trie = Trie(64)
    trie.new_root()
    roots, counts, marks = np.zeros(len(ids), np.uint32), np.full(len(ids), 64, np.uint32), np.zeros(len(ids), np.uint8)
    parents, bits = np.where(starts > 0, ids - 1, 0).astype(np.uint64), np.full(len(ids), 8.0, np.float32)
    assert trie.restore(roots, ids, starts, counts, ids, parents, bits, tokens, marks).size == 0
    assert 2 * len(tokens) < trie.stats()["bytes"] < 2 * len(tokens) + 24 * len(ids)
    ends = np.arange(64, 64 * blocks + 1, 64, dtype=np.uint32)
    for number in range(paths, paths + 300):  # it grows twice
        more = np.random.default_rng(number).integers(0, 50_000, 64 * blocks, dtype=np.uint32)
        assert trie.insert(0, more, 8.0, ends, ids[-1] + np.uint64(number * blocks) + ends // 64).size == 0
    for number, path in enumerate(tokens.reshape(paths, -1)):
        assert trie.match(0, path, False)[2].tolist() == ids[number * blocks :][:blocks].tolist()


def grown(rng: np.random.Generator, wrong: int) -> list[Row]:
    """Sequences of blocks as a catalog gives them, ids rising: some part from others, and blocks come twice. Of `wrong`
    rows one field is another row's."""
    rows: list[Row] = []
    for record in range(1, int(rng.integers(2, 24))):
        base = [row for row in rows[-3:] if len(row[2]) == BLOCK] if rng.random() < 0.8 else []
        tokens = rng.integers(0, 2, BLOCK if rng.random() < 0.8 else int(rng.integers(1, BLOCK))).tolist()
        if not base:
            tag = int.from_bytes(bytes([1, *tokens]), "big")
            rows.append((record, 0, tokens, tag, 0))
            continue
        parent = base[int(rng.integers(len(base)))]
        tag = hash((parent[3], *tokens)) % 2**63 + 1
        rows.append((record, parent[1] + BLOCK, tokens, tag, parent[3]))
    for _ in range(wrong):
        at, other = (int(rng.integers(len(rows))) for _ in range(2))
        row, field = list(rows[at]), [1, 2, 3, 4, 3, 4][int(rng.integers(6))]
        row[field] = rows[other][[field, 4, 3][int(rng.integers(3))] if field > 2 else field]
        rows[at] = tuple(row)  # type: ignore[assignment]
    return rows


def built(kind: Any, rows: list[Row], holes: list[int] | None) -> tuple[Any, ...]:
    trie = kind(BLOCK)
    trie.new_root()
    marks = None if holes is None else np.array([row[0] in holes for row in rows], np.uint8)
    dropped = trie.restore(*columns(rows), None, marks).tolist()
    paths = [trie.path(row[0])[1].tolist() if trie.contains(row[0]) else None for row in sorted(rows)]
    evicted = []
    while (gone := trie.evict()) is not None:
        evicted.append(gone)
    return dropped, paths, evicted


@pytest.mark.parametrize("wrong", [0, 1, 2, 5])
@pytest.mark.parametrize("hole", [False, True])
def test_rows_as_a_catalog_gives_them_are_restored_as_rows_in_any_order(wrong: int, hole: bool) -> None:
    rng = np.random.default_rng(10 * wrong + hole)
    for _ in range(part(150)):
        rows = grown(rng, wrong)
        holes = [rows[0][0]] if hole else None
        want = built(ReferenceTrie, rows, holes)
        mixed = [rows[i] for i in rng.permutation(len(rows))]
        assert built(Trie, rows, holes) == want
        assert built(Trie, mixed, holes) == want
