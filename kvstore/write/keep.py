"""Keeps blocks that came from the remote tier: they become records of this store, coded as they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from kvstore.codecs import KVView
from kvstore.codecs.groups import GroupedView
from kvstore.core.layout import KVLayout
from kvstore.core.record import FLAG_CUT, FLAG_STATES, FLAG_SUMS, RecordHeader, padded, seal
from kvstore.core.workers import Task, Workers
from kvstore.metrics import Metric
from kvstore.read.block_read import BlockRead
from kvstore.read.decode import BlockDecoder
from kvstore.read.remote import NO_RECORD, Arrivals
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.tiers.admission import SecondRead
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.host import HostRecord
from kvstore.tiers.remote.record import RemoteRecord
from kvstore.write.improve import keeps_tails
from kvstore.write.keep_places import room_for, wanted, with_states
from kvstore.write.plan import PutRequest
from kvstore.write.put import PutPath
from kvstore.write.queue import WriteBatch

_MOST_WAITING = 8  # gets, whose records stay in memory until they are queued
_QUEUE_S = 1.0  # a store that writes more than it can keeps nothing from elsewhere beside it


class Keeper:
    """Puts arrived blocks into the write queue, on a thread of its own, so that no get waits for it. Thread-safe.

    Each record keeps its codec, its profile and its payload, and gets a number of this store. Where a block was put
    meanwhile, nothing is done; where a block before it left, what follows is not kept.

    Args:
        at_once: keep blocks at their first read; otherwise at their second.
        kept: told of the records that are there and in the remote tier, too, and where their sequence ends.
    """

    def __init__(
        self,
        residency: Residency,
        put_path: PutPath,
        decoder: BlockDecoder,
        pool: BufferPool,
        layout: KVLayout,
        at_once: bool,
        kept: Callable[[Sequence[int], int], None],
    ) -> None:
        self._residency = residency
        self._put_path = put_path
        self._decoder = decoder
        self._pool = pool
        self._layout = layout
        self._seen = None if at_once else SecondRead(max(residency.config.host.bytes, 1 << 30))
        self._kept = kept
        self._waiting: deque[Arrivals] = deque()
        self._worker = Workers(1, "kvstore-keep")

    def keep(self, arrivals: Arrivals) -> None:
        """Keep blocks soon; return at once. If many gets wait for that, these are not kept."""
        if self._seen is not None:
            again = [self._seen.again(hash(record.header.key), record.nbytes) for record in arrivals.records]
            if not any(again):
                return
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(arrivals)
            self._worker.start(self._next)

    def wait(self) -> None:
        """Return when the blocks of all gets before are queued, or not to be kept."""
        task = Task(int)  # not `run`, which does not wait on a thread of the store's own: an erase is on one
        self._worker.start(task)
        task.result()

    def close(self) -> None:
        """Keep nothing any more, and end the thread."""
        self._waiting.clear()
        self._worker.close()

    def _next(self) -> None:
        try:
            arrivals = self._waiting.popleft()
        except IndexError:
            return  # the store is being closed
        queue = self._put_path.queue
        arrivals = self._lasting(arrivals)
        if not arrivals.records:
            return
        nbytes = sum(record.header.raw_bytes for record in arrivals.records)
        if queue.wait_for_space(nbytes, _QUEUE_S) is None:
            return
        with self._put_path.paused():
            grouped = self._layout.is_grouped
            blocks = self._grouped(arrivals) if grouped else self._blocks(arrivals)
            if not blocks:
                return
            self._put_path.next_record += len(blocks)
            tokens = arrivals.tokens[: blocks[-1].end]
            bits = np.zeros(len(tokens), np.float32)  # what is stored keeps its own
            for block in blocks:
                bits[block.start : block.end] = block.bits / len(block.tokens)
            numbers = {block.record for block in blocks}
            needs = {block.parent for block in blocks} - numbers - {0}
            keep = grouped and self._keeps_tails(arrivals, blocks)
            if self._residency.arrive(tokens, blocks, bits, needs=needs, keep_tails=keep) is None:
                return
            self._kept([block.record for block in blocks], len(arrivals.tokens))
            queue.submit(WriteBatch(blocks))
        queue.begin()
        self._residency.metrics.add(Metric.REMOTE_KEPT_RECORDS, len(blocks))

    def _lasting(self, arrivals: Arrivals) -> Arrivals:
        """The first of them whose profiles the store keeps, so that they can be read after a restart, too; of a layout
        with windows or states all or none."""
        is_copied, records = self._decoder.profiles.is_copied, arrivals.records
        kept = list(takewhile(lambda record: is_copied(record.header.profile), records))
        if len(kept) == len(records):
            return arrivals
        kept = [] if self._layout.is_grouped else kept
        self._residency.metrics.add(Metric.REMOTE_NOT_KEPT, len(records) - len(kept))
        end = kept[-1].header.start + kept[-1].header.count if kept else 0
        return replace(arrivals, tokens=arrivals.tokens[:end], records=kept)

    def _blocks(self, arrivals: Arrivals) -> list[Block]:
        """Those that are not stored yet and follow what is, with numbers of this store."""
        size, first = self._residency.config.block_tokens, arrivals.records[0].header.start
        match = self._residency.index.match(arrivals.namespace, arrivals.tokens, touch=False)
        stored = match.usable(size) // size if len(match.records) else 0
        if stored * size < first:
            return []  # what they follow left meanwhile
        blocks: list[Block] = []
        parent = int(match.records[stored - 1]) if stored else 0
        new = arrivals.records[stored - first // size :]
        for record in new[: self._residency.most_new_records()]:
            block = self._block(record, self._put_path.next_record + len(blocks), parent)
            if block is None:
                break
            blocks.append(block)
            parent = block.record
        return blocks

    def _grouped(self, arrivals: Arrivals) -> list[Block]:
        """Those of a layout with windows or states that are missing here, or lack something here."""
        new = wanted(arrivals, self._residency, self._layout)
        if len(new) > self._residency.most_new_records():
            return []
        match = self._residency.index.match(arrivals.namespace, arrivals.tokens, touch=False)
        records, blocks = dict(enumerate(match.records.tolist())), list[Block]()
        for i, record in sorted(new.items()):
            block = self._block(record, self._put_path.next_record + len(blocks), records.get(i - 1, 0))
            if block is None:
                return []
            blocks.append(block)
            records[i] = block.record
        return blocks

    def _keeps_tails(self, arrivals: Arrivals, blocks: Sequence[Block]) -> bool:
        """Whether shorter tails stay beside these blocks, as with a put of them."""
        request = PutRequest(self._layout, b"", arrivals.namespace, arrivals.tokens[: blocks[-1].end], 0.0, 0.0, False)
        return keeps_tails(request, blocks, self._residency.index, self._residency.coverage)

    def _block(self, arrived: RemoteRecord, number: int, parent: int) -> Block | None:
        flags = arrived.header.flags & (FLAG_CUT | FLAG_STATES | FLAG_SUMS)
        header = replace(arrived.header, record_id=number, flags=flags)
        buffer = self._pool.take(padded(header.record_bytes))
        buffer.view[: len(arrived.buffer.view)] = arrived.buffer.view
        seal(header, buffer.view)
        view = self._view(arrived, header, HostRecord(header, buffer))
        if view is None:
            return None
        return Block(
            record=number,
            parent=parent,
            key=header.key,
            parent_key=header.parent,
            namespace=header.namespace,
            start=header.start,
            tokens=header.tokens.copy(),
            view=view,
            bits=header.bits,
            expiry=header.expiry,
            pinned=False,
            alone=True,
            cut=header.cut,
            sealed_as=HostRecord(header, buffer),
        )

    def _view(self, arrived: RemoteRecord, header: RecordHeader, record: HostRecord) -> KVView | None:
        """What the block holds: nothing where the record is enough, so that the first token does not wait for its
        being decoded once more. None if it cannot be decoded."""
        if not (self._layout.is_grouped or self._residency.config.device.bytes):
            return KVView.of_nothing(self._layout, header.count)
        grouped = self._grouped_room(header) if self._layout.is_grouped else None
        view = self._room(header) if grouped is None else grouped
        read = BlockRead(NO_RECORD, header.start, header.tokens, header.parent, arrived)
        if not self._decoder.decode(read, header, record.payload, view):
            return None
        return view if grouped is None else with_states(grouped)

    def _grouped_room(self, header: RecordHeader) -> GroupedView:
        has_states = bool(header.flags & FLAG_STATES)
        return room_for(self._layout, header.start, header.count, header.cut, self._pool, has_states)

    def _room(self, header: RecordHeader) -> KVView:
        """Memory for what is decoded."""
        values = self._pool.take(header.raw_bytes)
        return KVView.packed(self._layout, header.count, values.address, values)
