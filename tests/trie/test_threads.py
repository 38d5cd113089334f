"""Readers that run beside a writer see the trie as it was before or after each operation, never in
between."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from threadruns import run_together

from kvstore.trie._trie import Trie

pytestmark = pytest.mark.native

BLOCK = 16


class Readers:
    """Three of them. `kept` is pinned; branches, each off some token of it, come and go."""

    def __init__(self, trie: Trie, kept: np.ndarray, branches: list[np.ndarray]) -> None:
        self.trie, self.kept, self.branches = trie, kept, branches
        self.done = threading.Event()
        self.failures: list[str] = []

    def read(self, seat: int) -> None:
        order, looked = np.random.default_rng(seat), 0
        while not self.done.is_set() or looked < 200:
            depth, bits, records, _ = self.trie.match(0, self.kept, seat == 0)
            if (depth, bits) != (len(self.kept), float(len(self.kept))) or records.tolist() != list(range(1, 41)):
                self.failures.append(f"pinned path: {depth} {bits} {records}")
            self.look_at(self.branches[int(order.integers(len(self.branches)))])
            looked += 1

    def look_at(self, branch: np.ndarray) -> None:
        depth, bits, records, _ = self.trie.match(0, branch, False)
        if bits != pytest.approx(depth) or len(records) != -(-depth // BLOCK):
            self.failures.append(f"branch: {depth} {bits} {records}")
        if self.trie.longest_prefix(0, branch) > len(branch):
            self.failures.append("longer than the query")
        for record in records.tolist():
            try:
                path = self.trie.path(record)[1]
            except KeyError:
                continue  # evicted meanwhile, or a hole
            shared = min(len(path), depth)
            if path[:shared].tolist() != branch[:shared].tolist():
                self.failures.append(f"path of {record}")


def write(trie: Trie, readers: Readers) -> None:
    """Six rounds over all branches: inserted, and in every other round evicted and erased."""
    record = 100
    try:
        for turn in range(6):
            for branch in readers.branches:
                depth = trie.longest_prefix(0, branch) // BLOCK * BLOCK
                ends = sorted({*range(depth + BLOCK, len(branch) + 1, BLOCK), len(branch)})
                ids = list(range(record, record + len(ends)))
                record += len(ends)
                trie.insert(0, branch, 1.0, np.array(ends, np.uint32), np.array(ids, np.uint64))
                if turn % 2:
                    trie.evict()
                    trie.erase(0, branch)
            trie.compact()
    finally:
        readers.done.set()


def test_readers_beside_a_writer_see_whole_operations() -> None:
    rng = np.random.default_rng(0)
    trie = Trie(BLOCK)
    trie.new_root()
    kept = rng.integers(0, 50, 40 * BLOCK, dtype=np.uint32)
    ends = np.arange(BLOCK, len(kept) + 1, BLOCK, dtype=np.uint32)
    trie.insert(0, kept, 1.0, ends, np.arange(1, 41, dtype=np.uint64))
    trie.pin(0, kept, 1)
    branches = []
    for _ in range(300):  # each branches off at some token of the pinned path
        at = int(rng.integers(1, len(kept)))
        branches.append(np.concatenate([kept[:at], rng.integers(50, 60, 3 * BLOCK, dtype=np.uint32)]))
    readers = Readers(trie, kept, branches)
    run_together(*(partial(readers.read, seat) for seat in range(3)), partial(write, trie, readers))
    assert readers.failures == []
    while trie.evict() is not None:
        pass
    assert trie.longest_prefix(0, kept) == len(kept)
    assert trie.stats()["records"] == 40
