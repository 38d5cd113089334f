"""The write queue: blocks that were put are encoded and written by two threads of the store's own.

One thread encodes a group for the host tier and for the disk; the other writes and commits the groups before it. While
a group is committed, the bytes of the next one are on their way to the disk. A put is never split over two groups, so
it is durable whole or not at all.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.config import MIB, PAGE_BYTES
from kvstore.core.results import FlushResult
from kvstore.core.session_record import SessionChange
from kvstore.core.waiting import Bell
from kvstore.core.workers import Workers
from kvstore.errors import BlocksLost
from kvstore.metrics import Metric, Metrics
from kvstore.residency.block import Block
from kvstore.tiers.disk.writes import SealedRecord

_log = logging.getLogger(__name__)
_FEW = 1_024  # batches, which take no time to be counted
_IN_A_ROW = 8  # groups; then others may write to the disk who wait for it
# A group that is smaller waits for the commit of the one before, and what comes meanwhile is written with the next one:
# for small groups commits are what takes the disk's time, and bytes.
_WORTH_BESIDE = 4 * MIB


Change = tuple[int, float | None, bool]
"""(record, expiry in unix seconds or None to keep it, pinned) of a stored record."""


@dataclass(frozen=True, eq=False)
class WriteBatch:
    """What one put, or one change of a session, leaves to be written; durable whole or not at all.

    Attributes:
        blocks: new blocks, each of which continues the one before.
        changed: of stored records.
        sessions: changes of sessions.
        aged: records that these blocks leave behind, and that are to be coded with loss now.
        nbytes: raw bytes of the blocks.
        disk_bytes: the same where each block takes at least the page that its record takes on disk.

    Example:
        >>> WriteBatch(changed=[(7, None, True)]).nbytes
        0
    """

    blocks: Sequence[Block] = ()
    changed: Sequence[Change] = ()
    sessions: Sequence[SessionChange] = ()
    aged: Sequence[int] = ()
    nbytes: int = field(init=False)
    disk_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = [block.view.nbytes for block in self.blocks]
        object.__setattr__(self, "nbytes", sum(sizes))
        object.__setattr__(self, "disk_bytes", sum(max(PAGE_BYTES, size) for size in sizes))


Encode = Callable[[Sequence[Block]], list[SealedRecord]]
Tick = Callable[[], None]


class GroupBegun(Protocol):
    """A group that is being written."""

    def wait(self) -> None:
        """Return when its bytes are written, or the write has failed."""


class GroupWriter(Protocol):
    """What makes groups durable, one after the other. For one thread; nothing of it may raise."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Return a context in which nobody else writes; groups are begun and finished in it."""

    def begin(self, sealed: Sequence[SealedRecord], beside: bool) -> GroupBegun:
        """Begin to write records. beside: they are written by another thread meanwhile, else they are on return."""

    def finish(self, group: Sequence[WriteBatch], begun: Any) -> FlushResult:
        """Commit a group that was begun, in the order in which they were, and say what became of it."""

    def age(self, records: Sequence[int]) -> None:
        """Code again what a group left behind (`WriteBatch.aged`), when it is committed. Others may write meanwhile:
        the threads that code may have to."""


