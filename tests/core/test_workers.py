from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.workers import Workers


class Held:
    """Something that a call has while it fails."""


def fails(held: list[weakref.ref[Held]], _: object = None) -> None:
    mine = Held()
    held.append(weakref.ref(mine))
    raise KeyError


@pytest.fixture
def busy():
    """One thread that is in a call until the event is set."""
    workers, begun, end = Workers(1, "test"), threading.Event(), threading.Event()
    workers.start(lambda: (begun.set(), end.wait()))
    begun.wait()
    yield workers, end
    end.set()
    workers.close()


def test_shared_calls_return_in_order() -> None:
    workers = Workers(3, "test")
    assert workers.share(lambda n: n * n, range(100)) == [n * n for n in range(100)]
    assert workers.share(len, []) == []
    workers.close()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_shared_calls_are_made_on_as_many_threads_as_are_wanted(most: int) -> None:
    workers, lock, now, seen = Workers(3, "test"), threading.Lock(), [0], [0]

    def call(_: int) -> None:
        with lock:
            now[0] += 1
            seen[0] = max(seen[0], now[0])
        time.sleep(0.002)
        with lock:
            now[0] -= 1

    workers.share(call, range(20), most)
    assert 1 <= seen[0] <= most
    workers.close()


def test_shared_calls_wait_for_nothing_that_others_started(busy) -> None:
    workers, end = busy
    made: list[int] = []
    workers.start(lambda: made.append(0))
    assert workers.share(lambda n: n + 1, [1, 2, 3]) == [2, 3, 4]
    assert not end.is_set()
    assert not made


def test_shared_calls_come_before_what_is_queued(busy) -> None:
    workers, end = busy
    order: list[str] = []
    taken, helped = threading.Event(), threading.Event()
    workers.start(lambda: order.append("queued"))

    def call(name: str) -> None:
        if name == "first":  # the caller's own, which ends after the thread has made the other
            taken.set()
            helped.wait()
        else:
            helped.set()
        order.append(name)

    sharing = threading.Thread(target=workers.share, args=(call, ["first", "second"]))
    sharing.start()
    taken.wait()
    end.set()
    sharing.join()
    workers.run(order.append, "last")
    assert order.index("second") < order.index("queued")


def test_the_first_error_of_shared_calls_is_raised() -> None:
    workers = Workers(2, "test")
    with pytest.raises(ZeroDivisionError):
        workers.share(lambda n: 1 // n, [1, 0, 2])
    assert workers.share(abs, [-1, -2]) == [1, 2]
    workers.close()


def test_shared_calls_are_made_without_threads() -> None:
    assert Workers(0, "test").share(abs, [-1, -2]) == [1, 2]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda workers, call: workers.share(call, range(5)),
        lambda workers, call: workers.map(call, range(5)),
        lambda workers, call: workers.run(call),
        lambda workers, call: workers.submit(call).result(),
    ],
    ids=["share", "map", "run", "submit"],
)
@pytest.mark.usefixtures("no_collector")
def test_what_a_failed_call_had_goes_with_its_error(make: Callable[..., Any], threads: int) -> None:
    workers, held = Workers(threads, "test"), list[weakref.ref[Held]]()
    with pytest.raises(KeyError) as raised:
        make(workers, lambda *item: fails(held, *item))
    assert held
    del raised
    workers.close()  # all calls have ended
    assert [ref() for ref in held] == [None] * len(held)


def test_shared_calls_that_fail_end_before_the_error_is_raised() -> None:
    workers, here, begun, ended = Workers(1, "test"), threading.current_thread(), threading.Event(), list[int]()

    def call(item: int) -> None:
        if threading.current_thread() is here:
            begun.wait()
            raise KeyError
        begun.set()
        time.sleep(0.05)
        ended.append(item)

    with pytest.raises(KeyError):
        workers.share(call, [1, 2])
    assert len(ended) == 1
    workers.close()


def test_shared_calls_that_fail_do_not_wait_for_a_busy_thread(busy) -> None:
    workers, end = busy
    held: list[weakref.ref[Held]] = []
    with pytest.raises(KeyError):
        workers.share(lambda item: fails(held, item), [1, 2, 3])
    assert not end.is_set()
    end.set()
    workers.run(int)
    assert len(held) == 1  # the others are not made
