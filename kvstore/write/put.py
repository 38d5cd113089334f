"""The way in: what `put` does with a sequence that was checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore.core.explanation import Reason
from kvstore.core.guard import PUT, Guard
from kvstore.core.layout import KVLayers
from kvstore.core.results import PutResult
from kvstore.core.session_record import SessionRecord
from kvstore.metrics import Metric, Metrics
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.residency.sessions import SessionTable
from kvstore.tiers.buffers import BufferPool
from kvstore.trie import Match
from kvstore.write.plan import PutRequest, make_blocks, missing_blocks, view_from
from kvstore.write.queue import WriteBatch, WriteQueue
from kvstore.write.standalone import Recoder


@dataclass
class Intake:
    """Takes blocks in: makes them findable and hands them to the write-behind threads. Thread-safe: one put at a time.

    recoder: makes members stand alone. next_record: the number that the next new block gets.
    """

    residency: Residency
    writer: WriteQueue
    sessions: SessionTable
    pool: BufferPool
    metrics: Metrics
    recoder: Recoder
    next_record: int
    # Guards `next_record`, and that blocks arrive in the order of their numbers.
    _lock: Guard = field(default_factory=lambda: Guard(PUT))

    def put(
        self, request: PutRequest, layers: KVLayers, mutable: bool, session: tuple[bytes, SessionRecord] | None
    ) -> PutResult:
        """layers: the whole sequence's `[heads, n, dim]` views, copied where `mutable`. session: what is to stand for
        this sequence from now on, durable together with it."""
        with self._lock:
            result, blocks = self._take(request, layers, mutable, session)
        if self.residency.config.durability == "put":
            self.writer.wait()  # not flush: the counts since the last one are the user's
            disk = self.residency.disk
            lost = sum(not disk.holds(block.record) for block in blocks) if disk is not None else 0
            result = replace(result, dropped_blocks=result.dropped_blocks + lost)
        self.metrics.add(Metric.PUT_TOKENS, result.tokens)
        self.metrics.add(Metric.PUT_NEW_TOKENS, result.new_tokens)
        self.metrics.add(Metric.PUT_WAIT_S, result.waited_s)
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody puts or deletes meanwhile."""
        with self._lock:
            yield

    def note(self, key: bytes, record: SessionRecord | None) -> None:
        """Changes or (None) deletes a session."""
        with self._lock:
            self.writer.submit(WriteBatch(sessions=[self.sessions.set(key, record)]))

    def delete(self, namespace: bytes, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> tuple[int, list[int]]:
        """Forgets a sequence (see `KVStore.delete`) in memory; returns how many records went, and those whose entries
        are to go. What was coded against them stands alone, durably, on return, or, where that cannot be written, is
        among them."""
        residency = self.residency
        with self._lock:
            records, left = residency.erase(namespace, tokens), list[int]()
            if self._members_of(records):
                # Those on their way to the disk arrive there first: they can be read again only with their donors.
                self.writer.wait()
                members = self._members_of(records)
                self._stand_alone(members)
                self.writer.wait()
                left = self._left(members)
            gone = [*residency.forget(records, Reason.DELETED), *residency.forget(left, Reason.DROPPED)]
            return len(records) + len(left), gone

    def _left(self, members: list[int]) -> list[int]:
        """Members that are still stored as they were, for nothing could be written in their place."""
        disk = self.residency.disk
        left = [member for member in members if disk is not None and disk.holds(member)]
        if left:
            self.metrics.add(Metric.DROPPED_MEMBERS, len(left))
        return left

    def _members_of(self, records: list[int]) -> list[int]:
        """What is coded against these records and is none of them."""
        gone = set(records)
        return [member for member in self.residency.members_of(records) if member not in gone]

    def _stand_alone(self, members: list[int]) -> None:
        for job in self.recoder.alone(members, self._number):
            # Or a donor of many would have all its members in memory at once.
            self.writer.wait_for_room(job.nbytes, self.residency.config.put_timeout_s)
            self.writer.submit(job)

    def _number(self) -> int:
        self.next_record += 1
        return self.next_record - 1

    def _take(
        self, request: PutRequest, layers: KVLayers, mutable: bool, session: tuple[bytes, SessionRecord] | None
    ) -> tuple[PutResult, list[Block]]:
        residency, config = self.residency, self.residency.config
        residency.expire()
        count = len(request.tokens)
        match = residency.index.match(request.namespace, request.tokens, touch=False)
        members = [r for r in match.records.tolist() if residency.donors_of(r)] if request.pin else []
        if members:
            # A pinned record must not go with a donor that is not pinned.
            self._stand_alone(members)
            match = residency.index.match(request.namespace, request.tokens, touch=False)
        missing = missing_blocks(match, count, config.block_tokens, residency.unwritten_among(match.records.tolist()))
        layout = request.layout
        raw = (count - missing.first_token) * layout.bytes_per_token
        waited = self.writer.wait_for_room(raw, config.put_timeout_s) if missing.blocks else 0.0
        sessions = [self.sessions.set(*session)] if session is not None else []
        if waited is None:
            if sessions:
                self.writer.submit(WriteBatch(sessions=sessions))
            self.metrics.add(Metric.DROPPED_QUEUE_FULL, len(missing.blocks))
            return PutResult(count, 0, 0, len(missing.blocks), config.put_timeout_s), []
        blocks: list[Block] = []
        if missing.blocks:
            if any(residency.is_pinned(record) for record in match.records.tolist()[missing.blocks[-1] :]):
                request = replace(request, pin=True)  # it is stored again, and stays pinned
            view = view_from(layout, layers, missing.first_token, self.pool if mutable else None)
            blocks = list(make_blocks(request, match, missing, view, self.next_record, config.block_tokens))
            self.next_record += len(blocks)
            end = blocks[-1].end
            bits = request.bits if isinstance(request.bits, float) else request.bits[:end]
            residency.arrive(request.tokens[:end], blocks, bits)
        else:
            residency.index.touch(request.namespace, request.tokens)  # an insertion is a use by itself
        changed = self._extend_lives(request, match, blocks)
        residency.touch(match.records.tolist())
        residency.use_donors_of(match.records.tolist())
        if blocks or changed or sessions:
            self.writer.submit(WriteBatch(blocks, changed, sessions))
        if request.pin:
            # A block that was queued may have become a member just before it was pinned.
            match = residency.index.match(request.namespace, request.tokens, touch=False)
            self._stand_alone([r for r in match.records.tolist() if residency.donors_of(r)])
        return PutResult(count, sum(len(block.tokens) for block in blocks), len(blocks), 0, waited), blocks

    def _extend_lives(
        self, request: PutRequest, match: Match, blocks: list[Block]
    ) -> list[tuple[int, float | None, bool]]:
        """What changes for records that were stored already: a prefix lives as long as anything that continues it,
        and a pin on a stored sequence pins its last record. Returns the changes for the catalog."""
        residency = self.residency
        changed: dict[int, tuple[int, float | None, bool]] = {}
        records = [r for r in match.records.tolist() if r and r in residency.index]
        for record in records:
            expiry = residency.expiry(record)
            if expiry and (not request.expiry or expiry < request.expiry):
                residency.set_expiry(record, request.expiry)
                changed[record] = (record, request.expiry, residency.is_pinned(record))
        covered = records and match.depth >= len(request.tokens) and not (blocks and blocks[-1].pinned)
        if request.pin and covered and not residency.is_pinned(records[-1]):
            residency.pin(records[-1])
            changed[records[-1]] = (records[-1], residency.expiry(records[-1]), True)
        return list(changed.values())
