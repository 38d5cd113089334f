"""Readers that run beside a writer see the content index as it was before or after each operation."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import numpy as np
import pytest
from threadruns import run_together

from kvstore.trie.content import ContentIndex

pytestmark = pytest.mark.native

HERE = b"h" * 32


class Readers:
    """What each of two readers found, of blocks that are always there (`kept`) and of others that come and go."""

    def __init__(self, index: ContentIndex, kept: np.ndarray, moving: np.ndarray) -> None:
        self.index, self.kept, self.moving = index, kept, moving
        self.done = threading.Event()
        self.failures: list[str] = []
        self.changed = threading.Condition()
        self.seen: list[dict[bool, int]] = [{False: 0, True: 0} for _ in range(2)]

    def read(self, seat: int) -> None:
        order = np.random.default_rng(seat)
        whole = [(64 + k * 64, 64, k + 1, k * 64) for k in range(len(self.kept))]
        try:
            while not self.done.is_set() or sum(self.seen[seat].values()) < 200:
                block = self.moving[int(order.integers(len(self.moving)))]
                spans = self.index.find(HERE, np.concatenate([block, self.kept.ravel()]), exclude=[10**9])
                if [(x.start, x.length, x.record, x.run) for x in spans if x.record <= 20] != whole:
                    self.failures.append(f"kept: {spans}")
                passing = [x for x in spans if x.record > 20]
                if [(x.start, x.length, x.donor_start, x.run) for x in passing] not in ([], [(0, 64, 0, 0)]):
                    self.failures.append(f"moving: {passing}")
                for span in passing:
                    with contextlib.suppress(KeyError):  # removed meanwhile
                        if self.index.tokens(span.record).tolist() != block.tolist():
                            self.failures.append(f"tokens of {span.record}")
                with self.changed:
                    self.seen[seat][bool(passing)] += 1
                    self.changed.notify_all()
        finally:
            with self.changed:
                self.done.set()
                self.changed.notify_all()

    def wait_until_all_saw(self, there: bool) -> None:
        """Returns when every reader has found a block that comes and goes there, or gone."""
        with self.changed:
            self.changed.wait_for(lambda: self.done.is_set() or all(seen[there] for seen in self.seen))


def write(index: ContentIndex, readers: Readers) -> None:
    """Inserts all that comes and goes, half of it at once, and removes it, six times."""
    record, half = 100, len(readers.moving) // 2
    rest = readers.moving[half:]
    zeros, counts = np.zeros(len(rest), np.uint32), np.full(len(rest), 64, np.uint32)
    try:
        for _ in range(6):
            first = record
            readers.wait_until_all_saw(there=False)
            for block in readers.moving[:half]:
                index.insert(HERE, record, 0, block)
                record += 1
            records = np.arange(record, record + len(rest), dtype=np.uint64)
            index.insert_many([HERE], zeros, records, np.zeros(len(rest), np.uint64), counts, rest.ravel())
            record += len(rest)
            readers.wait_until_all_saw(there=True)
            for old in range(first, record):
                if not index.remove(old):
                    readers.failures.append(f"{old} was not there")
    finally:
        readers.done.set()


def test_readers_beside_a_writer_see_whole_operations() -> None:
    """Kept blocks are always found whole; those that come and go whole or not at all, with rebuilds between."""
    rng = np.random.default_rng(0)
    index = ContentIndex(seed=0)
    kept = rng.integers(0, 50_000, (20, 64), dtype=np.uint32)
    for record, block in enumerate(kept, 1):
        index.insert(HERE, record, record - 1, block)
    readers = Readers(index, kept, rng.integers(50_000, 100_000, (1_500, 64), dtype=np.uint32))
    run_together(partial(readers.read, 0), partial(readers.read, 1), partial(write, index, readers))
    assert readers.failures == []
    assert min(count for seen in readers.seen for count in seen.values()) > 0
    assert index.stats()["records"] == 20


def test_writers_beside_each_other_lose_nothing() -> None:
    index = ContentIndex(seed=0)
    blocks = np.random.default_rng(0).integers(0, 50_000, (2_000, 64), dtype=np.uint32)

    def write(seat: int) -> None:
        for record in range(seat, 2_000, 4):
            index.insert(bytes([record % 8]) * 32, record + 1, 0, blocks[record])
            if record % 3 == 0:
                index.remove(record + 1)

    run_together(*(partial(write, seat) for seat in range(4)))
    stats = index.stats()
    assert stats["namespaces"] == 8
    assert stats["records"] == sum(record % 3 != 0 for record in range(2_000))
    for record in range(0, 2_000, 37):
        spans = index.find(bytes([record % 8]) * 32, blocks[record])
        assert [x.record for x in spans] == ([record + 1] if record % 3 else [])
