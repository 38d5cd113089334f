"""Work of the program's threads outside of calls, when the program ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.core import late_work
from kvstore.errors import StoreClosed


@pytest.fixture(autouse=True)
def goes_on() -> Iterator[None]:
    yield
    late_work._over = False


def test_the_end_waits_for_what_is_under_way_and_lets_nothing_begin() -> None:
    begun, go, done, errors = threading.Event(), threading.Event(), list[int](), list[BaseException]()

    def work() -> None:
        begun.set()
        go.wait()
        done.append(1)

    def late() -> None:
        try:
            late_work.run(done.append, 2)
        except StoreClosed as error:
            errors.append(error)

    worker = threading.Thread(target=late_work.run, args=(work,))
    worker.start()
    begun.wait()
    ending = threading.Thread(target=late_work.end, args=(60.0,))
    ending.start()
    ending.join(0.05)
    assert ending.is_alive()
    go.set()
    ending.join()
    assert done == [1]
    other = threading.Thread(target=late)
    other.start()
    other.join()
    assert done == [1]
    assert "the program is ending" in str(errors[0])
    late_work.run(done.append, 3)  # the main thread still may
    assert done == [1, 3]
    worker.join()
    assert late_work._running == {}


def test_the_end_waits_no_longer_than_it_may() -> None:
    go, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait()

    worker = threading.Thread(target=late_work.run, args=(work,))
    worker.start()
    begun.wait()
    late_work.end(0.01)
    assert worker.is_alive()
    go.set()
    worker.join()


def test_a_daemon_that_is_refused_waits_for_the_end_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would drop tensors otherwise, in the middle of which Python must not end it. It does not hold up the end."""
    slept, go, errors = threading.Event(), threading.Event(), list[BaseException]()
    rests = list[float]()

    def sleep(seconds: float) -> None:
        rests.append(seconds)
        slept.set()
        go.wait()

    def late() -> None:
        try:
            late_work.run(errors.clear)
        except StoreClosed as error:
            errors.append(error)

    monkeypatch.setattr(late_work.time, "sleep", sleep)
    late_work.end(0.0)
    daemon = threading.Thread(target=late, daemon=True)
    daemon.start()
    slept.wait()
    late_work.end(60.0)  # returns at once: nothing is under way
    assert rests == [late_work._REST_S]
    assert errors == []
    go.set()  # an exit handler may wait for the thread: it goes on in the end
    daemon.join()
    assert "the program is ending" in str(errors[0])
