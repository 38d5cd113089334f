"""What each operation of the content index promises, one behaviour a test."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvstore.trie._content import MAX_CONTEXT
from kvstore.trie._content import ContentIndex as Native
from kvstore.trie.content import ContentIndex, DonorSpan
from kvstore.trie.reference.content import ReferenceContent
from kvstore.trie.worth import weight

pytestmark = pytest.mark.native

HERE, THERE, NEVER = b"h" * 32, b"t" * 32, b"n" * 32


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def tokens(n: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.uint32)


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def document(index: ContentIndex, text: np.ndarray, record: int, namespace: bytes = HERE, block: int = 64) -> None:
    """Puts `text` in as blocks `record`, `record` + 1, ..., each the parent of the next."""
    for i, start in enumerate(range(0, len(text), block)):
        index.insert(namespace, record + i, record + i - 1 if i else 0, text[start : start + block])


@pytest.fixture(params=[Native, ReferenceContent])
def small(request: pytest.FixtureRequest) -> Any:
    """Every run of 4 tokens is found; nothing is too short."""
    return request.param(4, 1, 8, 1, 7)


@pytest.fixture
def index() -> ContentIndex:
    return ContentIndex(seed=1)


# ---- spans ----


def test_a_passage_is_found_under_another_prefix(index: ContentIndex) -> None:
    document(index, tokens(256), 1)
    query = joined(tokens(50, 1000), tokens(128, 64), tokens(20, 2000))
    assert index.find(HERE, query) == [DonorSpan(50, 64, 2, 0, 0), DonorSpan(114, 64, 3, 0, 64)]


def test_a_match_goes_on_in_the_parents_of_its_block(index: ContentIndex) -> None:
    """The last 10 tokens of the first block alone are shorter than any window."""
    document(index, tokens(128), 1)
    assert index.find(HERE, joined(u32(9999), tokens(74, 54))) == [
        DonorSpan(1, 10, 1, 54, 0),
        DonorSpan(11, 64, 2, 0, 10),
    ]
    orphan = ContentIndex(seed=1)
    orphan.insert(HERE, 2, 1, tokens(64, 64))
    assert orphan.find(HERE, joined(u32(9999), tokens(74, 54))) == [DonorSpan(11, 64, 2, 0, 0)]


def test_a_parent_may_come_later_and_may_leave(index: ContentIndex) -> None:
    index.insert(HERE, 2, 1, tokens(64, 64))
    assert [span.run for span in index.find(HERE, tokens(128))] == [0]
    index.insert(HERE, 1, 0, tokens(64))
    assert [span.run for span in index.find(HERE, tokens(128))] == [0, 64]
    assert index.remove(1)
    assert [span.run for span in index.find(HERE, tokens(128))] == [0]


def test_a_parent_of_another_namespace_does_not_count(index: ContentIndex) -> None:
    index.insert(THERE, 1, 0, tokens(64))
    index.insert(HERE, 2, 1, tokens(64, 64))
    assert index.find(HERE, tokens(128)) == [DonorSpan(64, 64, 2, 0, 0)]


def test_a_seam_is_where_the_text_differs_even_inside_a_block(index: ContentIndex) -> None:
    document(index, tokens(128), 1)
    query = tokens(128)
    query[31] = 7777
    assert index.find(HERE, query) == [
        DonorSpan(0, 31, 1, 0, 0),
        DonorSpan(32, 32, 1, 32, 0),
        DonorSpan(64, 64, 2, 0, 32),
    ]


def test_context_lengthens_runs_and_gets_no_spans(index: ContentIndex) -> None:
    document(index, tokens(192), 1)
    assert index.find(HERE, tokens(192), 100) == [DonorSpan(100, 28, 2, 36, 100), DonorSpan(128, 64, 3, 0, 128)]
    assert index.find(HERE, tokens(192), 192) == []
    assert index.find(HERE, tokens(192), 185) == []  # 7 tokens are left, 8 are the least


def test_context_is_read_back_to_a_limit(index: ContentIndex) -> None:
    text = tokens(MAX_CONTEXT + 640)
    document(index, text, 1)
    runs = [span.run for span in index.find(HERE, text, MAX_CONTEXT + 256)]
    assert runs == [MAX_CONTEXT + i * 64 for i in range(6)]


def test_excluded_records_do_not_serve_but_lengthen_runs(index: ContentIndex) -> None:
    document(index, tokens(192), 1)
    assert index.find(HERE, tokens(192), exclude=[2]) == [DonorSpan(0, 64, 1, 0, 0), DonorSpan(128, 64, 3, 0, 128)]
    assert index.find(HERE, tokens(192), exclude=u64(1, 2, 3, 4)) == []


def test_an_excluded_record_gives_way_to_another_that_holds_the_same(index: ContentIndex) -> None:
    index.insert(HERE, 1, 0, tokens(64))
    index.insert(HERE, 2, 0, tokens(64))
    assert [span.record for span in index.find(HERE, tokens(64))] == [2]
    assert [span.record for span in index.find(HERE, tokens(64), exclude={2})] == [1]


def test_the_chain_with_the_largest_saving_serves_first(index: ContentIndex) -> None:
    document(index, joined(tokens(64), tokens(64, 64)), 1)
    index.insert(HERE, 9, 0, joined(tokens(32, 5000), tokens(32, 64)))  # newer, shorter
    assert [(span.record, span.length) for span in index.find(HERE, tokens(128))] == [(1, 64), (2, 64)]


def test_a_long_run_is_worth_more_than_a_fresh_start(index: ContentIndex) -> None:
    """Both hold the new tokens; one of them held those before, too."""
    document(index, tokens(128), 1)
    index.insert(HERE, 9, 0, tokens(64, 64))
    spans = index.find(HERE, tokens(128), 64)
    assert spans == [DonorSpan(64, 64, 2, 0, 64)]
    assert sum(weight(d) for d in range(64, 128)) > sum(weight(d) for d in range(64))


def test_of_equal_donors_the_newer_serves(small: Any) -> None:
    for record in (3, 9, 5):
        small.insert(0, record, 0, tokens(8))
    assert small.find(0, tokens(8), 0, u64())[2].tolist() == [9]


def test_the_newest_postings_stay_whatever_the_order_of_insertion(small: Any) -> None:
    order = [7, 12, 1, 9, 3, 11, 2, 10, 4, 8, 6, 5]
    for record in order:
        small.insert(0, record, 0, tokens(4))
    assert small.stats()["entries"] == 8
    for newest in range(12, 4, -1):
        barred = np.arange(newest + 1, 13, dtype=np.uint64)
        assert small.find(0, tokens(4), 0, barred)[2].tolist() == [newest]
    assert small.find(0, tokens(4), 0, np.arange(5, 13, dtype=np.uint64))[2].size == 0


def test_overlapping_donors_share_what_they_hold(small: Any) -> None:
    small.insert(0, 1, 0, tokens(20))
    small.insert(0, 2, 0, tokens(12, 14))
    columns = small.find(0, tokens(26), 0, u64())
    assert [column.tolist() for column in columns] == [[0, 20], [20, 6], [1, 2], [0, 6], [0, 6]]


def test_columns_have_the_dtypes_that_are_promised(small: Any) -> None:
    small.insert(0, 1, 0, tokens(20))
    for query in (tokens(20), tokens(20, 500)):
        kinds = [column.dtype.name for column in small.find(0, query, 0, u64())]
        assert kinds == ["uint32", "uint32", "uint64", "uint32", "uint32"]


def test_repetitive_text_takes_no_more_than_its_postings(small: Any) -> None:
    same = np.full(100, 7, np.uint32)
    for record in range(1, 6):
        small.insert(0, record, 0, same)
    assert small.stats()["entries"] == 8
    starts, lengths, records, _, _ = small.find(0, same, 0, u64())
    assert (starts.tolist(), lengths.tolist(), records.tolist()) == ([0], [100], [5])


def test_work_is_bounded_and_the_answer_still_that_of_the_oracle() -> None:
    """A block of one token over and over matches on more diagonals than the work allows for."""
    fast, slow = Native(4, 2, 8, 1, 7), ReferenceContent(4, 2, 8, 1, 7)
    query = np.full(800, 7, np.uint32)
    tail = tokens(30, 100)
    for made in (fast, slow):
        made.insert(0, 1, 0, np.full(1500, 7, np.uint32))
        made.insert(0, 2, 0, tail)
    for text in (query, joined(query, tail), joined(tail, query)):
        found, want = (made.find(0, text, 0, u64()) for made in (fast, slow))
        assert [column.tolist() for column in found] == [column.tolist() for column in want]
    assert 2 not in fast.find(0, joined(query, tail), 0, u64())[2]  # the work was spent before
    assert 2 in fast.find(0, joined(tail, query), 0, u64())[2]


def test_hashes_that_collide_are_told_apart() -> None:
    """With one posting a hash, and blocks that differ in every token but fall on each other's postings or not."""
    rng = np.random.default_rng(0)
    made = Native(2, 1, 1, 2, 3)
    blocks = rng.integers(0, 40, (300, 32), dtype=np.uint32)
    for record, block in enumerate(blocks, 1):
        made.insert(0, record, 0, block)
    query = rng.integers(0, 40, 3000, dtype=np.uint32)
    columns = made.find(0, query, 0, u64())
    assert len(columns[0]) > 100
    for start, length, record, donor, _ in zip(*(column.tolist() for column in columns), strict=True):
        assert blocks[record - 1][donor : donor + length].tolist() == query[start : start + length].tolist()


