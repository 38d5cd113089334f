"""A content index that reads its tokens in a trie finds what one finds that keeps them."""

from __future__ import annotations

import gc
import threading
from functools import partial

import numpy as np
import pytest
import seeds
from oracles import plain, same_stats, u32, u64
from threadruns import run_together

from kvstore.trie.content import ContentIndex
from kvstore.trie.index import TrieIndex
from kvstore.trie.reference.content import ReferenceContent

pytestmark = pytest.mark.native

HERE = b"h" * 32
BLOCK = 8
NONE = np.zeros(0, np.uint64)


class Both:
    """A trie with a content index above it, and the plain index beside them, of blocks of `BLOCK` tokens."""

    def __init__(self, seed: int) -> None:
        self.trie = TrieIndex(BLOCK)
        self.content = ContentIndex(trie=self.trie, window=4, winnow=3, postings=2, min_length=1, seed=seed)
        self.slow = ReferenceContent(4, 3, 2, 1, seed)
        self.record = 0

    def put(self, text: np.ndarray) -> None:
        """Stores the whole blocks of a text in new records, and its tail in one that is no donor."""
        ends = np.array([*range(BLOCK, len(text) + 1, BLOCK), *([len(text)] if len(text) % BLOCK else [])], np.uint32)
        numbers = np.arange(self.record + 1, self.record + 1 + len(ends), dtype=np.uint64)
        self.record += len(ends)
        self.forget(*self.trie.insert(HERE, text, ends, numbers).tolist())
        n = len(text) // BLOCK
        rows = numbers[:n], u64([0, *numbers[: n - 1]])[:n], u32([BLOCK] * n), text[: n * BLOCK]
        kept = self.content.insert_many([HERE], u32([0] * n), *rows)
        assert kept == self.slow.insert_many(u32([0] * n), *rows) == n

    def forget(self, *records: int) -> None:
        for record in records:
            assert self.content.remove(record) == self.slow.remove(record)

    def compare(self, query: np.ndarray, first: int, barred: np.ndarray) -> int:
        """Returns how many spans both found."""
        found = self.content._index.find(0, query, first, barred)
        assert plain(found) == plain(self.slow.find(0, query, first, barred))
        same_stats(self.content._index, self.slow)
        return len(found[0])


@pytest.mark.parametrize("seed", range(8))
def test_it_agrees_with_the_oracle_while_sequences_fork_and_leave(seed: int) -> None:
    """Sequences that begin alike split edges within blocks; blocks leave from ends and from the middle."""
    rng = np.random.default_rng(seeds.nth(seed))
    both, texts, spans, left = Both(seed), [], 0, 0
    words = [rng.integers(0, [3, 40, 90_000][i % 3], rng.integers(3, 30), dtype=np.uint32) for i in range(20)]
    for turn in range(60):
        parts = [words[i] for i in rng.integers(0, 20, rng.integers(1, 8))]
        if texts and turn % 2:
            base = texts[int(rng.integers(len(texts)))]
            parts.insert(0, base[: int(rng.integers(1, len(base) + 1))])
        texts.append(np.concatenate(parts)[:400])
        both.put(texts[-1])
        for _ in range(int(rng.integers(0, 12)) if turn > 15 else 0):
            if rng.random() < 0.5:
                record = both.trie.evict()
            else:
                record = int(rng.integers(1, both.record + 1))
                record = record if both.trie.remove(record) else None
            if record:
                both.forget(record)
                left += 1
        if turn == 50:
            both.forget(*both.trie.erase(HERE, texts[-1]).tolist())
            both.trie.compact()
        query = np.concatenate([words[i] for i in rng.integers(0, 20, 6)] + [texts[int(rng.integers(len(texts)))]])
        first = int(rng.integers(0, len(query))) if rng.random() < 0.5 else 0
        spans += both.compare(query, first, rng.integers(1, both.record + 1, 3).astype(np.uint64))
    for record in both.slow._blocks:
        assert both.content.tokens(record).tolist() == both.slow.tokens(record).tolist()
    assert min(spans, left) > 0


def test_what_has_left_the_trie_is_not_found() -> None:
    both = Both(1)
    both.put(np.arange(BLOCK, dtype=np.uint32))
    both.put(np.arange(100, 100 + BLOCK, dtype=np.uint32))
    query = np.concatenate([np.arange(2, BLOCK), np.arange(100, 100 + BLOCK)]).astype(np.uint32)
    assert both.compare(query, 0, NONE) == 2
    assert both.trie.remove(1)
    assert [span.record for span in both.content.find(HERE, query)] == [2]
    with pytest.raises(KeyError):
        both.content.tokens(1)
    both.forget(1)
    assert both.compare(query, 0, NONE) == 1


