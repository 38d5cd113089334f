"""What happens to the blocks of a store, as events of its tiers.

Calls of the store only append to a queue, under locks of the tiers, so that their order is right; `take` makes events
of it, on a thread of the publisher's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.core.keys import namespace_digest
from kvstore.core.record import NO_KEY, key_tag
from kvstore.core.tokens import Tokens
from kvstore.core.waiting import Flag
from kvstore.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvstore.metrics import Metric
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.tiers.memory import MemoryTier

MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
_EVERYWHERE = ""


@dataclass
class _Known:
    """A block that was told of. name: the first 8 bytes of its key; after: of the block before it, None for a first.
    media: where it is. told: whether its tokens were."""

    name: int
    after: int | None
    tokens: Sequence[int]
    namespace: bytes
    media: set[str]
    told: bool = False


_Change = tuple[str, int, bool, Block | None]  # tier, record, whether it is there, the block if it is new


class BlockWatch:
    """The changes of a store since they were taken last. `take` is for one thread; the store's threads do the rest.

    Args:
        most: so many changes may wait. What is more is dropped and counted (`dropped_events`); then everything is told
            anew.
    """

    def __init__(self, residency: Residency, most: int) -> None:
        self._residency = residency
        self._most = most
        self._changes: deque[_Change] = deque()
        self._known: dict[int, _Known] = {}
        self._is_lost = True  # what was told is not complete; it is not at first
        self.news = Flag()
        self._default = namespace_digest(b"")
        self._memory: tuple[MemoryTier[Any], ...] = (residency.device, residency.host)

    def begin(self) -> None:
        """Be told of changes from now on."""
        residency = self._residency
        residency.listen(arrived=self._arrived, forgotten=self._forgotten)
        residency.on_written(self._written)
        for tier in self._memory:
            tier.told = self._changed
        self.news.set()

    def end(self) -> None:
        """Be told no more."""
        residency = self._residency
        for tier in self._memory:
            tier.told = None
        residency.unlisten(self._arrived, self._forgotten)
        self._most = 0  # what is written is still told, and goes nowhere

    def take(self) -> list[Event]:
        """Return what is new."""
        self.news.clear()
        events: list[Event] = []
        if self._is_lost:
            self._is_lost = False
            self._changes.clear()
            self._known.clear()
            events.append(AllBlocksCleared())
            events += self._stored(self._all())
        changes: list[_Change] = []
        while self._changes:
            changes.append(self._changes.popleft())
        for is_there, run in _runs(changes):
            events += self._stored(run) if is_there else self._removed(run)
        return events

    # ---- on threads of the store ---------------------------------------------------------------------------------

    def _changed(self, tier: str, record: int, is_there: bool, block: Block | None = None) -> None:
        if len(self._changes) >= self._most:
            if self._most:
                self._is_lost = True
                self._residency.metrics.add(Metric.DROPPED_EVENTS)
        else:
            self._changes.append((tier, record, is_there, block))
        self.news.set()

    def _arrived(self, record: int) -> None:
        block = self._residency.queued(record)
        if block is not None and len(block.tokens) == self._residency.config.block_tokens:
            self._changed(_EVERYWHERE, record, True, block)

    def _forgotten(self, record: int) -> None:
        self._changed(_EVERYWHERE, record, False)

    def _written(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if self._residency.disk is not None and self._residency.disk.holds(block.record):
                self._changed("disk", block.record, True)

    # ---- on the thread that takes --------------------------------------------------------------------------------

    def _all(self) -> list[_Change]:
        """Everything that the store has now."""
        residency, size = self._residency, self._residency.config.block_tokens
        found: list[_Change] = []
        if residency.disk is not None:
            scan, at = residency.disk.catalog.scan(), 0
            digests = {number: digest for digest, number in residency.disk.namespaces.items()}
            for row in scan.entries:
                count = int(row["count"])
                tokens, at = scan.tokens[at : at + count], at + count
                record = int(row["record"])
                if count == size and record in residency.index:
                    after = int(row["parent_tag"]) if row["start"] else None
                    namespace = digests.get(int(row["namespace"]), NO_KEY)
                    self._known[record] = _Known(int(row["tag"]), after, tokens.tolist(), namespace, set())
                    found.append(("disk", record, True, None))
        for record, block in residency.census().queued.items():
            if len(block.tokens) == size:
                found.append((_EVERYWHERE, record, True, block))
        for record in residency.host.sizes()[1]:
            held = residency.host.get(record)
            if held is not None and record not in self._known and held.header.count == size:
                head = held.header
                self._known[record] = _known(head.key, head.parent, head.start, head.tokens, head.namespace)
        for tier in self._memory:
            found += [(tier.name, record, True, None) for record in tier.sizes()[1]]
        return found

    def _stored(self, changes: Iterable[_Change]) -> Iterator[Event]:
        """Blocks that are in a tier now, those that follow each other in one event."""
        run: list[_Known] = []
        where = ""
        for tier, record, _, block in changes:
            if block is not None and record not in self._known:
                self._known[record] = _known(block.key, block.parent_key, block.start, block.tokens, block.namespace)
            known, medium = self._known.get(record), MEDIA.get(tier)
            if known is None or medium is None or medium in known.media:
                continue
            known.media.add(medium)
            if run and (where, run[-1].name, run[-1].told) != (medium, known.after, known.told):
                yield self._event(run, where)
                run = []
            run.append(known)
            where = medium
        if run:
            yield self._event(run, where)

    def _event(self, run: Sequence[_Known], medium: str) -> BlockStored:
        first, names = run[0], [known.name for known in run]
        tokens = [] if first.told else [token for known in run for token in known.tokens]
        extra = None if first.namespace == self._default else [[first.namespace.hex()]] * len(run)
        for known in run:
            known.told, known.tokens = True, ()
        size = self._residency.config.block_tokens
        return BlockStored(names, first.after, tokens, size, medium=medium, extra_keys=extra)

    def _removed(self, changes: Iterable[_Change]) -> Iterator[Event]:
        gone: dict[str, list[int]] = {}
        for tier, record, _, _ in changes:
            known = self._known.get(record)
            if known is None:
                continue
            if tier == _EVERYWHERE:
                del self._known[record]
            left = known.media if tier == _EVERYWHERE else known.media & {MEDIA[tier]}
            for medium in sorted(left):
                gone.setdefault(medium, []).append(known.name)
            known.media -= left
        for medium, names in gone.items():
            yield BlockRemoved(names, medium)


def _known(key: bytes, parent: bytes, start: int, tokens: Tokens, namespace: bytes) -> _Known:
    return _Known(key_tag(key), key_tag(parent) if start else None, tokens.tolist(), namespace, set())


def _runs(changes: Sequence[_Change]) -> Iterator[tuple[bool, list[_Change]]]:
    """What came and what went, by turns."""
    run: list[_Change] = []
    for change in changes:
        if run and run[-1][2] != change[2]:
            yield run[-1][2], run
            run = []
        run.append(change)
    if run:
        yield run[-1][2], run