# ---- namespaces and records ----


def test_namespaces_are_apart_and_an_unknown_one_is_not_made(index: ContentIndex) -> None:
    index.insert(HERE, 1, 0, tokens(64))
    index.insert(THERE, 2, 0, tokens(64))
    assert [span.record for span in index.find(HERE, tokens(64))] == [1]
    assert [span.record for span in index.find(THERE, tokens(64))] == [2]
    assert index.find(NEVER, tokens(64)) == []
    assert index.stats()["namespaces"] == 2


def test_blocks_shorter_than_a_window_are_ignored(index: ContentIndex) -> None:
    assert not index.insert(HERE, 1, 0, tokens(15))
    assert index.insert(HERE, 1, 0, tokens(16))
    assert not index.insert(HERE, 2, 1, tokens(0))
    assert [len(index), 1 in index, 2 in index] == [1, True, False]


def test_a_known_record_is_refused_and_nothing_changes(index: ContentIndex) -> None:
    index.insert(HERE, 5, 0, tokens(64))
    before = index.stats()
    with pytest.raises(ValueError, match="record"):
        index.insert(HERE, 5, 0, tokens(64, 100))
    columns = u64(6, 5), u64(0, 0), u32(64, 64), tokens(128, 500)
    with pytest.raises(ValueError, match="records: 5"):
        index.insert_many([HERE], u32(0, 0), *columns)
    assert index.stats() == before
    assert index.tokens(5).tolist() == tokens(64).tolist()


