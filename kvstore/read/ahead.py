"""What a fetch reads from storage: some blocks with each call, and the next ones while these are decoded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.config import MIB
from kvstore.read.block_read import BlockRead
from kvstore.read.stripes import first_bytes
from kvstore.tiers.base import Part, ReadsAhead, Source, StorageTier
from kvstore.tiers.buffers import Buffer, BufferPool

# What may be under way, or wait to be decoded: enough for a disk to go on where a range takes long to decode. The
# first bytes are asked for before anything else is done.
_AHEAD_BYTES, _FIRST_BYTES = 8 * MIB, 2 * MIB


@dataclass(frozen=True)
class Batch:
    """Blocks that lie together in storage and are read together.

    Attributes:
        sources: of the blocks.
        kept: for each, whether the host tier is to have its record.
        buffers: for each, memory for its record.
        reads: what the read is under way with; None if none is.
        numbers: of the reads, see `ReadsAhead`.
        begin: when it began, by `time.perf_counter`.
    """

    sources: Sequence[Source]
    kept: Sequence[bool]
    buffers: Sequence[Buffer]
    reads: ReadsAhead[Any] | None = None
    numbers: Sequence[int] = ()
    begin: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(len(buffer.view) for buffer in self.buffers)

    def wait(self) -> bool:
        """Wait until the blocks are read; return whether a read was under way. Raises: OSError."""
        if self.reads is None:
            return False
        for number in self.numbers:
            self.reads.wait(number)
        return True

    def read(self, tier: StorageTier[Any]) -> None:
        """Read the blocks now. Raises: OSError."""
        if self.nbytes == sum(source.nbytes for source in self.sources):
            tier.read(self.sources, self.buffers)
            return
        for source, buffer in zip(self.sources, self.buffers, strict=True):  # of each its beginning
            tier.read([source], [buffer])


@dataclass(frozen=True)
class Batches:
    """Takes memory for what is to be read. Thread-safe: has no state of its own.

    Attributes:
        reads: all blocks of the fetch.
        pool: where the memory is from.
        is_kept: whether the host tier is to have the record of a block.
        layers: of a record of which only the first layer is read here; 0 if it is read whole. See `first_bytes`.
    """

    reads: Sequence[BlockRead]
    pool: BufferPool
    is_kept: Callable[[BlockRead], bool]
    layers: int = 0

    def of(self, indexes: range, begin: ReadsAhead[Any] | None = None) -> Batch:
        """Return the blocks of a range; begin to read them, if there is something to begin with."""
        sources = [self.reads[i].source for i in indexes]
        kept = [self.is_kept(self.reads[i]) for i in indexes]
        buffers = [
            self.pool.take(first_bytes(source, self.layers), keep) for source, keep in zip(sources, kept, strict=True)
        ]
        if begin is not None:
            now = time.perf_counter()
            with contextlib.suppress(OSError):  # it is read when it is wanted, and fails then
                return Batch(sources, kept, buffers, begin, self._begun(begin, sources, buffers), now)
        return Batch(sources, kept, buffers)

    def _begun(self, begin: ReadsAhead[Any], sources: Sequence[Source], buffers: Sequence[Buffer]) -> Sequence[int]:
        if not self.layers:
            return [begin.begin(sources, buffers)]
        firsts = [Part(source, 0, buffer.view) for source, buffer in zip(sources, buffers, strict=True)]
        return begin.begin_parts(firsts, tuple(buffers))


class AheadReader:
    """Begins to read ranges of blocks in order, a few before they are wanted. Thread-safe; `_lock` guards the rest.

    The first are under way when it is made.

    Args:
        batches: of the fetch.
        ranges: of blocks in one tier that reads ahead, in order.
        reads: of that tier.
    """

    def __init__(self, batches: Batches, ranges: Sequence[range], reads: ReadsAhead[Any]) -> None:
        self._batches = batches
        self._ranges = ranges
        self._reads = reads
        self._lock = threading.Lock()
        self._begun: dict[int, Batch] = {}  # by the first index
        self._next = 0
        self._nbytes = 0
        self._begin(ranges[0].start, _FIRST_BYTES)

    def take(self, indexes: range) -> Batch:
        """Return a range of `ranges`, which is being read from now on; each once."""
        with self._lock:
            self._begin(indexes.start, _AHEAD_BYTES)
            batch = self._begun.pop(indexes.start)
            self._nbytes -= batch.nbytes
        return batch

    def settle(self, most_bytes: int) -> None:
        """Wait for all that was begun at once, if that is everything and no more than so many bytes: whoever waits for
        each has to get Python's lock back as often."""
        with self._lock:
            if self._next < len(self._ranges) or self._nbytes > most_bytes or not self._begun:
                return
            last = next(reversed(self._begun.values()))
        if last.reads is not None:
            last.reads.settle(last.numbers[-1])

    def _begin(self, wanted: int, nbytes: int) -> None:
        """Begin ranges until the one is under way that begins with the block `wanted`, and so many bytes."""
        while self._next < len(self._ranges) and (wanted not in self._begun or self._nbytes < nbytes):
            following = self._ranges[self._next]
            batch = self._begun[following.start] = self._batches.of(following, self._reads)
            self._next += 1  # behind what can be interrupted
            self._nbytes += batch.nbytes
