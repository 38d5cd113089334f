"""Calls of several threads, made one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from threadruns import HANGS_S

from kvstore.codecs.together import Together, _Call


def test_items_that_wait_are_worked_on_together_in_order() -> None:
    begun, go_on, seen = threading.Event(), threading.Event(), list[list[int]]()

    def work(items: Sequence[int]) -> list[int]:
        seen.append(list(items))
        begun.set()
        assert go_on.wait(HANGS_S)
        return [10 * item for item in items]

    together: Together[int, int] = Together(work, 3)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(together, 0)
        assert begun.wait(HANGS_S)
        others = [pool.submit(together, n) for n in range(1, 8)]
        while len(together._waiting) < 7:
            threading.Event().wait(0.001)
        go_on.set()
        assert first.result(HANGS_S) == 0
        assert [other.result(HANGS_S) for other in others] == [10 * n for n in range(1, 8)]
    assert seen[0] == [0]
    assert sorted(map(len, seen[1:])) == [1, 3, 3]
    assert sorted(n for items in seen for n in items) == list(range(8))


def test_each_thread_gets_its_own_error() -> None:
    def work(items: Sequence[int]) -> list[int]:
        for item in items:
            if item % 3 == 0:
                raise ValueError(f"no {item}")
        return [-item for item in items]

    together: Together[int, int] = Together(work, 16)

    def outcome(item: int) -> int | str:
        try:
            return together(item)
        except ValueError as error:
            return str(error)

    for _ in range(20):
        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(outcome, range(60)))
        assert found == [f"no {n}" if n % 3 == 0 else -n for n in range(60)]
    assert not together._waiting


def test_an_interrupt_leaves_nothing_behind() -> None:
    def work(items: Sequence[int]) -> list[int]:
        if items[0] == 1:
            raise KeyboardInterrupt
        return list(items)

    together: Together[int, int] = Together(work, 4)
    together._waiting.append(_Call(5))  # of a thread that is about to wait for its turn
    other = together._waiting[0]
    together._waiting.insert(0, _Call(1))
    with pytest.raises(KeyboardInterrupt):
        together(2)
    assert not together._waiting
    assert other.alone
    assert together(2) == 2