def test_many_blocks_in_one_call_are_as_good_as_one_by_one(index: ContentIndex) -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 30, 64 * 200, dtype=np.uint32)
    one_by_one = ContentIndex(seed=1)
    document(one_by_one, text, 1)
    records = np.arange(1, 201, dtype=np.uint64)
    order = rng.permutation(200)
    shuffled = text.reshape(200, 64)[order].ravel()
    counts = np.full(200, 64, np.uint32)
    which = np.zeros(200, np.uint32)
    assert index.insert_many([HERE], which, records[order], records[order] - np.uint64(1), counts, shuffled) == 200
    query = joined(text[100:3000], text[40:900])
    spans = index.find(HERE, query)
    assert sum(span.length for span in spans) > 3600
    assert spans == one_by_one.find(HERE, query)
    assert index.stats()["entries"] == one_by_one.stats()["entries"]


def test_tokens_come_back_and_unknown_records_are_key_errors(index: ContentIndex) -> None:
    index.insert(HERE, 2**64 - 1, 2**64 - 2, tokens(70))
    assert index.tokens(2**64 - 1).tolist() == tokens(70).tolist()
    for unknown in (1, 0, -1, 2**64, "x", None, 1.5):
        assert unknown not in index
        with pytest.raises(KeyError):
            index.tokens(unknown)  # type: ignore[arg-type]
        assert index.remove(unknown) is False  # type: ignore[arg-type]
    assert np.uint64(2**64 - 1) in index


def test_a_span_is_frozen(index: ContentIndex) -> None:
    index.insert(HERE, 1, 0, tokens(64))
    (span,) = index.find(HERE, tokens(64))
    with pytest.raises(dataclasses.FrozenInstanceError):
        span.run = 3  # type: ignore[misc]


# ---- what is refused ----

BAD_TOKENS = [
    np.arange(64),
    np.arange(64, dtype=np.int32),
    np.arange(64, dtype=">u4"),
    np.zeros((8, 8), np.uint32),
    np.zeros(128, np.uint32)[::2],
    np.frombuffer(bytes(257), np.uint8)[1:].view(np.uint32),
    list(range(64)),
    None,
]


