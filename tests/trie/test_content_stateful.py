"""The C++ content index and the plain-Python oracle must agree after every operation, whatever text they hold."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import seeds
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracles import both, run_machine, same_stats, u32, u64

from kvstore.trie._content import ContentIndex
from kvstore.trie.reference.content import ReferenceContent

# Few tokens and long runs of one: matches overlap, tie, repeat on many diagonals, and hashes exceed their postings.
TOKENS = st.one_of(
    st.lists(st.integers(0, 1), max_size=20),
    st.lists(st.integers(0, 9), max_size=24),
    st.tuples(st.integers(0, 30), st.lists(st.integers(0, 2), max_size=8)).map(lambda x: [7] * x[0] + x[1]),
)


class ContentMachine(RuleBasedStateMachine):
    @initialize(
        window=st.integers(2, 5),
        winnow=st.integers(1, 4),
        postings=st.integers(1, 4),
        least=st.integers(1, 4),
        seed=st.integers(0, 2**64 - 1),
    )
    def build(self, window: int, winnow: int, postings: int, least: int, seed: int) -> None:
        self.fast = ContentIndex(window, winnow, postings, least, seed)
        self.slow = ReferenceContent(window, winnow, postings, least, seed)
        self.known: dict[int, tuple[int, list[int]]] = {}
        self.next_record = 1

    def both(self, name: str, *arguments: Any) -> Any:
        return both(self.fast, self.slow, name, *arguments)

    def text(self, data: st.DataObject) -> list[int]:
        """Parts of what is stored and anything else, in any order."""
        parts = []
        for _ in range(data.draw(st.integers(1, 3))):
            if self.known and data.draw(st.integers(0, 3)):
                tokens = self.known[data.draw(st.sampled_from(sorted(self.known)))][1]
                a, b = sorted((data.draw(st.integers(0, len(tokens))), data.draw(st.integers(0, len(tokens)))))
                parts.append(tokens[a:b] if data.draw(st.booleans()) else tokens)
            else:
                parts.append(data.draw(TOKENS))
        return [token for part in parts for token in part]

    @rule(data=st.data(), space=st.sampled_from([0, 0, 0, 1]))
    def insert(self, data: st.DataObject, space: int) -> None:
        record = data.draw(st.sampled_from([self.next_record, self.next_record + 3, 5]))
        parent = data.draw(st.integers(0, self.next_record))
        tokens = self.text(data)[:40]
        if self.both("insert", space, record, parent, u32(tokens)) is True:
            self.known[record] = (space, tokens)
        self.next_record = max(self.next_record, record) + 1

    @rule(data=st.data(), blocks=st.integers(1, 4), size=st.integers(3, 9), newest_first=st.booleans())
    def insert_sequence(self, data: st.DataObject, blocks: int, size: int, newest_first: bool) -> None:
        """A sequence of blocks, each the parent of the next, in one call and any order."""
        text = (self.text(data) + data.draw(TOKENS))[: blocks * size]
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        records = [self.next_record + i for i in range(len(parts))]
        parents = [0, *records[:-1]][: len(parts)]
        self.next_record += len(parts)
        rows = list(zip(records, parents, parts, strict=True))
        if newest_first:
            rows.reverse()
        kept = self.both(
            "insert_many",
            u32([0] * len(rows)),
            u64([row[0] for row in rows]),
            u64([row[1] for row in rows]),
            u32([len(row[2]) for row in rows]),
            u32([token for row in rows for token in row[2]]),
        )
        self.known |= {record: (0, part) for record, _, part in rows if record in self.slow}
        assert kept == sum(record in self.slow for record in records)

    @rule(data=st.data())
    def insert_nonsense(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from([0, *sorted(self.known)]))
        assert self.both("insert", 0, record, 0, u32([1] * 9)) is ValueError
        new = self.next_record
        assert self.both("insert", 0, new, new, u32([1] * 9)) is ValueError
        twice = u32([0, 0]), u64([new, new]), u64([0, 0]), u32([9, 9])
        assert self.both("insert_many", *twice, u32([1] * 18)) is ValueError
        assert self.both("insert_many", *twice, u32([1] * 17)) is ValueError

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        record = data.draw(st.integers(1, self.next_record))
        assert self.both("remove", record) == (record in self.known)
        self.known.pop(record, None)

    @rule(data=st.data(), space=st.sampled_from([0, 0, 0, 1, 2]))
    def find(self, data: st.DataObject, space: int) -> None:
        tokens = self.text(data)
        first = data.draw(st.one_of(st.just(0), st.integers(0, len(tokens))))
        barred = data.draw(st.lists(st.integers(0, self.next_record), max_size=3))
        self.compare(space, tokens, first, barred)

    @rule(order=st.randoms(use_true_random=False))
    def find_all(self, order: Any) -> None:
        """Much of what is stored, shuffled."""
        texts = [tokens for _, tokens in self.known.values()]
        order.shuffle(texts)
        tokens = [token for text in texts[:5] for token in text[order.randrange(3) :]]
        first = order.randrange(len(tokens) + 1) if order.random() < 0.3 else 0
        self.compare(0, tokens, first, [order.randrange(self.next_record)])

    def compare(self, space: int, tokens: list[int], first: int, barred: list[int]) -> None:
        columns = self.both("find", space, u32(tokens), first, u64(barred))
        at = first
        for start, length, record, donor, run in zip(*columns, strict=True):
            assert start >= at
            at = start + length
            assert length >= self.slow.min_length
            assert record not in barred
            assert run <= start
            assert self.known[record][0] == space
            assert self.known[record][1][donor : donor + length] == tokens[start:at]
        assert at <= len(tokens)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "fast"):
            return
        same_stats(self.fast, self.slow)
        assert len(self.fast) == len(self.slow) == len(self.known)
        for record, (_, tokens) in self.known.items():
            assert record in self.fast
            assert self.fast.tokens(record).tolist() == self.slow.tokens(record).tolist() == tokens


@pytest.mark.native
def test_the_index_agrees_with_the_oracle() -> None:
    run_machine(ContentMachine, int(os.environ.get("KVSTORE_CONTENT_EXAMPLES", "150")), 30)


@pytest.mark.native
@pytest.mark.parametrize("seed", range(12))
def test_the_index_agrees_with_the_oracle_in_long_lives(seed: int) -> None:
    """Sequences of blocks that quote each other come and go; queries quote them, too."""
    rng = np.random.default_rng(seeds.nth(seed))
    window, winnow = int(rng.integers(2, 7)), int(rng.integers(1, 6))
    settings = (window, winnow, int(rng.integers(1, 9)), int(rng.integers(1, 9)), seed)
    fast, slow = ContentIndex(*settings), ReferenceContent(*settings)
    words = [rng.integers(0, [2, 30, 5000][i % 3], rng.integers(3, 30)).tolist() for i in range(20)]
    live: list[int] = []
    record = spans = runs = cut = 0
    for turn in range(41):
        text = [token for i in rng.integers(0, 20, rng.integers(1, 12)) for token in words[i]]
        size, space = int(rng.integers(4, 24)), int(rng.random() < 0.1)
        if turn == 40:  # whatever chance says, this is found, from inside of a block on
            text, size, space = list(range(10_000, 10_060)), 20, 0
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        numbers = list(range(record + 1, record + 1 + len(parts)))
        rows = u64(numbers), u64([0, *numbers[:-1]]), u32([len(part) for part in parts]), u32(text)
        spaces = u32([space] * len(parts))
        assert fast.insert_many(spaces, *rows) == slow.insert_many(spaces, *rows)
        record = numbers[-1]
        live += [number for number in numbers if number in slow]
        for _ in range(int(rng.integers(0, 6)) if len(live) > 40 > turn else 0):
            gone = live.pop(int(rng.integers(0, len(live))))
            assert fast.remove(gone)
            assert slow.remove(gone)
        query = u32([token for i in rng.integers(0, 20, rng.integers(1, 12)) for token in words[i]])
        first = int(rng.integers(0, len(query) + 1)) if rng.random() < 0.5 else 0
        barred = rng.choice(live, 3).astype(np.uint64) if live and rng.random() < 0.5 else u64([])
        if turn == 40:
            query, first, barred = u32(text), 25, u64([])
        found, want = (index.find(0, query, first, barred) for index in (fast, slow))
        assert [column.tolist() for column in found] == [column.tolist() for column in want]
        same_stats(fast, slow)
        spans += len(found[0])
        runs += int((found[4] > 0).sum())
        cut += int(((found[3] > 0) & (found[4] > 0)).sum())
    assert min(spans, runs, cut) > 0  # nothing passes because nothing was found
