"""A get that goes on from a place of the remote tier: caches with windows or states, which come whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstore.codecs.registry import codec_label
from kvstore.core.explanation import Reason
from kvstore.core.places import MARK
from kvstore.core.workers import Task
from kvstore.gate.load import Part
from kvstore.metrics import Metric
from kvstore.read.block_read import BlockRead
from kvstore.read.fetch import Fetcher
from kvstore.read.lookup import Lookup
from kvstore.read.remote import NO_RECORD, Arrivals, RemoteReader, RemoteRequest
from kvstore.read.remote_places import FoundPlace, PlaceSearch
from kvstore.read.result import OutputBuffers, allocate
from kvstore.tiers.remote.fetching import Fetched
from kvstore.tiers.remote.record import TIER, RemoteRecord

_PLACES = 3  # that a get tries at most
_NOT_USABLE = (Reason.REMOTE_GONE, Reason.REMOTE_REFUSED, Reason.REMOTE_EXPIRED)


@dataclass(frozen=True)
class Resumed:
    """A cache that was put together at a place.

    Attributes:
        out: its tensors.
        reads: its blocks, in order.
        tiers: tokens by tier.
        why: why it does not end at a place farther on; None where none is known.
    """

    out: OutputBuffers
    reads: Sequence[BlockRead]
    tiers: dict[str, int]
    why: Reason | None = None


@dataclass(frozen=True)
class RemoteResumer:
    """Goes on from places. Thread-safe: has no state of its own.

    Attributes:
        reader: its tier, its gate, and whom it tells of what came.
    """

    reader: RemoteReader
    search: PlaceSearch
    lookup: Lookup
    fetcher: Fetcher

    def resume(self, request: RemoteRequest, reserve: Callable[[int], int]) -> Resumed | Reason | None:
        """Return the cache at the last place that the remote tier has behind the tokens that are here, or at one before
        it where a record of that is gone or damaged; why none came; None where there is no such place.

        reserve: gives how many tokens to reserve behind so many.
        """
        tier, why = self.reader.tier, None
        deadline = tier.clock() + self.reader.seconds(request)
        for _ in range(_PLACES):
            found = self.search.find(request, deadline) if len(request.tokens) > request.local else None
            if found is None:
                break
            if not self._is_worth(request, found):
                self.reader.metrics.add(Metric.GET_WITHHELD_TOKENS, found.end - request.local)
                return why or Reason.NOT_WORTH
            got = self._resume(request, found, reserve(found.end), deadline)
            if isinstance(got, Resumed):
                return replace(got, why=why)
            why = why or got
            if got not in _NOT_USABLE:
                break
            request = replace(request, tokens=request.tokens[: found.end - 1])
        return why

    def end(self, request: RemoteRequest) -> int:
        """Return where the last place is that the remote tier seems to have; asks it, and reads no record."""
        found = self.search.find(request, self.reader.tier.clock() + self.reader.tier.config.deadline_s)
        return request.local if found is None else found.end

    def _is_worth(self, request: RemoteRequest, found: FoundPlace) -> bool:
        """Whether the cache is loaded sooner than computed, by what was seen of the server so far."""
        nbytes, codec = self.reader.typical
        if not (request.gated and nbytes):
            return True
        parts = [Part(TIER, codec, nbytes, len(check.tokens)) for check in found.checks]
        gate = self.reader.gate
        count = gate.decide(parts, request.device, total=request.given, whole=True).parts
        gate.note(found.end, count < len(parts))
        return count == len(parts)

    def _resume(self, request: RemoteRequest, found: FoundPlace, reserve: int, deadline: float) -> Resumed | Reason:
        tier, begun = self.reader.tier, self.reader.tier.clock()
        local = self.lookup.parts(request.namespace, request.tokens[: found.end], found.place.cuts)
        try:
            wanted = [i for i in range(len(found.checks)) if i not in local]
            room = found.place.state_bytes + found.place.state_bytes // 8
            tasks = [
                tier.fetch([found.parts[i]], deadline, [found.checks[i]], room if found.checks[i].state_bytes else 0)[0]
                for i in wanted
            ]
            out = allocate(self.search.layout, found.end, reserve, self.fetcher.results)
        except BaseException:
            self.fetcher.residency.release([read.source for read in local.values()])
            raise
        here, tiers = [local[i] for i in sorted(local)], dict[str, int]()
        if here:
            good, tiers = self.fetcher.fetch(here, out.view)
            if good < len(here):  # found next time, or not any more
                _cancel(tasks)
                return Reason.UNREADABLE
        came = self._arrive(found, wanted, tasks, out, deadline)
        if isinstance(came, Reason):
            _cancel(tasks)
            return came
        self._tell(request, found, [fetched for _, fetched in came], begun)
        reads = sorted([*here, *(read for read, _ in came)], key=lambda read: read.start)
        count = sum(len(read.tokens) for read, _ in came)
        return Resumed(out, reads, {**tiers, TIER: count} if count else tiers)

    def _arrive(
        self,
        found: FoundPlace,
        wanted: Sequence[int],
        tasks: Sequence[Task[Fetched]],
        out: OutputBuffers,
        deadline: float,
    ) -> list[tuple[BlockRead, Fetched]] | Reason:
        """Decode the blocks in the order in which they were asked for; or why that cannot be."""
        tier, metrics = self.reader.tier, self.reader.metrics
        came: list[tuple[BlockRead, Fetched]] = []
        for i, task in zip(wanted, tasks, strict=True):
            if not task.is_done(max(0.0, deadline - tier.clock())):
                metrics.add(Metric.REMOTE_LATE, len(wanted) - len(came))
                return Reason.REMOTE_LATE
            fetched, check = task.result(), found.checks[i]
            if fetched.record is None:
                return self._lost(found, i, fetched.why or Reason.REMOTE_FAILED)
            read = BlockRead(NO_RECORD, check.start, check.tokens, check.parent, fetched.record)
            if not self.fetcher.fetch([read], out.view)[0]:
                return self._lost(found, i, Reason.REMOTE_REFUSED)
            came.append((read, fetched))
        return came

    def _lost(self, found: FoundPlace, i: int, why: Reason) -> Reason:
        """A record did not come: if it is not there, neither is the place."""
        if why in (Reason.REMOTE_GONE, Reason.REMOTE_REFUSED):
            self.reader.metrics.add(Metric.REMOTE_GONE, int(why is Reason.REMOTE_GONE))
            self.reader.tier.beliefs.note([found.parts[i], *found.values[len(found.parts) :][:1]], False)
        return why

    def _tell(self, request: RemoteRequest, found: FoundPlace, came: Sequence[Fetched], begun: float) -> None:
        """Tell the gate what reading takes, and the store what it may keep."""
        reader = self.reader
        records: list[RemoteRecord] = [fetched.record for fetched in came if fetched.record is not None]
        reader.tier.renew_soon(found.values, {record.header.profile for record in records})
        if len(found.values) > len(found.parts):
            reader.tier.recall_soon(found.values[-1], len(MARK))
        if not records:
            return
        nbytes = sum(fetched.nbytes for fetched in came)
        reader.typical = nbytes // len(records), codec_label(records[-1].header.codec)
        reader.gate.observe_read(TIER, nbytes, reader.tier.clock() - begun)
        if reader.keep is not None:
            reader.keep(Arrivals(request.namespace, request.tokens[: found.end], records))


def _cancel(tasks: Sequence[Task[Fetched]]) -> None:
    for task in tasks:
        task.cancel()
