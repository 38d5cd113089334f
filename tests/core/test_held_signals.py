"""Signals that wait."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from kvstore.core.held_signals import HeldSignals


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signals that the program's own handler was called for."""
    found: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda number, _: found.append(number)) for number in numbers]
    yield found
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def send(number: int) -> None:
    signal.raise_signal(number)


def test_a_signal_waits(came: list[int]) -> None:
    with HeldSignals() as held:
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert (came, held.asked_to_end, held.in_a_hurry) == ([], True, False)
    assert came == [signal.SIGTERM, signal.SIGUSR1]
    send(signal.SIGTERM)
    assert len(came) == 3


def test_the_second_says_that_there_is_a_hurry_and_the_third_is_the_programs(came: list[int]) -> None:
    with HeldSignals() as held:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert (came, held.in_a_hurry) == ([], True)
        send(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    assert came == [signal.SIGTERM] * 2


def test_signals_that_ask_for_no_end_make_no_hurry(came: list[int]) -> None:
    with HeldSignals() as held:
        for _ in range(5):
            send(signal.SIGUSR1)
        assert (came, held.asked_to_end, held.in_a_hurry) == ([], False, False)
    assert came == [signal.SIGUSR1]


def test_handlers_are_there_again_after_an_error(came: list[int]) -> None:
    def fails() -> None:
        with HeldSignals():
            send(signal.SIGTERM)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    send(signal.SIGTERM)
    assert came == [signal.SIGTERM]  # that in the context is gone with the error


def test_another_thread_holds_nothing(came: list[int]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with HeldSignals():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert came == [signal.SIGTERM]
    leave.set()
    thread.join()