def test_parents_that_have_left_the_trie_lengthen_no_run() -> None:
    both = Both(1)
    text = np.arange(2 * BLOCK, dtype=np.uint32)
    both.put(text)
    assert [(span.start, span.run) for span in both.content.find(HERE, text)] == [(0, 0), (BLOCK, BLOCK)]
    assert both.trie.remove(1)  # leaves a hole
    assert [(span.start, span.run) for span in both.content.find(HERE, text)] == [(BLOCK, 0)]


def test_numbers_need_not_rise_along_a_sequence() -> None:
    """One place never had a record, two were filled again: 1, none, 6, 3, 7, 5."""
    trie, text = TrieIndex(BLOCK), np.arange(6 * BLOCK, dtype=np.uint32)
    content = ContentIndex(trie=trie, window=4, winnow=3, min_length=1, seed=1)
    trie.insert(HERE, text, u32([BLOCK * k for k in (1, 3, 4, 5, 6)]), u64([1, 2, 3, 4, 5]))
    assert trie.remove(2)
    assert trie.remove(4)
    assert trie.insert(HERE, text, u32([BLOCK * 3, BLOCK * 5]), u64([6, 7])).tolist() == [2, 4]
    places = {1: 0, 6: 2, 3: 3, 7: 4, 5: 5}
    for record, place in places.items():
        block = text[place * BLOCK : (place + 1) * BLOCK]
        assert content.insert(HERE, record, 0, block)
        assert content.tokens(record).tolist() == block.tolist()
    found = content.find(HERE, text)
    assert [(span.start // BLOCK, span.record) for span in found] == sorted((k, r) for r, k in places.items())


def test_the_index_keeps_the_trie_alive() -> None:
    trie, content, tokens = opened(20)
    del trie
    gc.collect()
    assert [span.record for span in content.find(HERE, tokens[3])] == [4]


@pytest.mark.parametrize("blocks", [4_000, 11_000])
def test_a_block_takes_no_more_than_110_bytes(blocks: int) -> None:
    trie = TrieIndex(64)
    content = ContentIndex(trie=trie, seed=0)
    tokens = np.random.default_rng(0).integers(0, 50_000, blocks * 64, dtype=np.uint32)
    numbers = np.arange(1, blocks + 1, dtype=np.uint64)
    trie.insert(HERE, tokens, np.arange(64, blocks * 64 + 1, 64, dtype=np.uint32), numbers)
    content.insert_many([HERE], u32([0] * blocks), numbers, numbers - 1, u32([64] * blocks), tokens)
    assert content.stats()["bytes"] <= 110 * blocks
    assert content.stats()["tokens"] == 64 * blocks
    assert [span.record for span in content.find(HERE, tokens[-64:])] == [blocks]


def opened(blocks: int, block: int = 64) -> tuple[TrieIndex, ContentIndex, np.ndarray]:
    """A trie and a content index as a store has them that was just opened, and the tokens `[blocks, block]`."""
    trie = TrieIndex(block)
    content = ContentIndex(trie=trie, window=4, winnow=3, postings=2, min_length=1, seed=3)
    tokens = np.random.default_rng(5).integers(0, 50_000, (blocks, block), dtype=np.uint32)
    tokens[::7] = tokens[0]  # more places than are kept
    numbers = np.arange(1, blocks + 1, dtype=np.uint64)
    trie.insert(HERE, tokens.ravel(), np.arange(block, blocks * block + 1, block, dtype=np.uint32), numbers)
    content.insert_many([HERE], u32([0] * blocks), numbers, numbers - 1, u32([block] * blocks), None)
    return trie, content, tokens


def test_records_without_tokens_wait_until_donors_are_looked_for() -> None:
    blocks = 3_000
    _, content, tokens = opened(blocks)
    before = content.stats()
    assert (before["records"], before["entries"], before["waiting"]) == (blocks, 0, blocks)
    assert before["bytes"] <= 32 * blocks
    slow = ReferenceContent(4, 3, 2, 1, 3)
    numbers = np.arange(1, blocks + 1, dtype=np.uint64)
    slow.insert_many(u32([0] * blocks), numbers, numbers - 1, u32([64] * blocks), tokens.ravel())
    for query in (tokens[-5:].ravel(), tokens[7], tokens[40:42].ravel()[30:90]):
        assert plain(content._index.find(0, query, 0, NONE)) == plain(slow.find(0, query, 0, NONE))
    same_stats(content._index, slow)
    assert content.stats()["waiting"] == 0


@pytest.mark.parametrize("gone", [100, 2_900])
def test_what_waits_may_leave_and_others_come(gone: int) -> None:
    """2,900 of 3,000: what is left moves to other slots."""
    blocks = 3_000
    trie, content, tokens = opened(blocks)
    slow = ReferenceContent(4, 3, 2, 1, 3)
    leaves = np.random.default_rng(1).permutation(np.arange(1, blocks + 1))[:gone].tolist()
    new = np.arange(90_000, 90_064, dtype=np.uint32)
    trie.insert(HERE, new, u32([64]), u64([blocks + 1]))
    for record in leaves[: gone // 2]:
        assert content.remove(record)
    assert content.insert(HERE, blocks + 1, 0, new)
    for record in leaves[gone // 2 :]:
        assert content.remove(record)
    rest = np.setdiff1d(np.arange(1, blocks + 2, dtype=np.uint64), u64(leaves))
    slow.insert_many(
        u32([0] * len(rest)),
        rest,
        np.where(rest > blocks, 0, rest - 1).astype(np.uint64),
        u32([64] * len(rest)),
        np.concatenate([tokens, new[None]])[rest - 1].ravel(),
    )
    for query in (new, tokens[rest[0] - 1], tokens[rest[-2] - 1], tokens[:20].ravel()):
        assert plain(content._index.find(0, query, 0, NONE)) == plain(slow.find(0, query, 0, NONE))
    same_stats(content._index, slow)
    again = u64([blocks + 2])
    trie.insert(HERE, new[:32], u32([32]), again)
    assert content.insert_many([HERE], u32([0]), again, u64([0]), u32([32]), None) == 1
    for record in rest.tolist():
        assert content.remove(record)
    assert content.stats()["records"] == content.stats()["waiting"] == 1


def test_two_look_first_at_once() -> None:
    _, content, tokens = opened(2_000)
    found: list[list[int]] = []

    def look(first: int) -> None:
        found.append([span.record for span in content.find(HERE, tokens[first : first + 3].ravel())])

    run_together(partial(look, 1_500), partial(look, 1_500), partial(look, 1_500))
    assert found == [[1_501, 1_502, 1_503]] * 3
    assert content.stats()["waiting"] == 0


def test_records_leave_and_come_while_others_look_first() -> None:
    blocks, gone = 4_000, 1_000
    trie, content, tokens = opened(blocks)
    texts = {record: tokens[record - 1] for record in range(1, blocks + 1) if (record - 1) % 7}
    new = np.random.default_rng(6).integers(50_000, 99_000, (200, 64), dtype=np.uint32)
    last = list(texts)[-3:]

    def look() -> None:
        for record in last:
            assert [span.record for span in content.find(HERE, texts[record])] == [record]

    def leave() -> None:
        for record in range(1, gone + 1):
            assert trie.remove(record)
            assert content.remove(record)

    def come() -> None:
        for record, block in enumerate(new, blocks + 1):
            trie.insert(HERE, block, u32([64]), u64([record]))
            assert content.insert(HERE, record, 0, block)

    run_together(look, leave, come, look)
    stats = content.stats()
    assert (stats["records"], stats["waiting"]) == (blocks - gone + 200, 0)
    texts |= dict(enumerate(new, blocks + 1))
    for record, block in texts.items():
        assert [span.record for span in content.find(HERE, block)] == ([record] if record > gone else [])


def test_tokens_must_be_given_where_no_trie_has_them() -> None:
    content = ContentIndex(seed=1)
    with pytest.raises(ValueError, match="no trie has them"):
        content.insert_many([HERE], u32([0]), u64([1]), u64([0]), u32([64]), None)
    assert len(content) == 0


def test_readers_find_what_stays_while_the_trie_changes() -> None:
    """Edges are split, dropped and moved to a new arena beside the look-ups."""
    rng = np.random.default_rng(0)
    trie = TrieIndex(64)
    content = ContentIndex(trie=trie, seed=0)
    kept = rng.integers(0, 50_000, 64 * 20, dtype=np.uint32)
    numbers = np.arange(1, 21, dtype=np.uint64)
    trie.insert(HERE, kept, np.arange(64, 64 * 20 + 1, 64, dtype=np.uint32), numbers)
    content.insert_many([HERE], u32([0] * 20), numbers, numbers - 1, u32([64] * 20), kept)
    trie.pin(HERE, kept)
    done, failures, looks = threading.Event(), [], [0]
    whole = [(k * 64, 64, k + 1, k * 64) for k in range(20)]

    def read() -> None:
        while not done.is_set() or looks[0] < 50:
            spans = content.find(HERE, kept)
            if [(x.start, x.length, x.record, x.run) for x in spans] != whole:
                failures.append(spans)
            looks[0] += 1

    def write() -> None:
        try:
            record = 100
            for turn in range(400):
                text = np.concatenate([kept[: 3 * turn], rng.integers(50_000, 99_999, 128, dtype=np.uint32)])
                end = len(text) // 64 * 64
                trie.insert(HERE, text[:end], u32([end]), u64([record]))
                content.insert(HERE, record, 0, text[end - 64 : end])
                if turn % 2:
                    content.remove(trie.evict() or 0)
                record += 1
            trie.compact()
        finally:
            done.set()

    run_together(partial(read), partial(write))
    assert failures == []
    assert looks[0] >= 50
