"""Readers that run beside a writer see the trie as it was before or after each operation, never in
between."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstore.trie._trie import Trie

pytestmark = pytest.mark.native

BLOCK = 16


def test_readers_beside_a_writer_see_whole_operations() -> None:
    rng = np.random.default_rng(0)
    trie = Trie(BLOCK)
    trie.new_root()
    kept = rng.integers(0, 50, 40 * BLOCK, dtype=np.uint32)
    trie.insert(
        0,
        kept,
        1.0,
        np.arange(BLOCK, len(kept) + 1, BLOCK, dtype=np.uint32),
        np.arange(1, 41, dtype=np.uint64),
    )
    trie.pin(0, kept, 1)
    branches = []
    for _ in range(300):  # each branches off at some token of the pinned path
        at = int(rng.integers(1, len(kept)))
        branches.append(np.concatenate([kept[:at], rng.integers(50, 60, 3 * BLOCK, dtype=np.uint32)]))
    done = threading.Event()
    failures: list[str] = []
    looked = [0, 0, 0]

    def read(seat: int) -> None:
        order = np.random.default_rng(seat)
        while not done.is_set() or looked[seat] < 200:
            depth, bits, records, _ = trie.match(0, kept, seat == 0)
            if (depth, bits) != (len(kept), float(len(kept))) or records.tolist() != list(range(1, 41)):
                failures.append(f"pinned path: {depth} {bits} {records}")
            branch = branches[int(order.integers(len(branches)))]
            depth, bits, records, _ = trie.match(0, branch, False)
            if bits != pytest.approx(depth) or len(records) != -(-depth // BLOCK):
                failures.append(f"branch: {depth} {bits} {records}")
            if trie.longest_prefix(0, branch) > len(branch):
                failures.append("longer than the query")
            for record in records.tolist():
                try:
                    path = trie.path(record)[1]
                except KeyError:
                    continue  # evicted meanwhile, or a hole
                shared = min(len(path), depth)
                if path[:shared].tolist() != branch[:shared].tolist():
                    failures.append(f"path of {record}")
            looked[seat] += 1

    def write() -> None:
        record = 100
        for turn in range(6):
            for branch in branches:
                depth = trie.longest_prefix(0, branch) // BLOCK * BLOCK
                ends = sorted({*range(depth + BLOCK, len(branch) + 1, BLOCK), len(branch)})
                ids = list(range(record, record + len(ends)))
                record += len(ends)
                trie.insert(0, branch, 1.0, np.array(ends, np.uint32), np.array(ids, np.uint64))
                if turn % 2:
                    trie.evict()
                    trie.erase(0, branch)
            trie.compact()
        done.set()

    threads = [threading.Thread(target=read, args=(seat,)) for seat in range(3)] + [threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    while trie.evict() is not None:
        pass
    assert trie.longest_prefix(0, kept) == len(kept)
    assert trie.stats()["records"] == 40
