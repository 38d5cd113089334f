"""A future that was waited for and interrupted is as good as before, for whoever brings its result, too."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from interrupts import Boom, Interrupt
from threadruns import HANGS_S

from kvstore.core.futures import SafeFuture
from kvstore.core.waiting import Flag


def interrupted(make: Callable[[], Callable[[], object]], check: Callable[[str], None]) -> None:
    """Interrupts a call at each of its places, and checks what is left."""
    counted = Interrupt()
    with suppress(TimeoutError):
        counted.run(make())
    assert counted.passed > 5
    for at in range(1, counted.passed + 1):
        interrupt = Interrupt(at)
        with suppress(Boom, TimeoutError):
            interrupt.run(make())
        check(interrupt.where)


def test_an_interrupt_of_a_wait_keeps_nobody_from_bringing_the_result() -> None:
    futures: list[SafeFuture[int]] = []

    def make() -> Callable[[], object]:
        futures.append(SafeFuture())
        return lambda: futures[-1].result(1e-3)

    def check(where: str) -> None:
        brings = threading.Thread(target=futures[-1].set_result, args=(5,), daemon=True)
        brings.start()
        brings.join(HANGS_S)
        assert not brings.is_alive(), where
        assert futures[-1].result(0) == 5

    interrupted(make, check)


def test_an_interrupt_of_a_flag_keeps_nobody_from_setting_it() -> None:
    flag = Flag()

    def check(where: str) -> None:
        sets = threading.Thread(target=flag.set, daemon=True)
        sets.start()
        sets.join(HANGS_S)
        assert not sets.is_alive(), where
        assert flag.wait(HANGS_S)
        flag.clear()

    interrupted(lambda: lambda: (flag.wait(1e-3), flag.set()), check)


def test_it_is_a_future_like_others() -> None:
    late, failed, cancelled, good = (SafeFuture[int]() for _ in range(4))
    with pytest.raises(TimeoutError):
        late.result(1e-3)
    with pytest.raises(TimeoutError):
        late.exception(0)
    failed.set_exception(KeyError("no"))
    assert isinstance(failed.exception(), KeyError)
    with pytest.raises(KeyError):
        failed.result()
    assert cancelled.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        cancelled.result()
    timer = threading.Timer(0.02, good.set_result, (7,))
    timer.start()
    assert good.result(HANGS_S) == 7
    assert good.exception() is None
    done, waiting = concurrent.futures.wait([late, failed, good], 0)
    assert (done, waiting) == ({failed, good}, {late})
    timer.join()
