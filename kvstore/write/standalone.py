"""Recodes members so that they stand alone, before the donors that they are coded against go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvstore.codecs import KVView
from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_keys
from kvstore.core.layout import KVLayout
from kvstore.core.tokens import Tokens
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
    """Recodes members of families. Not thread-safe: nobody else may put meanwhile.

    Attributes:
        root: gives the key before the first block of a namespace.
        exact: whether every tier gives back the same values; otherwise those on disk are read.
    """

    residency: Residency
    fetcher: Fetcher
    pool: BufferPool
    layout: KVLayout
    block_tokens: int
    root: Callable[[bytes], bytes]
    exact: bool

    def alone(self, members: Iterable[int], next_record: Callable[[], int]) -> Iterator[WriteBatch]:
        """Put members again as blocks that stand alone, under new numbers, which `next_record` gives.

        Each batch writes the new record and removes the old one in one commit; until then the old one and its donors
        must stay on disk. A member that cannot be read is forgotten and counted.
        """
        for member in members:
            batch = self._alone(member, next_record)
            if batch is not None:
                self.residency.metrics.add(Metric.RECODED_MEMBERS)
                yield batch

    def _alone(self, member: int, next_record: Callable[[], int]) -> WriteBatch | None:
        residency, size = self.residency, self.block_tokens
        path = residency.whole_path(member)
        if path is None:
            return None
        namespace, tokens = path
        start = (len(tokens) - 1) // size * size
        keys = [self.root(namespace), *chain_keys(self.root(namespace), tokens, size)]
        match = residency.index.match(namespace, tokens, touch=False)
        before = residency.index.match(namespace, tokens[:start], touch=False)
        here = tokens[start:].copy()
        view = self._read(member, start, here, keys[-2])
        if view is None:
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
        if residency.arrive(tokens, [block], needs=[member]) is None:
            return None  # it left meanwhile, and what it was coded against may go
        return WriteBatch([block])

    def _read(self, member: int, start: int, tokens: Tokens, parent_key: bytes) -> KVView | None:
        """The member's keys and values; None if it is gone or damaged, in which case it is forgotten."""
        source = self._source(member)
        if source is None:
            self.residency.forget([member], Reason.DAMAGED)
            return None
        buffer = self.pool.take(len(tokens) * self.layout.bytes_per_token)
        view = KVView.packed(self.layout, len(tokens), buffer.address, buffer)
        good, _ = self.fetcher.fetch([BlockRead(member, start, tokens, parent_key, source)], view, origin=start)
        return view if good else None

    def _source(self, member: int) -> Source | None:
        residency = self.residency
        if self.exact or residency.disk is None or residency.queued(member) is not None:
            return residency.find([member])[0]
        return residency.disk.locate([member])[0]
