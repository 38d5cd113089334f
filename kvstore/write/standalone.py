"""Makes members stand alone, before what they are coded against goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvstore.codecs import KVView
from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_keys
from kvstore.core.layout import KVLayout
from kvstore.metrics import Metric
from kvstore.read.block_read import BlockRead
from kvstore.read.fetch import Fetcher
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.tiers.base import Source
from kvstore.tiers.buffers import BufferPool
from kvstore.write.queue import WriteBatch


@dataclass(frozen=True)
class Recoder:
    """The caller sees to it that nobody else puts meanwhile. root: the key before the first block of a namespace.
    exact: every tier has the same values; else those on disk are read."""

    residency: Residency
    fetcher: Fetcher
    pool: BufferPool
    layout: KVLayout
    block_tokens: int
    root: Callable[[bytes], bytes]
    exact: bool

    def alone(self, members: Iterable[int], next_record: Callable[[], int]) -> Iterator[WriteBatch]:
        """Takes members in again as blocks that stand alone, found from here on under the numbers of `next_record`.

        Each is a batch that writes the new record and removes the old one in one commit: until then the old one and its
        donors must stay on disk. A member that cannot be read is gone, which is counted.
        """
        for member in members:
            batch = self._alone(member, next_record)
            if batch is not None:
                self.residency.metrics.add(Metric.RECODED_MEMBERS)
                yield batch

    def _alone(self, member: int, next_record: Callable[[], int]) -> WriteBatch | None:
        residency, size = self.residency, self.block_tokens
        try:
            namespace, tokens = residency.index.path(member)
        except KeyError:
            return None
        start = (len(tokens) - 1) // size * size
        keys = [self.root(namespace), *chain_keys(self.root(namespace), tokens, size)]
        match = residency.index.match(namespace, tokens, touch=False)
        before = residency.index.match(namespace, tokens[:start], touch=False)
        source = self._source(member)
        if source is None:
            residency.forget([member], Reason.DAMAGED)
            return None
        here = tokens[start:].copy()
        room = self.pool.take(len(here) * self.layout.bytes_per_token)
        view = KVView.packed(self.layout, len(here), room.address, room)
        good, _ = self.fetcher.fetch([BlockRead(member, start, here, keys[-2], source)], view, origin=start)
        if not good:
            return None
        block = Block(
            record=next_record(),
            parent=int(before.records[-1]) if start else 0,
            key=keys[-1],
            parent_key=keys[-2],
            namespace=namespace,
            start=start,
            tokens=here,
            view=view,
            bits=max(0.0, match.bits - before.bits),
            expiry=residency.expiry(member),
            pinned=residency.is_pinned(member),
            alone=True,
        )
        residency.arrive(tokens, [block])
        return WriteBatch([block])

    def _source(self, member: int) -> Source | None:
        residency = self.residency
        if self.exact or residency.disk is None or residency.is_pending(member):
            return residency.find([member])[0]
        return residency.disk.locate([member])[0]
