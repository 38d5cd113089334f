"""Readers that run beside a writer see the content index as it was before or after each operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.trie.content import ContentIndex

pytestmark = pytest.mark.native

HERE = b"h" * 32


def test_readers_beside_a_writer_see_whole_operations() -> None:
    """Kept blocks are always found whole; those that come and go whole or not at all, with rebuilds between."""
    rng = np.random.default_rng(0)
    index = ContentIndex(seed=0)
    kept = rng.integers(0, 50_000, (20, 64), dtype=np.uint32)
    for record, block in enumerate(kept, 1):
        index.insert(HERE, record, record - 1, block)
    moving = rng.integers(50_000, 100_000, (1_500, 64), dtype=np.uint32)
    done = threading.Event()
    failures: list[str] = []
    looked, gone_seen, there_seen = [0, 0], [0, 0], [0, 0]

    def read(seat: int) -> None:
        order = np.random.default_rng(seat)
        while not done.is_set() or looked[seat] < 200:
            i = int(order.integers(len(moving)))
            spans = index.find(HERE, np.concatenate([moving[i], kept.ravel()]), exclude=[10**9])
            if [(x.start, x.length, x.record, x.run) for x in spans if x.record <= 20] != [
                (64 + k * 64, 64, k + 1, k * 64) for k in range(20)
            ]:
                failures.append(f"kept: {spans}")
            passing = [(x.start, x.length, x.donor_start, x.run) for x in spans if x.record > 20]
            if passing not in ([], [(0, 64, 0, 0)]):
                failures.append(f"moving: {passing}")
            (there_seen if passing else gone_seen)[seat] += 1
            for span in spans:
                if span.record > 20:
                    try:
                        found = index.tokens(span.record)
                    except KeyError:
                        continue  # removed meanwhile
                    if found.tolist() != moving[i].tolist():
                        failures.append(f"tokens of {span.record}")
            looked[seat] += 1

    def wait_until(seen: Callable[[], bool]) -> None:
        """Until every reader has seen what there is to see now."""
        deadline = time.monotonic() + 120
        while not seen():
            assert time.monotonic() < deadline, "the readers hang"
            time.sleep(0.001)

    def write() -> None:
        try:
            record = 100
            for _ in range(6):
                first = record
                wait_until(lambda: all(gone_seen))
                half = len(moving) // 2
                for block in moving[:half]:
                    index.insert(HERE, record, 0, block)
                    record += 1
                rest = moving[half:]
                records = np.arange(record, record + len(rest), dtype=np.uint64)
                zeros, counts = np.zeros(len(rest), np.uint32), np.full(len(rest), 64, np.uint32)
                index.insert_many([HERE], zeros, records, np.zeros(len(rest), np.uint64), counts, rest.ravel())
                record += len(rest)
                wait_until(lambda: all(there_seen))
                for old in range(first, record):
                    if not index.remove(old):
                        failures.append(f"{old} was not there")
        finally:
            done.set()

    threads = [threading.Thread(target=read, args=(seat,)) for seat in range(2)] + [threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert min(*gone_seen, *there_seen) > 0
    assert index.stats()["records"] == 20


def test_writers_beside_each_other_lose_nothing() -> None:
    index = ContentIndex(seed=0)
    blocks = np.random.default_rng(0).integers(0, 50_000, (2_000, 64), dtype=np.uint32)

    def write(seat: int) -> None:
        for record in range(seat, 2_000, 4):
            index.insert(bytes([record % 8]) * 32, record + 1, 0, blocks[record])
            if record % 3 == 0:
                index.remove(record + 1)

    threads = [threading.Thread(target=write, args=(seat,)) for seat in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    stats = index.stats()
    assert stats["namespaces"] == 8
    assert stats["records"] == sum(record % 3 != 0 for record in range(2_000))
    for record in range(0, 2_000, 37):
        spans = index.find(bytes([record % 8]) * 32, blocks[record])
        assert [x.record for x in spans] == ([record + 1] if record % 3 else [])