class WriteQueue:
    """A bounded queue of batches, and the two threads that encode and write them. Thread-safe.

    What is queued is what counts: numbers that follow from it are made anew whenever a group is written and not many
    wait behind it, so that a call that was interrupted between two changes leaves none of them wrong for long. `_lock`
    guards `_open`, `_bytes` and the counts of blocks.

    Args:
        queue_bytes: raw bytes that may wait.
        group_bytes: about this many bytes (`WriteBatch.disk_bytes`) are written with one commit.
        encode: makes the records of the blocks of a group. If it raises, the blocks are dropped, logged and counted.
        writer: writes groups durably.
        tick: is called about every `tick_s` seconds and before each group. Must not raise.
        tidy: is called when a group is written and nobody here refers to it any more. Must not raise.

    Example:
        >>> import contextlib, threading
        >>> written = []
        >>> class Writer:
        ...     exclusive = contextlib.nullcontext
        ...     def begin(self, sealed, beside):
        ...         return threading.Barrier(1)
        ...     def finish(self, group, begun):
        ...         written.extend(group)
        ...         return FlushResult(durable_blocks=0, dropped_blocks=0)
        >>> queue = WriteQueue(1 << 20, 1 << 16, lambda blocks: [], Writer(), lambda: None, Metrics())
        >>> queue.submit(WriteBatch())
        >>> queue.begin()
        >>> queue.wait()
        >>> len(written)
        1
        >>> queue.close()
    """

    def __init__(
        self,
        queue_bytes: int,
        group_bytes: int,
        encode: Encode,
        writer: GroupWriter,
        tick: Tick,
        metrics: Metrics,
        tick_s: float = 1.0,
        tidy: Tick | None = None,
    ) -> None:
        self._queue_bytes = queue_bytes
        self._group_bytes = group_bytes
        self._worth_beside = min(_WORTH_BESIDE, group_bytes // 4)
        self._encode = encode
        self._writer = writer
        self._tick = tick
        self._metrics = metrics
        self._tick_s = tick_s
        self._tidy = tidy
        self._open: dict[WriteBatch, None] = {}  # what was submitted and is not written, the oldest first
        self._taken = 0  # how many of them are in the hands of the threads, which alone change this
        self._bytes = 0
        self._durable = self._dropped = 0
        self._ready: tuple[list[WriteBatch], Sequence[SealedRecord]] | None = None  # encoded, and nobody writes it yet
        self._failure: BaseException | None = None
        self._closing = False
        self._abandoned = False
        self._lock = threading.Lock()
        self._submitted, self._taken_over, self._written = Bell(), Bell(), Bell()
        self._disk = Workers(1, "kvstore-disk")
        self._encoder = Workers(1, "kvstore-encode")
        self._encoder.start(self._run)

    @property
    def pending_bytes(self) -> int:
        """Raw bytes of blocks that were submitted and are not durable yet."""
        return self._bytes

    @property
    def pending_blocks(self) -> int:
        """How many blocks were submitted and are not durable yet."""
        return sum(len(batch.blocks) for batch in list(self._open))

    def wait_for_space(self, nbytes: int, timeout_s: float) -> float | None:
        """Wait until `nbytes` more fit the queue; if it is empty, any number fits.

        Returns:
            The seconds that it took, or None if it took longer than `timeout_s`.
        """
        self.begin()
        begin = time.monotonic()
        if not self._written.wait_for(lambda: self._has_space(nbytes), timeout_s):
            return None
        return time.monotonic() - begin

    def submit(self, batch: WriteBatch) -> None:
        """Queue a batch, and return at once; see `wait_for_space`. Its blocks must not change from now on.

        To submit a batch that is queued already changes nothing. Whoever submitted says so with `begin`, at the latest
        when nobody waits for it any more; otherwise it is noticed within a second.
        """
        nbytes = batch.nbytes
        with self._lock:
            if batch not in self._open:
                self._open[batch] = None
                self._bytes += nbytes

    def begin(self) -> None:
        """Let the thread that encodes begin with what was submitted; it is not woken for nothing."""
        if self._is_due():
            self._submitted.ring()

    def flush(self) -> FlushResult:
        """Return when everything submitted before is durable or dropped: the counts since the last flush.

        Raises:
            BlocksLost: the thread that writes died, which no input should cause.
        """
        self.wait()
        with self._lock:
            result = FlushResult(self._durable, self._dropped)
            self._durable = self._dropped = 0
        return result

    def wait(self) -> None:
        """Return when everything submitted before is durable or dropped. Raises as `flush` does."""
        self.begin()
        with self._lock:
            last = next(reversed(self._open), None)
        self._written.wait_for(lambda: last not in self._open or self._failure is not None)
        if self._failure is not None:
            raise BlocksLost(
                f"{self.pending_blocks} blocks were not written, for a thread that writes them died; close the store, "
                "open it again, and put them again"
            ) from self._failure

    def abandon(self) -> int:
        """Write no group any more but the one that is being written, for time has run out.

        Returns:
            How many blocks were not written.
        """
        self._abandoned = self._closing = True
        self._submitted.ring()
        return self.pending_blocks

    def close(self) -> None:
        """Write what is queued, then end the threads. Idempotent."""
        self._closing = True
        self._submitted.ring()
        self._encoder.close()
        self._disk.close()

    def _is_due(self) -> bool:
        """Whether there is anything for the thread that encodes to do."""
        with self._lock:
            return len(self._open) > self._taken or self._closing

    def _has_space(self, nbytes: int) -> bool:
        return self._bytes == 0 or self._bytes + nbytes <= self._queue_bytes or self._failure is not None

    def _run(self) -> None:
        try:
            while (group := self._next_group()) is not None:
                self._tick()
                if not group:
                    continue
                self._ready = group, self._encoded([block for batch in group for block in batch.blocks])
                del group
                self._disk.start(self._write_ready)
                # At most one group is being written while the next is encoded: that bounds the buffers.
                self._taken_over.wait_for(lambda: self._ready is None or self._failure is not None)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing that the threads call should raise. If it does, flush() must say so rather than wait for ever."""
        if self._failure is None:
            _log.error("a thread that writes blocks died; %d were not written", self.pending_blocks, exc_info=error)
            self._failure = error
        self._taken_over.ring()
        self._written.ring()

    def _encoded(self, blocks: Sequence[Block]) -> Sequence[SealedRecord]:
        """The records of a group; () if they cannot be made, and the commit finds them missing then."""
        try:
            return self._encode(blocks)
        except Exception as error:
            self._metrics.add(Metric.DROPPED_ENCODING, len(blocks), because=error)
            return ()

    def _write_ready(self) -> None:
        """Writes the group that is ready, if there is one, and those that become ready meanwhile."""
        try:
            last = self._write_in_a_row()
            if last is not None:
                group, result, aged = last
                self._writer.age(aged)
                self._leave(group, result)
                del last, group
                self._tidied()
        except BaseException as error:
            self._fail(error)

    def _write_in_a_row(self) -> tuple[list[WriteBatch], FlushResult, list[int]] | None:
        """Writes what is ready. Returns the last group where something is to be coded again before it is through."""
        with self._writer.exclusive():
            begun, number = self._begin(beside=False), 1
            while begun is not None:
                group, aged = begun[0], [record for batch in begun[0] for record in batch.aged]
                following = self._begin(beside=True) if number < _IN_A_ROW and not aged else None
                try:
                    result = self._writer.finish(*begun)
                finally:
                    if following is not None:
                        following[1].wait()
                if aged:
                    return group, result, aged
                self._leave(group, result)
                begun, number = following, number + 1
                del group
                self._tidied()
        return None

    def _tidied(self) -> None:
        if self._tidy is not None:
            self._tidy()

    def _begin(self, beside: bool) -> tuple[list[WriteBatch], GroupBegun] | None:
        """Takes the group that is ready, and begins to write it; None if there is none, or none that is worth it."""
        ready = self._ready
        if ready is None or (beside and sum(batch.disk_bytes for batch in ready[0]) < self._worth_beside):
            return None
        self._ready = None
        self._taken_over.ring()
        return ready[0], self._writer.begin(ready[1], beside)

    def _leave(self, group: list[WriteBatch], result: FlushResult) -> None:
        """The group is through."""
        with self._lock:
            for batch in group:
                self._open.pop(batch, None)
            self._taken -= len(group)
            few = len(self._open) <= _FEW
            self._bytes = sum(x.nbytes for x in self._open) if few else self._bytes - sum(x.nbytes for x in group)
            self._durable += result.durable_blocks
            self._dropped += result.dropped_blocks
        self._written.ring()

    def _next_group(self) -> list[WriteBatch] | None:
        """Whole batches of about `group_bytes`; [] when a tick is due, None at the end."""
        if not self._submitted.wait_for(self._is_due, self._tick_s):
            return []
        if self._abandoned:
            return None
        group: list[WriteBatch] = []
        total = 0
        with self._lock:
            for batch in itertools.islice(self._open, self._taken, None):
                if group and total + batch.disk_bytes > self._group_bytes:
                    break
                group.append(batch)
                total += batch.disk_bytes
            self._taken += len(group)
        return group or None
