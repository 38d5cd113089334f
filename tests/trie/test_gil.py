from __future__ import annotations

import threading

import numpy as np

from kvstore.trie import TrieIndex
from tests.helpers.gil import gives_gil, keeps_gil

BLOCK, NAMESPACE = 64, bytes(32)


def filled(tokens: int) -> tuple[TrieIndex, np.ndarray]:
    index, path = TrieIndex(BLOCK), np.arange(tokens, dtype=np.uint32)
    ends = np.arange(BLOCK, tokens + 1, BLOCK, dtype=np.uint32)
    index.insert(NAMESPACE, path, ends, np.arange(1, len(ends) + 1, dtype=np.uint64))
    return index, path


def test_brief_calls_keep_the_gil() -> None:
    index, path = filled(1024)
    for call in (
        lambda: 3 in index,
        lambda: index.match(NAMESPACE, path),
        lambda: index.touch(NAMESPACE, path),
        lambda: index.path(3),
        lambda: index.leaf(16),
        lambda: index.stats(),
    ):
        assert keeps_gil(call)


def test_calls_that_may_take_long_give_the_gil_away() -> None:
    index, path = filled(1 << 17)
    assert gives_gil(lambda: index.match(NAMESPACE, path))


def test_brief_calls_beside_long_ones_find_the_same() -> None:
    """Brief calls that would wait for a long one give the GIL away, so that it can end."""
    index, path = filled(1 << 17)
    over = threading.Event()

    def match() -> None:
        while not over.is_set():
            index.match(NAMESPACE, path)

    threads = [threading.Thread(target=match) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            assert index.match(NAMESPACE, path[:BLOCK]).records.tolist() == [1]
            index.touch(NAMESPACE, path[: 2 * BLOCK])
            assert 2048 in index
            assert 2049 not in index
    finally:
        over.set()
        for thread in threads:
            thread.join()
