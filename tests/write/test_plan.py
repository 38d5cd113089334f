"""Which blocks of a sequence a put still has to store."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcases import SMALL, identity, random_kv, same_kv, tokens

from kvstore.codecs import KVView
from kvstore.config import MIB
from kvstore.core.keys import chain_keys, chain_root, namespace_digest
from kvstore.tiers.buffers import BufferPool
from kvstore.trie import Match, TrieIndex
from kvstore.write.plan import PutRequest, make_blocks, missing_blocks, view_from

NAMESPACE = namespace_digest(b"")
ROOT = chain_root(identity().digest, NAMESPACE, 4)


def match(depth: int, *records: tuple[int, int]) -> Match:
    ids, ends = zip(*records, strict=True) if records else ((), ())
    return Match(depth, 0.0, np.array(ids, np.uint64), np.array(ends, np.uint32))


@pytest.mark.parametrize(
    ("known", "count", "blocks", "first_token"),
    [
        (match(0), 10, [0, 1, 2], 0),
        (match(4, (1, 4)), 10, [1, 2], 4),
        (match(8, (1, 4), (2, 8)), 10, [2], 8),
        (match(10, (1, 4), (2, 8), (3, 10)), 10, [], 10),
        # a longer tail covers a shorter query
        (match(9, (1, 4), (2, 8), (3, 10)), 9, [], 9),
        # a tail that grew: its block is stored anew
        (match(10, (1, 4), (2, 8), (3, 10)), 12, [2], 8),
        # a whole block that diverges inside: another sequence's record covers tokens that differ
        (match(6, (1, 4), (2, 8)), 8, [1], 4),
        # ... even where the match ends just one token before
        (match(7, (1, 4), (2, 8)), 8, [1], 4),
        # a hole in the middle
        (match(12, (1, 4), (0, 0), (3, 12)), 12, [1], 4),
        (match(12, (0, 0), (2, 8), (3, 12)), 12, [0], 0),
        # a short tail in the middle, where the full block was lost
        (match(12, (1, 4), (2, 6), (3, 12)), 12, [1], 4),
        (match(1, (1, 4)), 1, [], 1),
    ],
)
def test_blocks_that_no_record_covers_are_missing(
    known: Match, count: int, blocks: list[int], first_token: int
) -> None:
    gap = missing_blocks(known, count, 4)
    assert (gap.blocks, gap.first_token) == (blocks, first_token)


def sequence(ids: np.ndarray, bits: np.ndarray | float = 16.0, pin: bool = False, expiry: float = 0.0) -> PutRequest:
    return PutRequest(SMALL, ROOT, NAMESPACE, ids, bits, expiry, pin)


def blocks_of(seq: PutRequest, known: Match, first_record: int = 1):
    gap = missing_blocks(known, len(seq.tokens), 4)
    kv = random_kv(len(seq.tokens))
    view = view_from(seq, tuple(kv), gap.first_token, None)
    return list(make_blocks(seq, known, gap, view, first_record, 4)), kv


def test_blocks_carry_their_keys_parents_places_and_tokens() -> None:
    ids = tokens(10)
    blocks, _ = blocks_of(sequence(ids), match(4, (7, 4)), first_record=20)
    keys = [ROOT, *chain_keys(ROOT, ids, 4)]
    assert [(b.record, b.parent, b.start, b.end) for b in blocks] == [(20, 7, 4, 8), (21, 20, 8, 10)]
    assert [(b.parent_key, b.key) for b in blocks] == [(keys[1], keys[2]), (keys[2], keys[3])]
    assert [b.tokens.tolist() for b in blocks] == [ids[4:8].tolist(), ids[8:].tolist()]
    assert all(b.namespace == NAMESPACE for b in blocks)


def test_a_block_in_a_hole_has_its_stored_neighbour_as_parent() -> None:
    blocks, _ = blocks_of(sequence(tokens(12)), match(12, (7, 4), (0, 0), (9, 12)), first_record=20)
    assert [(b.record, b.parent, b.start) for b in blocks] == [(20, 7, 4)]


def test_the_first_block_has_no_parent() -> None:
    blocks, _ = blocks_of(sequence(tokens(3)), match(0))
    assert [(b.parent, b.parent_key) for b in blocks] == [(0, ROOT)]


def test_blocks_see_their_slice_of_the_cache() -> None:
    blocks, kv = blocks_of(sequence(tokens(10)), match(4, (7, 4)))
    for block in blocks:
        expected = [(k[:, block.start : block.end], v[:, block.start : block.end]) for k, v in kv]
        found = block.view.tensors()
        assert same_kv(list(zip(found[::2], found[1::2], strict=True)), expected)


def test_only_the_last_block_of_a_pinned_sequence_is_marked() -> None:
    blocks, _ = blocks_of(sequence(tokens(10), pin=True), match(0))
    assert [b.pinned for b in blocks] == [False, False, True]


def test_no_block_is_marked_where_the_last_one_is_stored_already() -> None:
    blocks, _ = blocks_of(sequence(tokens(12), pin=True), match(12, (7, 4), (0, 0), (9, 12)))
    assert [b.pinned for b in blocks] == [False]


def test_blocks_share_the_bits_of_their_tokens() -> None:
    bits = np.arange(10, dtype=np.float32)
    blocks, _ = blocks_of(sequence(tokens(10), bits=bits), match(0))
    assert [b.bits for b in blocks] == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8 + 9]
    uniform, _ = blocks_of(sequence(tokens(10), bits=2.0), match(0))
    assert [b.bits for b in uniform] == [8, 8, 4]


def test_blocks_do_not_follow_the_callers_token_array() -> None:
    ids = tokens(4)
    blocks, _ = blocks_of(sequence(ids), match(0))
    before = ids.tolist()
    ids[:] = 0
    assert blocks[0].tokens.tolist() == before


def test_without_a_pool_the_view_is_the_callers_memory() -> None:
    kv = random_kv(10)
    view = view_from(sequence(tokens(10)), tuple(kv), 4, None)
    assert view.tensors()[0].data_ptr() == kv[0][0][:, 4:].data_ptr()


def test_with_a_pool_the_view_is_a_copy() -> None:
    kv = random_kv(10)
    before = [(k.clone(), v.clone()) for k, v in kv]
    view = view_from(sequence(tokens(10)), tuple(kv), 4, BufferPool(1 * MIB))
    for pair in kv:
        for tensor in pair:
            tensor.zero_()
    out = [(torch.empty(2, 6, 16, dtype=torch.bfloat16), torch.empty(2, 6, 16, dtype=torch.bfloat16)) for _ in range(3)]
    view.copy_to(KVView.of_layers(SMALL, out))
    assert same_kv(out, [(k[:, 4:], v[:, 4:]) for k, v in before])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=6), st.integers(1, 5))
def test_after_the_missing_blocks_are_inserted_nothing_is_missing(sequences: list[list[int]], size: int) -> None:
    index, record = TrieIndex(size), 1
    for ids in sequences:
        array = np.array(ids, np.uint32)
        known = index.match(NAMESPACE, array, touch=False)
        gap = missing_blocks(known, len(ids), size)
        if gap.blocks:
            ends = np.minimum((np.array(gap.blocks) + 1) * size, len(ids)).astype(np.uint32)
            numbers = np.arange(record, record + len(ends), dtype=np.uint64)
            index.insert(NAMESPACE, array[: ends[-1]], ends, numbers)
            record += len(ends)
        after = index.match(NAMESPACE, array, touch=False)
        assert missing_blocks(after, len(ids), size).blocks == []
        assert after.usable(size) == len(ids)