@pytest.mark.parametrize("wrong", BAD_TOKENS, ids=range(len(BAD_TOKENS)))
def test_tokens_of_another_kind_are_refused(index: ContentIndex, wrong: Any) -> None:
    with pytest.raises(ValueError, match="tokens"):
        index.insert(HERE, 1, 0, wrong)
    for namespace in (HERE, NEVER):
        with pytest.raises(ValueError, match="tokens"):
            index.find(namespace, wrong)
    assert len(index) == 0


@pytest.mark.parametrize("wrong", [b"short", b"x" * 33, "x" * 32, None])
def test_a_namespace_that_is_no_digest_is_refused(index: ContentIndex, wrong: Any) -> None:
    with pytest.raises(ValueError, match="namespace"):
        index.insert(wrong, 1, 0, tokens(64))
    with pytest.raises(ValueError, match="namespace"):
        index.find(wrong, tokens(64))
    with pytest.raises(ValueError, match="namespace"):
        index.insert_many([wrong], u32(), u64(), u64(), u32(), u32())
    assert index.stats()["namespaces"] == 0


@pytest.mark.parametrize("wrong", [-1, 2**64, 1.0, "1", None, True])
def test_numbers_out_of_range_are_refused(index: ContentIndex, wrong: Any) -> None:
    with pytest.raises(ValueError, match="record"):
        index.insert(HERE, wrong, 0, tokens(64))
    with pytest.raises(ValueError, match="parent"):
        index.insert(HERE, 1, wrong, tokens(64))
    with pytest.raises(ValueError, match="first"):
        index.find(HERE, tokens(64), wrong)
    with pytest.raises(ValueError, match="exclude"):
        index.find(HERE, tokens(64), exclude=[wrong])
    with pytest.raises(ValueError, match="first"):
        index.find(HERE, tokens(64), 65)
    with pytest.raises(ValueError, match="exclude"):
        index.find(HERE, tokens(64), exclude=np.zeros(3))
    with pytest.raises(ValueError, match="record"):
        index.insert(HERE, 0, 0, tokens(64))
    with pytest.raises(ValueError, match="parent"):
        index.insert(HERE, 1, 1, tokens(64))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("window", x) for x in (1, 257, 2**40, -1, 1.5)),
        *(("winnow", x) for x in (0, 257, 2**32)),
        *(("postings", x) for x in (0, 256)),
        *(("min_length", x) for x in (0, 65537)),
        *(("seed", x) for x in (-1, 2**64)),
    ],
)
def test_settings_out_of_range_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=name):
        ContentIndex(**{name: wrong})


def test_columns_that_do_not_fit_are_refused_whole(index: ContentIndex) -> None:
    good: dict[str, Any] = {
        "which": u32(0, 0),
        "records": u64(1, 2),
        "parents": u64(0, 1),
        "counts": u32(64, 64),
        "tokens": tokens(128),
    }
    for name, wrong in [
        ("which", u32(0)),
        ("which", u32(0, 1)),
        ("which", u64(0, 0)),
        ("records", u32(1, 2)),
        ("records", u64(1, 1)),
        ("records", u64(2, 0)),
        ("parents", u64(1, 1)),
        ("parents", u64(0)),
        ("counts", u32(64, 64, 0)),
        ("counts", u32(2**32 - 1, 129)),  # their sum is 128 in 32 bits
        ("tokens", tokens(127)),
        ("tokens", tokens(129)),
    ]:
        with pytest.raises(ValueError):
            index.insert_many([HERE], **(good | {name: wrong}))
        assert len(index) == 0
    assert index.insert_many([HERE], **good) == 2


def test_more_tokens_than_a_block_may_have_are_refused(index: ContentIndex) -> None:
    assert index.insert(HERE, 1, 0, tokens(65536))
    with pytest.raises(ValueError, match="tokens"):
        index.insert(HERE, 2, 0, tokens(65537))
    spans = index.find(HERE, tokens(70000, 65000))
    assert spans == [DonorSpan(0, 536, 1, 65000, 0)]


def test_a_huge_query_is_refused_before_it_is_read(index: ContentIndex) -> None:
    index.insert(HERE, 1, 0, tokens(64))
    lazy = np.zeros(2**26 + 1, np.uint32)  # the system gives its pages when they are touched
    with pytest.raises(ValueError, match="tokens"):
        index.find(HERE, lazy)
