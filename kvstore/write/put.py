"""What `put` and `delete` do with a sequence that was checked, up to the write queue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvstore.codecs.device import devices_of, follow, publish
from kvstore.config import PAGE_BYTES
from kvstore.core.explanation import Reason
from kvstore.core.guard import PUT, Guard
from kvstore.core.layout import KVLayers
from kvstore.core.loan import reading
from kvstore.core.precedence import Precedence
from kvstore.core.record import padded
from kvstore.core.results import FlushResult, PutResult
from kvstore.core.session_record import SessionRecord
from kvstore.core.tokens import Tokens
from kvstore.core.workers import Task, Workers
from kvstore.errors import UnsupportedCache
from kvstore.metrics import Metric, Metrics
from kvstore.residency.block import Block, most_bytes
from kvstore.residency.sparing import sparing, stored_end
from kvstore.tiers.buffers import BufferPool
from kvstore.trie import Match
from kvstore.write.erase import Erasing
from kvstore.write.improve import improved, keeps_tails
from kvstore.write.plan import MissingBlocks, PutRequest, make_blocks, missing_blocks, view_from
from kvstore.write.queue import Change, WriteBatch
from kvstore.write.recent import RecentBlocks
from kvstore.write.standalone import Recoder

T = TypeVar("T")


@dataclass
class PutPath(Erasing):
    """Makes the missing blocks of a sequence findable, and hands them to the write queue.

    Thread-safe: one put, delete or change of a session at a time; the others wait, but not a use of a session.

    Attributes:
        recoder: makes members stand alone before their donors go.
        recent: the blocks that are exact because they are recent.
        next_record: the number that the next new block gets.
        precedence: of a put over what encodes.
    """

    pool: BufferPool
    metrics: Metrics
    recoder: Recoder
    recent: RecentBlocks
    next_record: int
    precedence: Precedence
    # Guards `next_record` and `_begun`, and that blocks arrive in the order of their numbers.
    _lock: Guard = field(default_factory=lambda: Guard(PUT))
    # Where everything changes that a put, a delete or a session changes: an interrupt of the caller reaches only its
    # wait, and the change is made whole.
    _changes: Workers = field(default_factory=lambda: Workers(1, "kvstore-change"))
    # For what takes the put lock itself, and more than once.
    _whole: Workers = field(default_factory=lambda: Workers(1, "kvstore-erase"))
    _begun: Task[Any] | None = None  # a change whose caller may have been interrupted before it was made

    def put(
        self, request: PutRequest, layers: KVLayers, mutable: bool, session: tuple[bytes, SessionRecord] | None
    ) -> PutResult:
        """Store what is missing of a sequence. Durable as `KVStore.put` promises.

        Args:
            request: the sequence.
            layers: its keys and values, `[heads, n, dim]` views.
            mutable: whether the caller may write into them later; they are copied then.
            session: key and record of the session that stands for this sequence from now on, durable together with it.

        Raises:
            UnsupportedCache: its states do not fit a segment; nothing is changed.
        """
        self._check_states(request)
        devices = devices_of(layers)
        publish(devices)  # other threads copy and encode what this one may still be computing
        with self._lock:
            result, blocks = self._take(request, layers, mutable, session)
        if mutable:
            follow(devices)
        if self.residency.config.durability == "put":
            result = replace(result, dropped_blocks=result.dropped_blocks + self._wait_until_durable(blocks))
        self.metrics.add(Metric.PUT_TOKENS, result.tokens)
        self.metrics.add(Metric.PUT_NEW_TOKENS, result.new_tokens)
        self.metrics.add(Metric.PUT_WAIT_S, result.waited_s)
        return result

    def note(self, key: bytes, record: SessionRecord | None) -> None:
        """Change a session, or delete it (None). Durable after `flush`."""
        with self._lock:
            self._change(self._note, key, record)

    def use_session(self, key: bytes) -> None:
        """Count a use of a session as it is now; a save at the same time is not lost. Durable after `flush`.

        Waits for no put: whatever else changes a session does so on the thread of changes, too.
        """
        use = Task(self._use_session, key)
        self._changes.start(use)
        use.result()
        self.queue.begin()

    def delete(self, namespace: bytes, tokens: Tokens) -> int:
        """Remove a sequence, durably on return; see `KVStore.delete`.

        What was coded against its blocks stands alone on return; where that cannot be written, it is removed, too.

        Returns:
            How many records were removed.

        Raises:
            DiskError: the catalog cannot be written. In memory the sequence is gone all the same.
        """
        with self._lock:
            count, removal = self._change(self._delete, namespace, tokens)
        removal.result()
        return count

    def delete_stored(self, namespace: bytes, tokens: Tokens, spare: int = 0) -> int:
        """Remove a sequence, or what is left of it if nothing continues that; durably on return. See `erase`."""
        with self._lock, sparing(self.residency.index, namespace, tokens[:spare]):
            self.finish()
            end = stored_end(self.residency.index, namespace, tokens) if spare < len(tokens) else 0
            count, entries = self._forget_sequence(namespace, tokens[:end]) if end > spare else (0, list[int]())
        self._remove(entries)
        self.metrics.add(Metric.DELETED_RECORDS, count)
        return count

    def delete_namespace(self, namespace: bytes) -> int:
        """Remove all blocks and sessions of a namespace, durably on return; see `KVStore.delete_namespace`."""
        with self._lock:
            self._change(self._forget_sessions, namespace)
            self.queue.wait()
            records = self.residency.erase_namespace(namespace)
            if self.remote_erasure is not None:
                self.remote_erasure.note(namespace, records)
            members = self._outside_members(records)
            entries = self.residency.forget([*records, *members], Reason.DELETED)
            self.residency.will_remove(entries)
        self._remove(entries)
        self.metrics.add(Metric.DELETED_RECORDS, len(records) + len(members))
        return len(records) + len(members)

    def unpin(self, namespace: bytes, tokens: Tokens) -> bool:
        """Let a pinned sequence be evicted again; see `KVStore.unpin`. Durable after `flush`."""
        with self._lock:
            return self._change(self._unpin, namespace, tokens)

    def flush(self) -> FlushResult:
        """Return when everything that was put or changed before is durable, or dropped and counted."""
        self.finish()
        return self.queue.flush()

    def paused(self) -> Guard:
        """Return a context in which nobody puts or deletes."""
        self.finish()
        return self._lock

    def whole(self, function: Callable[..., T], *arguments: Any) -> T:
        """Make a call that changes things in several steps where an interrupt of the caller does not reach it."""
        return self._whole.run(function, *arguments)

    def finish(self) -> None:
        """Make the change that a call began which was interrupted, if there is one."""
        begun = self._begun
        if begun is not None:
            self._changes.start(begun)  # changes nothing if it was made
            begun.is_done(-1)
            self._begun = None

    def close(self) -> None:
        """Make the changes that were begun, and end the thread that makes them. The queue is still open then."""
        self.finish()
        self._whole.close()
        self._changes.close()

    # ---- changes -------------------------------------------------------------------------------------------------

    def _change(self, function: Callable[..., T], *arguments: Any) -> T:
        """Makes a change on the thread of changes. The caller holds the put lock."""
        self.finish()
        self._begun = task = Task(function, *arguments)
        self._changes.start(task)
        result: T = task.result()
        self._begun = None
        # Not by the change itself: the thread that encodes would keep the caller from going on.
        self.queue.begin()
        return result

    def _note(self, key: bytes, record: SessionRecord | None) -> None:
        self.queue.submit(WriteBatch(sessions=[self.sessions.set(key, record)]))

    def _use_session(self, key: bytes) -> None:
        record = self.sessions.get(key)
        if record is not None:
            self._note(key, replace(record, used=time.time(), hits=record.hits + 1))

    def _forget_sessions(self, namespace: bytes) -> None:
        changes = [self.sessions.set(key, None) for key in self.sessions.keys(namespace)]
        if changes:
            self.queue.submit(WriteBatch(sessions=changes))

    def _delete(self, namespace: bytes, tokens: Tokens) -> tuple[int, Task[None]]:
        """Forgets a sequence; returns how many records went, and the task that takes them out of the catalog."""
        count, entries = self._forget_sequence(namespace, tokens)
        self.metrics.add(Metric.DELETED_RECORDS, count)
        removal = Task(self._remove, entries)
        self.residency.own.start(removal)
        return count, removal

    def _remove(self, records: list[int]) -> None:
        """Removes what was forgotten from the catalog, durably on return; it was noted that this will happen."""
        try:
            if self.residency.disk is not None and records:
                # A tail that the deleted one replaced may still be on disk: it goes with the group in the queue.
                self.queue.wait()
                self.residency.disk.remove(records)
        finally:
            self.residency.has_removed(records)

    def _unpin(self, namespace: bytes, tokens: Tokens) -> bool:
        residency = self.residency
        match = residency.index.match(namespace, tokens, touch=False)
        record = int(match.records[-1]) if match.depth >= len(tokens) else 0
        if not residency.is_pinned(record):
            return False
        residency.unpin(record)
        self.queue.submit(WriteBatch(changed=[(record, None, False)]))
        return True

    def _settle(
        self,
        request: PutRequest,
        match: Match,
        missing: MissingBlocks,
        blocks: list[Block],
        session: tuple[bytes, SessionRecord] | None,
    ) -> bool:
        """Lets everybody find the blocks of a put, and queues them with all else that it changes. False, and nothing is
        changed, if a block before them left."""
        residency = self.residency
        if blocks:
            end = blocks[-1].end
            bits = request.bits if isinstance(request.bits, float) else request.bits[:end]
            there = set(match.records.tolist()[: missing.blocks[-1]]) - {0}
            keep = request.layout.is_grouped and keeps_tails(request, blocks, residency.index, residency.coverage)
            lost = residency.unreadable_among(match.records.tolist())
            replaced = residency.arrive(request.tokens[:end], blocks, bits, needs=there, keep_tails=keep)
            if replaced is None:
                return False
            self.metrics.add(Metric.REPLACED_UNREADABLE, len(lost.intersection(replaced)))
        sessions = [self.sessions.set(*session)] if session is not None else []
        changed = self._extend_lives(request, match, blocks)
        records = self._use(request, match, blocks)
        if blocks or changed or sessions:
            aged = self.recent.moved_on(match, blocks, len(request.tokens))
            self.queue.submit(WriteBatch(blocks, changed, sessions, aged))
        if request.pin:
            # A block that was queued may have become a member just before it was pinned.
            self._stand_alone(self._members_among(records))
        return True

    def _use(self, request: PutRequest, match: Match, blocks: Sequence[Block] = ()) -> list[int]:
        """Counts what is stored of a sequence as used, as a get does it; returns its records. blocks: its new ones."""
        residency, count = self.residency, len(request.tokens)
        if not blocks:  # an insertion is a use by itself
            residency.index.touch(request.namespace, request.tokens)
        records: list[int] = match.records.tolist()
        is_old = match.depth >= count and not (blocks and blocks[-1].end == count)  # its end was stored before
        residency.use(records, count if is_old else 0, put=is_old)
        return records

    def _changes_lives(self, request: PutRequest, match: Match) -> bool:
        """Whether `_extend_lives` may change something of stored records."""
        return request.pin or any(map(self.residency.expiry, match.records.tolist()))

    # ---- the steps of a put --------------------------------------------------------------------------------------

    def _take(
        self, request: PutRequest, layers: KVLayers, mutable: bool, session: tuple[bytes, SessionRecord] | None
    ) -> tuple[PutResult, list[Block]]:
        """Everything up to the queue: (the result for the caller, the blocks that were queued)."""
        residency, count = self.residency, len(request.tokens)
        self.finish()
        residency.expire()
        settled, waited = False, 0.0
        while not settled:  # again where a block that was there left meanwhile: the disk makes space beside us
            request, match, missing = self._plan(request)
            if missing.first_token < request.start:
                self.metrics.add(Metric.PUT_GAPS)
                return PutResult(count, 0, 0, 0, waited, missing_from=missing.first_token), []
            missing, too_many = missing.first(residency.most_new_records())
            self.metrics.add(Metric.DROPPED_NO_ROOM, too_many)
            seconds = self._wait_for_space(request, missing)
            if seconds is None:
                if session is not None:
                    self._change(self._note, *session)
                self.metrics.add(Metric.DROPPED_QUEUE_FULL, len(missing.blocks))
                dropped = len(missing.blocks) + too_many
                return PutResult(count, 0, 0, dropped, residency.config.put_timeout_s), []
            waited += seconds
            # Nothing waits for the queue in here; what is pinned may, while its members are made to stand alone.
            with contextlib.nullcontext() if request.pin else self.precedence.short:
                with reading():
                    blocks = self._blocks(request, match, missing, layers, mutable)
                if not blocks and session is None and not self._changes_lives(request, match):
                    self._use(request, match)
                    break
                settled = self._change(self._settle, request, match, missing, blocks, session)
        new_tokens = sum(len(block.tokens) for block in blocks)
        return PutResult(count, new_tokens, len(blocks), too_many, waited, request.pin), blocks

    def _check_states(self, request: PutRequest) -> None:
        config = self.residency.config
        if not (request.states and config.disk.bytes):
            return
        largest = padded(most_bytes(request.layout, config.block_tokens) + len(request.states))
        if largest > config.segment_bytes - PAGE_BYTES:
            raise UnsupportedCache(
                f"kv: the states take {len(request.states)} bytes, and with their block up to {largest}, more than a "
                f"segment of {config.segment_bytes}; make the store with larger segment_bytes"
            )

    def _plan(self, request: PutRequest) -> tuple[PutRequest, Match, MissingBlocks]:
        """(the request, without its pin where that is refused; what is stored of the sequence; what is missing).

        Before a sequence is pinned its members stand alone: a pinned record must not go with a donor that is not
        pinned.
        """
        residency = self.residency
        match, missing = self._look(request)
        if request.pin and not self._may_pin(request, match, missing):
            self.metrics.add(Metric.REFUSED_PINS)
            request = replace(request, pin=False)
        members = self._members_among(match.records.tolist()) if request.pin else []
        lost = residency.unreadable_among(match.records.tolist())
        if members:
            self._change(self._stand_alone, members)
        if lost and residency.members_of(lost):
            self._change(residency.drop_members, lost)
        if members or lost:
            match, missing = self._look(request)
        return request, match, missing

    def _look(self, request: PutRequest) -> tuple[Match, MissingBlocks]:
        residency = self.residency
        match = residency.index.match(request.namespace, request.tokens, touch=False)
        records = match.records.tolist()
        # What stands before the given keys and values stays as it is.
        first = -(-request.start // residency.config.block_tokens)
        again = residency.unwritten_among(records) | residency.unreadable_among(records[first:])
        if request.layout.is_grouped:
            again |= improved(request, match, residency.index, residency.coverage, residency.config.block_tokens)
        return match, missing_blocks(match, len(request.tokens), residency.config.block_tokens, again)

    def _may_pin(self, request: PutRequest, match: Match, missing: MissingBlocks) -> bool:
        """Whether pins may keep this sequence, too. What is not written yet may take all of its raw bytes, and so may a
        member, which is to be written again."""
        residency, size, count = self.residency, self.residency.config.block_tokens, len(request.tokens)
        paged = residency.holds_pages
        needed = sum(most_bytes(request.layout, min(size, count - index * size), paged) for index in missing.blocks)
        needed += len(request.states) if missing.blocks else 0
        new = set(missing.blocks)
        for index, record in enumerate(match.records.tolist()):
            if record and index not in new and not residency.is_kept(record):
                member = bool(residency.donors_of(record))
                needed += most_bytes(request.layout, size, paged) if member else residency.size_of(record)
        return not needed or residency.pinned_bytes + needed <= residency.pin_budget

    def _wait_for_space(self, request: PutRequest, missing: MissingBlocks) -> float | None:
        """Waits until the missing blocks fit the queue; the seconds that it took, None if it took too long."""
        if not missing.blocks:
            return 0.0
        nbytes = (len(request.tokens) - missing.first_token) * request.layout.bytes_per_token + len(request.states)
        return self.queue.wait_for_space(nbytes, self.residency.config.put_timeout_s)

    def _blocks(
        self, request: PutRequest, match: Match, missing: MissingBlocks, layers: KVLayers, mutable: bool
    ) -> list[Block]:
        """Makes the missing blocks."""
        size = self.residency.config.block_tokens
        if not missing.blocks:
            return []
        view = view_from(request, layers, missing.first_token, self.pool if mutable else None)
        replaced = self._replaced(match, missing, len(request.tokens))
        pinned = {index for index, record in replaced.items() if self.residency.is_pinned(record)}
        lives = {index: self.residency.expiry(record) for index, record in replaced.items()}
        blocks = list(make_blocks(request, match, missing, view, self.next_record, size, pinned, lives))
        self.next_record += len(blocks)
        return blocks

    def _replaced(self, match: Match, missing: MissingBlocks, tokens: int) -> dict[int, int]:
        """The records of the same tokens that missing blocks take the place of, by index: their write failed, or they
        cannot be decoded here. They stay pinned, and live no shorter."""
        size = self.residency.config.block_tokens
        records, ends = match.records.tolist(), match.ends.tolist()
        here = [index for index in missing.blocks if index < len(records) and records[index]]
        same = [index for index in here if ends[index] == min(tokens, (index + 1) * size) <= match.depth]
        return {index: records[index] for index in same}

    def _extend_lives(self, request: PutRequest, match: Match, blocks: list[Block]) -> list[Change]:
        """What changes for records that were stored already: a prefix lives as long as anything that continues it,
        and a pin on a stored sequence pins its last record. Returns the changes for the catalog."""
        residency = self.residency
        changed: dict[int, Change] = {}
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

    def _wait_until_durable(self, blocks: list[Block]) -> int:
        """Waits until the blocks are written; returns how many of them could not be."""
        self.queue.wait()  # not flush: the counts since the last one are the user's
        disk = self.residency.disk
        return sum(not disk.holds(block.record) for block in blocks) if disk is not None else 0

    # ---- the steps of a delete, and members ----------------------------------------------------------------------

    def _forget_sequence(self, namespace: bytes, tokens: Tokens) -> tuple[int, list[int]]:
        """Forgets a sequence in memory: (how many records went, those that `_remove` has to remove)."""
        residency = self.residency
        records, left = residency.erase(namespace, tokens), list[int]()
        if self.remote_erasure is not None:
            self.remote_erasure.note(namespace, records, tokens)
        if self._outside_members(records):
            # Those on their way to the disk arrive there first: they can be read again only with their donors.
            self.queue.wait()
            members = self._outside_members(records)
            self._stand_alone(members)
            self.queue.wait()
            left = self._left(members)
        gone = [*residency.forget(records, Reason.DELETED), *residency.forget(left, Reason.DROPPED)]
        residency.will_remove(gone)
        return len(records) + len(left), gone

    def _left(self, members: list[int]) -> list[int]:
        """Members that are still stored as they were, for nothing could be written in their place."""
        disk = self.residency.disk
        left = [member for member in members if disk is not None and disk.holds(member)]
        if left:
            self.metrics.add(Metric.DROPPED_MEMBERS, len(left))
        return left

    def _members_among(self, records: list[int]) -> list[int]:
        """Those of these records that are coded against others."""
        return [record for record in records if self.residency.donors_of(record)]

    def _outside_members(self, records: list[int]) -> list[int]:
        """What is coded against these records and is none of them."""
        gone = set(records)
        return [member for member in self.residency.members_of(records) if member not in gone]

    def _stand_alone(self, members: list[int]) -> None:
        for batch in self.recoder.alone(members, self._number):
            # Otherwise a donor of many would have all its members in memory at once.
            self.queue.wait_for_space(batch.nbytes, self.residency.config.put_timeout_s)
            self.queue.submit(batch)

    def _number(self) -> int:
        self.next_record += 1
        return self.next_record - 1
