"""Threads of a store's own, which work until the store is closed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from kvstore.core.futures import SafeFuture

S = TypeVar("S")
T = TypeVar("T")

# An interrupted caller waits so long for the calls that other threads make for it; a disk may never answer.
_END_S = 2.0


class _Here(threading.local):
    """Whether this thread is one of a store's own, which no interrupt of the program reaches."""

    is_own = False


_here = _Here()


class Task(Generic[T]):
    """One call that a thread of `Workers` makes, and its result.

    Whoever waits for it may be interrupted; the call goes on. It is made once, however often one thread takes it.

    What a call raises refers to the frames it passed, and so to all that the call had, such as what holds a segment.
    Nothing here leaves it in a circle of references: it goes as soon as whoever catches it lets it go.
    """

    def __init__(self, function: Callable[..., T], *arguments: Any) -> None:
        self._function: Callable[..., T] | None = function
        self._arguments = arguments
        self._value: T | None = None
        self._error: BaseException | None = None
        self._unwanted = False
        self._running = threading.Lock()  # held until the call has ended
        self._running.acquire()

    def __call__(self) -> None:
        """Make the call, unless it was made; on the thread that took the task."""
        if not self._running.locked():
            return
        try:
            if self._function is not None and not self._unwanted:
                self._value = self._function(*self._arguments)
        except BaseException as error:
            self._error = error
        finally:
            self._function, self._arguments = None, ()  # whoever keeps the task needs only its result
            self._running.release()
            del self  # or the error would refer to itself, by way of this frame

    def here(self) -> None:
        """Make the call on the thread that waits for it, where an interrupt may end it. What it raises is not kept."""
        try:
            if self._function is not None:
                self._value = self._function(*self._arguments)
        finally:
            self._function, self._arguments = None, ()
            self._running.release()

    def cancel(self) -> None:
        """Make no call if it has not begun."""
        self._unwanted = True

    @property
    def is_wanted(self) -> bool:
        """Whether the call is to be made, or was: it was not cancelled."""
        return not self._unwanted

    def is_done(self, timeout_s: float) -> bool:
        """Return whether the call has ended; wait so long for it, and without end if that is -1."""
        if not self._running.acquire(timeout=timeout_s):
            return False
        self._running.release()
        return True

    def result(self) -> T:
        """Wait for the end of the call; return what it returned, or raise what it raised."""
        with self._running:
            error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._value  # type: ignore[return-value]
        finally:
            del error  # see `__call__`


