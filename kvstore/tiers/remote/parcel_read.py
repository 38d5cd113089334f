"""Reads records that lie side by side in a parcel, by one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from kvstore.core.explanation import Reason
from kvstore.core.workers import Task
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.remote.spots import Spot

T = TypeVar("T")
ReadPart = Callable[[int, Sequence[memoryview]], "int | Reason"]


def neighbours(spots: Sequence[Spot | None]) -> Iterator[range]:
    """Yield which of the blocks, which follow each other, are read by one call; what is in no parcel is read alone.

    Example:
        >>> a, b, c = Spot(b"p", 0, 5), Spot(b"p", 5, 7), Spot(b"p", 20, 3)
        >>> list(neighbours([None, None, a, b, c]))
        [range(0, 1), range(1, 2), range(2, 4), range(4, 5)]
    """
    begin = 0
    for at in range(1, len(spots) + 1):
        before = spots[at - 1]
        if at == len(spots) or before is None or not before.is_before(spots[at]):
            yield range(begin, at)
            begin = at


class ParcelRead(Generic[T]):
    """One call that reads records, and a task for each of them, which makes something of what came. To be called once,
    by a worker, which makes the tasks, too: none of them waits for another worker.

    Args:
        spots: of the records, each the one before the next.
        read: reads from an offset behind the head on into buffers.
        takes: what to make of each record, or of why it did not come.
    """

    def __init__(
        self,
        spots: Sequence[Spot],
        read: ReadPart,
        pool: BufferPool,
        takes: Sequence[Callable[[Buffer | Reason], T]],
    ) -> None:
        self._spots = spots
        self._read = read
        self._pool = pool
        self._came: list[Buffer | Reason] = []
        self.tasks = [Task(self._take, at, take) for at, take in enumerate(takes)]

    def __call__(self) -> None:
        """Read, unless nobody waits any more, and make the tasks. Does not raise."""
        try:
            if any(task.is_wanted for task in self.tasks):
                self._came = self._fetch()
        finally:
            for task in self.tasks:
                task()

    def _fetch(self) -> list[Buffer | Reason]:
        buffers = [self._pool.take(spot.nbytes) for spot in self._spots]
        size = self._read(self._spots[0].offset, [buffer.view for buffer in buffers])
        if isinstance(size, Reason):
            return [size] * len(buffers)
        for buffer in buffers:
            buffer.trim(min(size, len(buffer.view)))  # of a parcel that ends before, which the reader notices
            size -= len(buffer.view)
        return list(buffers)

    def _take(self, at: int, take: Callable[[Buffer | Reason], T]) -> T:
        came, self._came[at] = self._came[at], Reason.REMOTE_FAILED  # the memory is the task's
        return take(came)
