from __future__ import annotations

import threading

import pytest

from kvstore.core.workers import Workers


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
