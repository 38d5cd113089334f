"""An interrupt anywhere in a call: nothing stays held, nothing is counted wrong, and what was flushed is there."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeds
from interrupts import Boom, Interrupt
from length import FULL
from small_stores import config, identity, kv_of, put, scratch, stored, tokens_of
from threadruns import HANGS_S

from kvstore import KVStore
from kvstore.core.guard import Guard

TRIALS = 5_000 if FULL else 80
A_LIFE = 25  # trials of one store

Call = Callable[[], Any]


class Life:
    """One store, and what must be there because it was flushed."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.path = path
        self.rng = rng
        self.settings: dict[str, Any] = {
            "host": rng.choice((0, 1 << 16)),
            "device": rng.choice((0, 1 << 14)),
            "disk": 1 << 22,
            "eviction": rng.choice(("lru", "lru", "lfu", "s3fifo")),
        }
        self.next = 1
        self.flushed: dict[int, int] = {}
        self.store = self.open()

    def open(self) -> KVStore:
        return KVStore(self.path, identity(), config(**self.settings))

    def fresh(self) -> np.ndarray:
        self.next += 1
        return tokens_of(self.next, self.rng.randint(5, 40))

    def known(self) -> np.ndarray:
        number = self.rng.choice(list(self.flushed) or [1])
        return tokens_of(number, self.flushed.get(number, 10))

    def calls(self) -> dict[str, Call]:
        """By name: a call that is interrupted."""
        store, fresh, known = self.store, self.fresh(), self.known()
        self.victim = self.fresh()
        longer = np.concatenate([known, fresh])
        session = store.session(f"s{self.rng.randint(0, 3)}")
        return {
            "put": lambda: put(store, fresh, ttl=self.rng.choice((None, None, 1000.0))),
            "put more": lambda: put(store, longer),
            "put pinned": lambda: put(store, fresh, pin=True),
            "get": lambda: store.get(known),
            "get more": lambda: store.get(longer),
            "flush": store.flush,
            "delete": lambda: store.delete(self.victim),
            "save": lambda: session.save(fresh, kv_of(fresh)),
            "resume": session.resume,
            "forget": session.delete,
            "prefetch": lambda: store.prefetch(known).result(),
            "unpin": lambda: store.unpin(self.victim),
            "stats": store.stats,
            "close": store.close,
        }

    def settle(self, number: int) -> None:
        """A sequence that is flushed, to be found whatever is interrupted afterwards."""
        tokens = tokens_of(number, 20)
        put(self.store, tokens)
        self.store.flush()
        self.flushed[number] = 20

    def trial(self) -> bool:
        """Interrupts one call, if it is long enough: whether it was."""
        calls = self.calls()
        name = self.rng.choice(list(calls))
        call = calls[name]
        if name in ("delete", "unpin"):
            put(self.store, self.victim, pin=name == "unpin")
        interrupt = Interrupt(at=int(self.rng.expovariate(1 / 150)) + 1)
        with suppress(Boom):
            interrupt.run(call)
        self.is_well(f"{name}, interrupted at {interrupt.where or 'no place'}")
        return bool(interrupt.where)

    def is_well(self, what: str) -> None:
        """The store agrees with itself, still works, and has all that was flushed."""
        if self.store._calls._closed:
            self.store.close()  # what was interrupted ends now
            self.store = self.open()
        assert self.store.check().problems == (), what
        tokens = self.fresh()
        put(self.store, tokens)
        assert stored(self.store, tokens) == len(tokens), what
        assert self.store.flush().dropped_blocks == 0, what
        assert self.store.stats()["queue"] == {"bytes": 0, "records": 0}, what
        for number, count in self.flushed.items():
            assert stored(self.store, tokens_of(number, count)) == count, what

    def end(self) -> None:
        self.store.close()
        with self.open() as store:
            assert store.check(deep=True).problems == ()
            for number, count in self.flushed.items():
                assert stored(store, tokens_of(number, count)) == count


@pytest.mark.faults
@pytest.mark.parametrize("life", range(TRIALS // A_LIFE))
def test_an_interrupt_leaves_a_healthy_store(life: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "enforced", False)  # the assertions are made in Python, which can be interrupted
    rng = random.Random(seeds.of("interrupts", life))
    with scratch() as path:
        one = Life(path, rng)
        one.settle(900_001)
        one.settle(900_002)
        interrupted = sum(one.trial() for _ in range(A_LIFE))
        one.end()
        assert interrupted >= A_LIFE // 3


def _own() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvstore")}


def _left(before: set[threading.Thread]) -> list[str]:
    """Threads of stores beyond those before. One that has opened or closed a store says so a moment before it ends."""
    for thread in _own() - before:
        thread.join(HANGS_S)
    return sorted(thread.name for thread in _own() - before)


def _descriptors(path: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += [target for target in [os.readlink(f"/proc/self/fd/{fd}")] if target.startswith(str(path))]
    return found


@pytest.mark.faults
@pytest.mark.parametrize("inside", [False, True])
def test_an_interrupt_of_the_opening_leaves_nothing_open(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """inside: the store is opened again while the interrupt is still handled."""
    monkeypatch.setattr(Guard, "enforced", False)
    with scratch() as path:

        def open_it() -> KVStore:
            return KVStore(path / "store", identity(), config(host=1 << 16))

        def again() -> None:
            with open_it() as store:
                assert stored(store, tokens_of(1, 20)) == 20
                assert store.check().problems == ()

        with open_it() as store:
            put(store, tokens_of(1, 20))
        before = _own()
        count = Interrupt()
        count.run(open_it).close()
        for at in range(1, 2 * count.passed):
            interrupt = Interrupt(at)
            try:
                interrupt.run(open_it).close()
                break
            except Boom:
                if inside:
                    again()
            again()
            assert (_left(before), _descriptors(path)) == ([], []), interrupt.where
        assert at > 40
        assert interrupt.where == ""  # every place was reached
