"""What winnowing promises, against a definition that knows no hashes: every run of `window + winnow - 1` tokens that
lies inside one block and in the query is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part

from kvstore.trie._content import ContentIndex as Native
from kvstore.trie.content import ContentIndex

pytestmark = pytest.mark.native

HERE = b"h" * 32
NONE = np.zeros(0, np.uint64)


def runs(query: list[int], block: list[int], least: int) -> list[tuple[int, int]]:
    """(begin, end) in the query of all maximal runs of at least `least` tokens that both hold."""
    found = []
    for shift in range(-len(block), len(query)):
        at = max(0, shift)
        while at < min(len(query), shift + len(block)):
            stop = at
            while stop < min(len(query), shift + len(block)) and query[stop] == block[stop - shift]:
                stop += 1
            if stop - at >= least:
                found.append((at, stop))
            at = stop + 1
    return found


TEXT = st.one_of(
    st.lists(st.integers(0, 1), max_size=40),
    st.lists(st.integers(0, 50), max_size=40),
    st.tuples(st.integers(1, 5), st.integers(1, 40)).map(lambda x: [i % x[0] for i in range(x[1])]),
)


@settings(max_examples=part(200), deadline=None)
@given(
    blocks=st.lists(TEXT, min_size=1, max_size=3),
    parts=st.lists(
        st.one_of(TEXT, st.tuples(st.integers(0, 2), st.integers(0, 39), st.integers(0, 40))), min_size=1, max_size=4
    ),
    window=st.integers(2, 6),
    winnow=st.integers(1, 6),
    first=st.integers(0, 60),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_long_enough_run_is_found(
    blocks: list[list[int]],
    parts: list[list[int] | tuple[int, int, int]],
    window: int,
    winnow: int,
    first: int,
    seed: int,
) -> None:
    """Up to gaps shorter than the least span, which another donor's span may leave. No posting can be dropped here: one
    hash has at most 3 * 39 of 255."""
    index = Native(window, winnow, 255, 2, seed)
    for record, block in enumerate(blocks, 1):
        index.insert(0, record, 0, np.array(block, np.uint32))
    query: list[int] = []
    for one in parts:
        if isinstance(one, tuple):
            query += blocks[one[0] % len(blocks)][one[1] : one[1] + one[2]]
        else:
            query += one
    first = min(first, len(query))
    starts, lengths, *_ = index.find(0, np.array(query, np.uint32), first, NONE)
    taken = np.zeros(len(query) + 1, bool)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        taken[start : start + length] = True
    for block in blocks:
        for begin, end in runs(query, block, window + winnow - 1):
            for at in range(max(begin, first), end - 1):
                assert taken[at] or taken[at + 1], (begin, end, at)


def test_the_definition_finds_runs() -> None:
    assert sorted(runs([9, 1, 2, 3, 8, 2, 3], [1, 2, 3, 4], 2)) == [(1, 4), (5, 7)]
    assert runs([1, 2], [3, 4], 1) == []


def test_a_run_of_exactly_the_promised_length_is_found_at_every_place() -> None:
    """And one that is shorter is not always: the promise is no weaker than it need be."""
    rng = np.random.default_rng(0)
    block = rng.integers(0, 50_000, 64, dtype=np.uint32)
    missed = 0
    for seed in range(30):
        index = ContentIndex(seed=seed)
        index.insert(HERE, 1, 0, block)
        for length in (31, 20):
            for place in range(64 - length + 1):
                query = rng.integers(50_000, 100_000, 100, dtype=np.uint32)
                query[40 : 40 + length] = block[place : place + length]
                spans = [(x.start, x.length, x.donor_start, x.run) for x in index.find(HERE, query)]
                if length == 31 or spans:
                    assert spans == [(40, length, place, 0)]
                else:
                    missed += 1
    assert missed > 0


def stored(index: ContentIndex, length: int, seed: int) -> np.ndarray:
    text = np.random.default_rng(seed).integers(0, 50_000, length, dtype=np.uint32)
    for i in range(length // 64):
        index.insert(HERE, i + 1, i, text[i * 64 : i * 64 + 64])
    return text


def aligned(index: ContentIndex, query: np.ndarray, text: np.ndarray) -> int:
    """How many tokens got donors. Checks that each span is where the text says, and runs as it should."""
    total = 0
    for span in index.find(HERE, query):
        place = (span.record - 1) * 64 + span.donor_start
        assert query[span.start : span.start + span.length].tolist() == text[place : place + span.length].tolist()
        run = 0
        while run < min(span.start, place) and query[span.start - run - 1] == text[place - run - 1]:
            run += 1
        assert span.run == run
        total += span.length
    return total


@settings(max_examples=part(60), deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.sampled_from(["replace", "insert", "delete"]), st.integers(0, 1279), st.integers(1, 40)),
        max_size=5,
    ),
    cuts=st.lists(st.integers(0, 1280), max_size=3),
    shift=st.integers(0, 100),
    seed=st.integers(0, 2**64 - 1),
)
def test_edits_insertions_deletions_reorderings_and_shifts_are_aligned(
    edits: list[tuple[str, int, int]], cuts: list[int], shift: int, seed: int
) -> None:
    """Around each seam at most 30 tokens on either side are lost, of the part in one block."""
    index = ContentIndex(seed=seed)
    text = stored(index, 1280, 0)
    rng = np.random.default_rng(1)
    pieces = np.split(text, sorted(cuts))[::-1]  # reordered
    query = np.concatenate([rng.integers(50_000, 60_000, shift, dtype=np.uint32), *pieces])
    foreign = shift
    for kind, at, length in edits:
        new = rng.integers(50_000, 60_000, 0 if kind == "delete" else length, dtype=np.uint32)
        gone = 0 if kind == "insert" else length
        query = np.concatenate([query[:at], new, query[at + gone :]])
        foreign += len(new)
    seams = len(cuts) + 1 + 2 * len(edits)
    assert aligned(index, query, text) >= len(query) - foreign - 60 * seams


def test_a_sequence_that_is_stored_whole_is_found_whole() -> None:
    index = ContentIndex(seed=0)
    text = stored(index, 1280, 0)
    assert aligned(index, text, text) == 1280
