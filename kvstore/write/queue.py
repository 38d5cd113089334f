"""The write queue: blocks that were put are encoded and written by two threads of the store's own.

One thread encodes a group for the host tier and for the disk; the other writes and commits the group before it. A
put is never split over two groups, so it is durable whole or not at all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.core.results import FlushResult
from kvstore.core.session_record import SessionChange
from kvstore.residency.block import Block
from kvstore.tiers.disk.tier import SealedRecord


@dataclass(frozen=True)
class WriteBatch:
    """What one put, or one change of a session, leaves to be written; durable whole or not at all.

    Attributes:
        blocks: new blocks, each of which continues the one before.
        changed: (record, expiry in unix seconds or None to keep it, pinned) of stored records.
        sessions: changes of sessions.

    Example:
        >>> WriteBatch(changed=[(7, None, True)]).nbytes
        0
    """

    blocks: Sequence[Block] = ()
    changed: Sequence[tuple[int, float | None, bool]] = ()
    sessions: Sequence[SessionChange] = ()

    @property
    def nbytes(self) -> int:
        """Raw bytes of the blocks."""
        return sum(block.view.nbytes for block in self.blocks)


Encode = Callable[[Sequence[Block]], list[SealedRecord]]
Commit = Callable[[Sequence[WriteBatch], Sequence[SealedRecord]], FlushResult]
Tick = Callable[[], None]


class WriteQueue:
    """A bounded queue of batches, and the two threads that encode and write them. Thread-safe.

    The condition `_changed` guards every field that is not constant.

    Args:
        queue_bytes: raw bytes that may wait.
        group_bytes: about this many raw bytes are written with one commit.
        encode: makes the records of the blocks of a group. Must not raise.
        commit: writes a group durably, and says what became of it. Must not raise.
        tick: is called about every `tick_s` seconds and before each group.

    Example:
        >>> written = []
        >>> def commit(group, sealed):
        ...     written.extend(group)
        ...     return FlushResult(durable_blocks=0, dropped_blocks=0)
        >>> queue = WriteQueue(1 << 20, 1 << 16, lambda blocks: [], commit, lambda: None)
        >>> queue.submit(WriteBatch())
        >>> queue.wait()
        >>> len(written)
        1
        >>> queue.close()
    """

    def __init__(
        self, queue_bytes: int, group_bytes: int, encode: Encode, commit: Commit, tick: Tick, tick_s: float = 1.0
    ) -> None:
        self._queue_bytes = queue_bytes
        self._group_bytes = group_bytes
        self._encode = encode
        self._commit = commit
        self._tick = tick
        self._tick_s = tick_s
        self._batches: deque[WriteBatch] = deque()
        self._bytes = 0
        self._submitted = self._completed = 0
        self._durable = self._dropped = 0
        self._failure: BaseException | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._disk = ThreadPoolExecutor(1, "kvstore-disk")
        self._thread = threading.Thread(target=self._run, name="kvstore-encode", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """Raw bytes of blocks that were submitted and are not durable yet."""
        return self._bytes

    def wait_for_space(self, nbytes: int, timeout_s: float) -> float | None:
        """Wait until `nbytes` more fit the queue; if it is empty, any number fits.

        Returns:
            The seconds that it took, or None if it took longer than `timeout_s`.
        """
        begin = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_space(nbytes), timeout_s):
                return None
        return time.monotonic() - begin

    def submit(self, batch: WriteBatch) -> None:
        """Queue a batch, and return at once; see `wait_for_space`. Its blocks must not change from now on."""
        with self._changed:
            self._batches.append(batch)
            self._bytes += batch.nbytes
            self._submitted += 1
            self._changed.notify_all()

    def flush(self) -> FlushResult:
        """Return when everything submitted before is durable or dropped: the counts since the last flush.

        Raises:
            RuntimeError: the encoding thread died, which no input should cause.
        """
        with self._changed:
            self._wait()
            result = FlushResult(self._durable, self._dropped)
            self._durable = self._dropped = 0
            return result

    def wait(self) -> None:
        """Return when everything submitted before is durable or dropped. Raises as `flush` does."""
        with self._changed:
            self._wait()

    def _wait(self) -> None:
        target = self._submitted
        self._changed.wait_for(lambda: self._completed >= target or self._failure is not None)
        if self._failure is not None:
            raise RuntimeError(
                "the thread that encodes blocks died; close the store and open it again"
            ) from self._failure

    def close(self) -> None:
        """Write what is queued, then end the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._disk.shutdown()

    def _has_space(self, nbytes: int) -> bool:
        return self._bytes == 0 or self._bytes + nbytes <= self._queue_bytes or self._failure is not None

    def _run(self) -> None:
        writing: Future[None] | None = None
        try:
            while (group := self._next_group()) is not None:
                self._tick()
                if not group:
                    continue
                sealed = self._encode([block for batch in group for block in batch.blocks])
                # At most one group is being written while the next is encoded: that bounds the buffers.
                if writing is not None:
                    writing.result()
                writing = self._disk.submit(self._write, group, sealed)
            if writing is not None:
                writing.result()
        except BaseException as error:
            # Nothing above should raise. If it does, flush() must say so rather than wait for ever.
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise

    def _write(self, group: Sequence[WriteBatch], sealed: Sequence[SealedRecord]) -> None:
        result = self._commit(group, sealed)
        with self._changed:
            self._bytes -= sum(batch.nbytes for batch in group)
            self._completed += len(group)
            self._durable += result.durable_blocks
            self._dropped += result.dropped_blocks
            self._changed.notify_all()

    def _next_group(self) -> list[WriteBatch] | None:
        """Whole batches of about `group_bytes`; [] when a tick is due, None at the end."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._batches or self._closing, self._tick_s):
                return []
            group: list[WriteBatch] = []
            total = 0
            while self._batches and (not group or total + self._batches[0].nbytes <= self._group_bytes):
                group.append(self._batches.popleft())
                total += group[-1].nbytes
            return group or None