class Workers:
    """A fixed number of threads that make calls, the first come first. Thread-safe.

    The threads of `concurrent.futures` refuse work as soon as the main thread has ended, while a program's other
    threads, and what it registered with `atexit`, may still use a store. These work until they are closed; they start
    at once, because Python starts no thread any more when it ends.

    Example:
        >>> workers = Workers(2, "example")
        >>> workers.map(len, ["a", "bc"])
        [1, 2]
        >>> workers.close()
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._first: deque[Task[None]] = deque()  # comes before all in `_tasks`
        self._threads: list[threading.Thread] = []
        for number in range(count):
            # A daemon: Python waits for the other threads before it lets stores end themselves (`ending`).
            thread = threading.Thread(
                target=self._work, args=(self._tasks, self._first), name=f"{name}-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system gives the process no further thread
                self.close()
                raise
            self._threads.append(thread)

    def start(self, task: Callable[[], None]) -> None:
        """Let a thread call `task`, which must not raise; return at once. May be called by a finalizer."""
        self._tasks.put(task)

    @property
    def starter(self) -> Callable[[Any], None]:
        """What `start` does, as one call into C, which no interrupt can cut short."""
        return self._tasks.put

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` on one of the threads and wait; return or raise what it does.

        If the wait is interrupted, the call goes on to its end all the same. So what changes several things that
        belong together is done here: an interrupt hits the program's threads only. On a thread of a store's own
        `function` is called at once; so it is if there are no threads.
        """
        return function(*arguments) if _here.is_own or not self._threads else self.begin(function, *arguments).result()

    def begin(self, function: Callable[..., T], *arguments: Any) -> Task[T]:
        """What `run` does, but for the wait: `Task.result` of what is returned waits."""
        task = Task(function, *arguments)
        if _here.is_own or not self._threads:
            task()
        else:
            self.start(task)
        return task

    def map(self, function: Callable[..., T], *columns: Iterable[Any]) -> list[T]:
        """Call `function` for every row of the columns, and return the results in order.

        Raises:
            The first error; calls that had not begun are not made then. Nor are they where the wait is interrupted.
        """
        tasks = [Task(function, *row) for row in zip(*columns, strict=True)]
        try:
            for task in tasks:
                self.start(task)
            return [task.result() for task in tasks]
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    def share(self, function: Callable[[S], T], items: Iterable[S], most: int | None = None) -> list[T]:
        """Call `function` for every item, here and on the threads that are free, and return the results in order.

        most: so many threads at once, this one among them; None for all.

        What others started and has not begun comes later; so a caller never waits for it, however much that is.

        Raises:
            What a call here raised, or else the first error of the others. Then, and if the calls are interrupted,
            those that had not begun are not made, and those that had begun end first, unless they take seconds.
        """
        tasks = [Task(function, item) for item in items]
        waiting = deque(tasks)
        others = len(self._threads) if most is None else min(len(self._threads), most - 1)
        helpers = [Task(_make_all, waiting) for _ in range(min(others, len(tasks) - 1))]
        try:
            for helper in helpers:
                self._first.append(helper)
                self._tasks.put(_nothing)  # wakes a thread
            _make_all(waiting, Task.here)
            return [task.result() for task in tasks]
        except BaseException:
            waiting.clear()
            self._end(helpers)
            raise

    def _end(self, helpers: Iterable[Task[None]]) -> None:
        """Take back the helpers that no thread has taken, and wait for the others, which find nothing more to do."""
        end = time.monotonic() + _END_S
        for helper in helpers:
            try:
                self._first.remove(helper)
            except ValueError:
                helper.is_done(max(0.0, end - time.monotonic()))

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Let a thread call `function`; return a future of the result."""
        future = SafeFuture[T]()
        self.start(_Promise(future, function, arguments))
        return future

    def close(self, cancel: bool = False, timeout_s: float | None = None) -> None:
        """End the threads when they have made all calls. Idempotent; a thread of these may call it itself.

        Args:
            cancel: make only the calls that have begun, and cancel the futures of the others.
            timeout_s: wait no longer for them; a thread that is still in a call then ends with it.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if cancel:
            with contextlib.suppress(Empty):
                while True:
                    _cancel(self._tasks.get_nowait())
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if end is None else max(0.0, end - time.monotonic()))

    @staticmethod
    def _work(tasks: SimpleQueue[Callable[[], None] | None], first: deque[Task[None]]) -> None:
        _here.is_own = True
        while (task := tasks.get()) is not None:
            _make_all(first)
            task()
            task = None  # what it holds must not wait for the next one


def _make_all(waiting: deque[Any], make: Callable[[Any], None] = Task.__call__) -> None:
    """Makes the calls that wait, the first come first, until there is none; others may take some of them meanwhile."""
    while True:
        try:
            task = waiting.popleft()
        except IndexError:
            return
        make(task)
        del task  # what it raised refers to this frame


def _nothing() -> None:
    """Does nothing."""


class _Promise:
    """A task whose result goes into a future."""

    def __init__(self, future: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.future = future
        self._function = function
        self._arguments = arguments

    def __call__(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            value = self._function(*self._arguments)
        except BaseException as error:
            self.future.set_exception(error)
            del self  # as in `Task`
        else:
            self.future.set_result(value)


def _cancel(task: Callable[[], None] | None) -> None:
    future = getattr(task, "future", None)
    if future is not None:
        future.cancel()
