"""A real store is driven through every transition of the table in `kvstore.residency.states`, and through no other."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import small_stores
from faultfs import Fault, FaultFS
from threadruns import HANGS_S

from kvstore import KVStore
from kvstore.core.explanation import Reason
from kvstore.residency.states import ALLOWED, TRANSITIONS, State

TOKENS = small_stores.tokens_of(1, 30)
Steps = set[tuple[State, State]]


class Driven:
    """A store, the disk of which can be held up or broken, and what was seen of its records."""

    def __init__(self, store: KVStore, fs: FaultFS, goes_on: threading.Event) -> None:
        self.store, self.fs, self.goes_on = store, fs, goes_on
        self.residency: Any = store._residency

    def put(self, count: int, **options: Any) -> list[int]:
        """Puts the first tokens; returns the records of the sequence."""
        small_stores.put(self.store, TOKENS[:count], **options)
        records: list[int] = self.match(count)
        return records

    def match(self, count: int) -> list[int]:
        root = self.store._digest(b"")
        return [r for r in self.residency.index.match(root, TOKENS[:count], touch=False).records.tolist() if r]

    def break_disk(self) -> None:
        self.fs.fault = Fault("pwritev", 1, errno.EIO, sticky=True)

    def state(self, record: int) -> State:
        """Without the disk's write lock, which a write that is held up has: so in a look of its own."""
        checker: Any = self.store._engine.checker(self.store._calls)
        if self.goes_on.is_set():
            found: State = checker.state_of(record)
            return found
        disk = self.residency.disk
        census = self.residency.census()
        if record in census.replaced:
            return State.REPLACED
        if record in census.queued:
            return State.QUEUED
        return State.DURABLE if disk.holds(record) else State.GONE


@contextmanager
def driven(**settings: Any) -> Iterator[Driven]:
    goes_on = threading.Event()
    goes_on.set()
    fs = FaultFS(before=lambda call: goes_on.wait(HANGS_S) if call == "pwritev" else None)
    with (
        small_stores.scratch() as folder,
        KVStore(folder / "store", small_stores.IDENTITY, small_stores.config(**settings), fs=fs) as store,
    ):
        try:
            yield Driven(store, fs, goes_on)
        finally:
            fs.fault = None
            goes_on.set()


def test_every_transition_happens_and_no_other() -> None:
    seen: Steps = set()
    for drive in (_written, _not_written, _no_disk, _replaced, _replaced_while_queued, _evicted, _given_up):
        for path in drive():
            seen |= set(pairwise(path))
    assert seen == {(before, after) for before, followers in TRANSITIONS.items() for after in followers}


def test_every_state_is_in_the_tables() -> None:
    assert set(TRANSITIONS) == set(ALLOWED) == set(State)


def _written() -> Iterator[list[State]]:
    with driven() as at:
        at.goes_on.clear()
        (record,) = at.put(4)
        path = [at.state(record)]
        at.goes_on.set()
        at.store.flush()
        path.append(at.state(record))
        at.store.delete(TOKENS[:4])
        yield [*path, at.state(record)]


def _not_written() -> Iterator[list[State]]:
    for host in (1 << 20, 0):
        with driven(host=host) as at:
            at.goes_on.clear()
            at.break_disk()
            (record,) = at.put(4)
            path = [at.state(record)]
            at.goes_on.set()
            at.store.flush()
            path.append(at.state(record))
            if host:
                at.store.delete(TOKENS[:4])
                path.append(at.state(record))
            yield path
    with driven() as at:  # and it is put again
        at.break_disk()
        (record,) = at.put(4)
        at.store.flush()
        path = [at.state(record)]
        at.fs.fault = None
        at.goes_on.clear()
        assert at.put(4) != [record]
        path.append(at.state(record))
        at.goes_on.set()
        at.store.flush()
        yield [*path, at.state(record)]


def _no_disk() -> Iterator[list[State]]:
    with small_stores.scratch() as folder:
        with KVStore(folder / "store", small_stores.IDENTITY, small_stores.config(disk=0)) as store:
            at = Driven(store, FaultFS(), threading.Event())
            at.goes_on.set()
            ready = threading.Event()
            add = at.residency.host.add
            at.residency.host.add = lambda *args: ready.wait(HANGS_S) and add(*args)
            (record,) = at.put(4)
            path = [at.state(record)]
            ready.set()
            store.flush()
            path.append(at.state(record))
            store.delete(TOKENS[:4])
            yield [*path, at.state(record)]


def _replaced() -> Iterator[list[State]]:
    with driven() as at:
        _, tail = at.put(6)
        at.store.flush()
        path = [at.state(tail)]
        at.goes_on.clear()
        at.put(7)
        path.append(at.state(tail))
        at.goes_on.set()
        at.store.flush()
        yield [*path, at.state(tail)]
    with driven() as at:  # and what was to replace it leaves
        _, tail = at.put(6)
        at.store.flush()
        at.break_disk()
        newer = at.put(7)[-1]
        at.store.flush()
        path = [at.state(tail)]
        gone = at.residency.forget([newer], Reason.DELETED)
        assert gone == [tail, newer]
        path.append(at.state(tail))
        at.residency.disk.remove(gone)
        yield [*path, at.state(tail)]


def _replaced_while_queued() -> Iterator[list[State]]:
    with driven() as at:
        at.goes_on.clear()
        _, tail = at.put(6)
        path = [at.state(tail)]
        at.put(7)
        path.append(at.state(tail))
        at.goes_on.set()
        at.store.flush()
        yield [*path, at.state(tail)]


def _evicted() -> Iterator[list[State]]:
    with driven() as at:
        (record,) = at.put(4)
        at.store.flush()
        path = [at.state(record)]
        assert at.residency.evict() == [record]
        path.append(at.state(record))
        at.residency.disk.remove([record])
        yield [*path, at.state(record)]


def _given_up() -> Iterator[list[State]]:
    """A tail whose replacement left memory before it was written goes with the next eviction."""
    with driven(host=0) as at:
        _, tail = at.put(6)
        at.store.flush()
        at.break_disk()
        at.put(7)
        at.store.flush()
        at.fs.fault = None
        path = [at.state(tail)]
        assert at.store.check().ok
        assert at.residency.evict()[0] == tail
        path.append(at.state(tail))
        at.residency.disk.remove([tail])
        yield [*path, at.state(tail)]
