"""Processes that share a store, and do what a test tells them over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import small_stores
from small_stores import tokens_of
from threadruns import HANGS_S

from kvstore import SharedKVStore


class Child:
    """A process with the store open. `ask` makes one call there."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self.process = forked.process(_serve, theirs, str(folder), changes)
        theirs.close()

    def ask(self, call: str, *arguments: Any) -> Any:
        self.begin(call, *arguments)
        return self.answer()

    def begin(self, call: str, *arguments: Any) -> None:
        self._pipe.send((call, arguments))

    def answer(self) -> Any:
        if not self._pipe.poll(HANGS_S):
            raise TimeoutError("the process does not answer")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(HANGS_S)

    def end(self) -> None:
        if self.process.is_alive():
            self.kill()
        self._pipe.close()


@contextmanager
def children(folder: Path, count: int, **changes: Any) -> Iterator[list[Child]]:
    """So many processes that share the store in a folder, of which the first owns it; whatever is added to the list is
    ended, too."""
    found = list[Child]()
    try:
        for _ in range(count):
            found.append(Child(folder, changes))
            assert found[-1].ask("owns") == (len(found) == 1)  # once it is open
        yield found
    finally:
        for child in found:
            child.end()


def owner_of(found: list[Child]) -> Child:
    """The one that owns the store, after each has been asked."""
    owners = [child for child in found if child.ask("owns")]
    assert len(owners) == 1, f"{len(owners)} processes own the store"
    return owners[0]


def _serve(pipe: Any, folder: str, changes: dict[str, Any]) -> None:
    store = SharedKVStore(folder, small_stores.identity(), small_stores.config(**changes), wait_s=HANGS_S)
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", _CALLS[call](store, *arguments)))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))


def _put(store: Any, number: int, count: int) -> int:
    """How many blocks were new."""
    return int(small_stores.put(store, tokens_of(number, count)).new_blocks)


def _get(store: Any, number: int, count: int) -> int:
    """How many tokens a get returns, after it was compared bit by bit."""
    return small_stores.stored(store, tokens_of(number, count))


def _fork(store: Any) -> str:
    """What a put raises in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _put(store, 7, 4)
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


def _fork_and_stay(store: Any) -> int:
    """A child that does nothing, for a minute."""
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    return pid


_CALLS: dict[str, Callable[..., Any]] = {
    "put": _put,
    "get": _get,
    "fork": _fork,
    "fork and stay": _fork_and_stay,
    "owns": lambda store: store.owns,
    "flush": lambda store: store.flush().dropped_blocks,
    "close": lambda store: store.close().dropped_blocks,
    "check": lambda store: store.check(True).problems,
    "delete": lambda store, number, count: store.delete(tokens_of(number, count)),
}
