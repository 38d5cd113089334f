"""What a get reads from the remote tier: the blocks that follow those which this store has, within one deadline.

The blocks are no records of this store: it has no numbers for them and its index does not name them. They are sources
of their own, which one get decodes behind its local blocks, in the order in which they come. What is kept of them
becomes records later, by way of the write queue, as anything that is put (`write.adopt`). So the remote tier needs no
state in the index, and what it lies about can harm no other get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.codecs.registry import codec_label
from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_keys
from kvstore.core.layout import KVLayout
from kvstore.core.tokens import Tokens
from kvstore.core.workers import Task
from kvstore.gate.gate import Gate
from kvstore.gate.load import Part
from kvstore.metrics import Metric, Metrics
from kvstore.read.block_read import BlockRead
from kvstore.read.remote_check import RemoteCheck
from kvstore.tiers.remote.fetching import Fetched
from kvstore.tiers.remote.record import TIER, RemoteRecord
from kvstore.tiers.remote.tier import RemoteTier

NO_RECORD = 0  # the number of a block that is no record of this store


@dataclass(frozen=True)
class Arrivals:
    """Blocks that came from the remote tier, in the order of their sequence, whole ones."""

    namespace: bytes
    tokens: Tokens
    records: Sequence[RemoteRecord]


@dataclass(frozen=True)
class RemoteRequest:
    """What a get wants of the remote tier.

    Attributes:
        root: the key before the first block.
        namespace: its digest.
        tokens: that it wants, and how many of them are `local`.
        given: how many tokens the caller's sequence has.
        device: where the result is wanted.
        gated: whether to leave out what is computed sooner than loaded.
        parts: what the gate must know of the local blocks.
    """

    root: bytes
    namespace: bytes
    tokens: Tokens
    local: int
    given: int
    device: object = None
    gated: bool = False
    parts: Sequence[Part] = ()


@dataclass
class RemoteReader:
    """Begins the reading of blocks from the remote tier. Thread-safe.

    Attributes:
        exact: refuse what codecs with loss made.
        keep: told of the blocks that a get returned; None if this store keeps none.
        typical: bytes and codec of a record that came; replaced as a whole.
    """

    tier: RemoteTier
    layout: KVLayout
    exact: bool
    block_tokens: int
    gate: Gate
    metrics: Metrics
    keep: Callable[[Arrivals], None] | None = None
    typical: tuple[int, str] = (0, "")

    def begin(self, request: RemoteRequest) -> RemoteRun | None:
        """Look for the blocks behind those that are here, and begin to read what is worth it; None for nothing."""
        keys, first = self._keys(request)
        if len(keys) <= first + 1:
            return None
        begin, size = self.tier.clock(), self.block_tokens
        deadline = begin + self.seconds(request)
        found = self.tier.leading(keys[1:], deadline, first)
        if not found:
            return None
        there = self._worth_loading(request, found) if request.gated else found
        withheld = (first + found) * size - max(request.local, (first + there) * size)
        checks = [
            RemoteCheck(
                self.layout,
                self.exact,
                request.namespace,
                keys[i + 1],
                keys[i],
                i * size,
                request.tokens[i * size : (i + 1) * size],
            )
            for i in range(first, first + there)
        ]
        tasks = self.tier.fetch([check.key for check in checks], deadline, checks)
        return RemoteRun(self, request, checks, tasks, begin, deadline, withheld)

    def end(self, request: RemoteRequest) -> int:
        """Return where the blocks end that the remote tier seems to have behind those that are here; asks it, and reads
        none."""
        keys, first = self._keys(request)
        deadline = self.tier.clock() + self.tier.config.deadline_s
        there = self.tier.leading(keys[1:], deadline, first) if len(keys) > first + 1 else 0
        return (first + there) * self.block_tokens if there else request.local

    def _keys(self, request: RemoteRequest) -> tuple[list[bytes], int]:
        """The keys of the whole blocks, behind that of the namespace; the number of the first that is not here."""
        size, count = self.block_tokens, len(request.tokens) // self.block_tokens
        keys = [request.root, *chain_keys(request.root, request.tokens[: count * size], size)]
        return keys, request.local // size

    def _worth_loading(self, request: RemoteRequest, there: int) -> int:
        """How many blocks are loaded sooner than computed, by what was seen of the server so far."""
        nbytes, codec = self.typical
        if not nbytes:
            return there
        here = list(request.parts)
        parts = [*here, *[Part(TIER, codec, nbytes, self.block_tokens)] * there]
        count = max(0, self.gate.decide(parts, request.device, total=request.given).parts - len(here))
        self.gate.note(request.local + there * self.block_tokens, count < there)
        self.metrics.add(Metric.GET_WITHHELD_TOKENS, (there - count) * self.block_tokens)
        return count

    def seconds(self, request: RemoteRequest) -> float:
        """How long a get may wait: computing the rest must not be sooner done."""
        most, rest = self.tier.config.deadline_s, len(request.tokens) - request.local
        computing = self.gate.prefill_seconds(rest, start=request.local, device=request.device)
        return most if computing is None else min(most, computing)


@dataclass
class RemoteRun:
    """The blocks of one get that are on their way. For one thread.

    Attributes:
        withheld: tokens behind them that are there, and not worth loading.
        why: why there is no further block; None as long as there may be, and where all came.
    """

    reader: RemoteReader
    request: RemoteRequest
    checks: Sequence[RemoteCheck]
    tasks: Sequence[Task[Fetched]]
    begun: float
    deadline: float
    withheld: int = 0
    why: Reason | None = None
    _came: list[Fetched] = field(default_factory=list)
    _last: float = 0.0  # when the last block was here

    @property
    def start(self) -> int:
        """Position of the first token that may come."""
        return self.checks[0].start

    @property
    def end(self) -> int:
        """Position behind the last token that may come."""
        return self.checks[-1].start + len(self.checks[-1].tokens)

    def next(self) -> list[BlockRead]:
        """Return the next blocks, as many as are here, but wait for one; [] if none comes any more."""
        reads: list[BlockRead] = []
        while len(self._came) < len(self.tasks) and self.why is None:
            at = len(self._came)
            left = 0.0 if reads else max(0.0, self.deadline - self.reader.tier.clock())
            if not self.tasks[at].is_done(left):
                if reads:
                    break
                self._stop(Reason.REMOTE_LATE)
                break
            fetched = self.tasks[at].result()
            if fetched.record is None:
                self._stop(fetched.why or Reason.REMOTE_FAILED)
                break
            self._came.append(fetched)
            check = self.checks[at]
            reads.append(BlockRead(NO_RECORD, check.start, check.tokens, check.parent, fetched.record))
        self._last = self.reader.tier.clock() if reads else self._last
        return reads

    def refuse(self, count: int) -> None:
        """The last `count` of the blocks that came cannot be used: nothing behind them is waited for."""
        del self._came[len(self._came) - count :]
        self._stop(Reason.REMOTE_REFUSED)

    def done(self) -> None:
        """Tell what was learned: the gate what reading takes, the store what it may keep. Does not raise."""
        self._cancel()
        reader, good = self.reader, len(self._came)
        if not good:
            return
        nbytes, last = sum(fetched.nbytes for fetched in self._came), self._came[-1].record
        if last is not None:
            reader.typical = nbytes // good, codec_label(last.header.codec)
        reader.gate.observe_read(TIER, nbytes, self._last - self.begun)
        records = [fetched.record for fetched in self._came if fetched.record is not None]
        reader.tier.renew_soon(
            [check.key for check in self.checks[:good]], {record.header.profile for record in records}
        )
        if reader.keep is not None:
            end = self.checks[good - 1].start + len(self.checks[good - 1].tokens)
            reader.keep(Arrivals(self.request.namespace, self.request.tokens[:end], records))

    def _stop(self, why: Reason) -> None:
        self.why = why
        rest = [check.key for check in self.checks[len(self._came) :]]
        if why is Reason.REMOTE_LATE:
            self.reader.metrics.add(Metric.REMOTE_LATE, len(rest))
        elif why not in (Reason.REMOTE_FAILED, Reason.REMOTE_PROFILE, Reason.REMOTE_EXPIRED):  # it may be there
            self.reader.metrics.add(Metric.REMOTE_GONE, int(why is Reason.REMOTE_GONE))
            self.reader.tier.lost(rest)
        self._cancel()

    def _cancel(self) -> None:
        for task in self.tasks[len(self._came) :]:
            task.cancel()
