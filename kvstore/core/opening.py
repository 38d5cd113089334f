"""How a store is opened: on a thread that no interrupt reaches, for an object that may be gone when it is done."""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvstore.core.ending import Ending
from kvstore.core.workers import Task

T = TypeVar("T")


class Opening(Generic[T]):
    """Opens one store for `owner`, whole or not at all, whatever happens to the thread that waits for it.

    An interrupt of that thread ends its wait alone. The opening goes on; when it is done and nobody refers to `owner`
    any more, or it was given up, the store is closed again. Thread-safe.

    Args:
        owner: the object that is to have the store; it is not kept alive.
        place: the folder of the store, for `wait_for_given_up`.
        call: opens the store; returns what was opened, and what closes it. Must not refer to `owner`.
    """

    def __init__(self, owner: object, place: str, call: Callable[[], tuple[T, Ending]]) -> None:
        self.place = place
        self.pid = os.getpid()
        self._owner = weakref.ref(owner)
        self._call = call
        self._given_up = False
        self._ending: Ending | None = None
        self._task: Task[tuple[T, Ending]] = Task(self._open)
        self._taken = threading.Lock()  # held from when a thread has begun
        _openings[id(self)] = self

    def result(self) -> tuple[T, Ending]:
        """Open the store and return what `call` returned.

        Raises:
            What `call` raised.
        """
        _thread.start_new_thread(self._start, ())  # one call into C: the thread is there, or it is not
        return self._task.result()

    def give_up(self) -> None:
        """Nobody wants the store any more: it is closed, now or as soon as it is open. Returns at once."""
        self._given_up = True
        self._close_unwanted()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants the store any more."""
        return self._given_up or self._owner() is None

    def finish(self) -> None:
        """Return when the opening, which was given up, is over."""
        self._task.cancel()  # if it was not begun
        _thread.start_new_thread(self._start, ())
        self._task.is_done(-1)

    def _start(self) -> None:
        """On a thread that `threading` does not know: nothing but this can begin a thread and not be interrupted."""
        if not self._taken.acquire(blocking=False):
            return
        thread = threading.Thread(target=self._work, name="kvstore-open", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives the process no further thread
            self._work()

    def _work(self) -> None:
        self._task()
        _openings.pop(id(self), None)

    def _open(self) -> tuple[T, Ending]:
        opened, ending = self._call()
        self._ending = ending
        owner = self._owner()
        if owner is not None:
            ending.watch(owner)
        self._close_unwanted()
        return opened, ending

    def _close_unwanted(self) -> None:
        ending = self._ending  # set before it is looked whether the store is wanted, which `give_up` does the other way
        if ending is not None and self.is_given_up:
            ending.give_up()


_openings: dict[int, Opening[Any]] = {}  # that are under way; in a forked child also those of its parents


def wait_for_given_up(place: str) -> None:
    """Wait for the end of openings of this folder that were interrupted, so that it can be opened again."""
    for opening in list(_openings.values()):
        if opening.place == place and opening.pid == os.getpid() and opening.is_given_up:
            opening.finish()
