"""What is known of every record but its bytes: queued, replaced, pinned, with an end of life, whose member.

The index (trie) names the records; the ledger keeps the rest, and both change together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np
import numpy.typing as npt

from kvstore.config import StoreConfig
from kvstore.core.explanation import Reason
from kvstore.core.guard import RESIDENCY, Guard
from kvstore.core.tokens import Tokens
from kvstore.metrics import Metrics
from kvstore.residency.block import Block, StoredBlock, most_bytes
from kvstore.residency.census import Census
from kvstore.residency.coverage import Coverage
from kvstore.residency.departures import Departures
from kvstore.residency.donor_rule import may_be_donor
from kvstore.residency.expiry import Expiry
from kvstore.residency.families import Families
from kvstore.residency.holes import Holes, LostBlock
from kvstore.residency.pending import Pending
from kvstore.residency.pins import Pins
from kvstore.residency.savings import Savings
from kvstore.trie import UNIFORM_BITS_PER_TOKEN, TrieIndex
from kvstore.trie.content import ContentIndex

Bits = npt.NDArray[np.float32] | float


@dataclass
class Ledger:
    """Keeps what is known of every record but its bytes, and changes the index with it. Thread-safe.

    Attributes:
        config: the settings of the store.
        index: names the records by their tokens.
        content: finds blocks that others may be coded against; None if none may. Everybody else only looks things up
            in it.

    Example:
        >>> ledger = Ledger(StoreConfig(), TrieIndex(64), Metrics())
        >>> block = StoredBlock(7, 0, b"n" * 32, start=0, tokens=np.arange(3, dtype=np.uint32), expiry=0.0)
        >>> ledger.arrive(block.tokens, [block])
        []
        >>> ledger.path(7), ledger.is_kept(7)
        ([7], False)

    One lock, `_lock`, guards what is said so below: whoever changes any of it holds the lock, so that every change is
    seen whole. Reading one record's entry of a dict or a set is a single step and needs no lock. The index, the
    content index, the tiers and the families have locks of their own, which are taken below this one; the put lock and
    the disk's locks are taken above it (`guard`), so the disk's writing methods are never called while it is held.
    """

    config: StoreConfig
    index: TrieIndex
    metrics: Metrics
    content: ContentIndex | None = None

    def __post_init__(self) -> None:
        self._lock = Guard(RESIDENCY)
        # Taken and not yet written. Guarded by _lock.
        self._pending = Pending()
        # In memory only, for their write failed: a put of the same tokens writes them again. Guarded by _lock.
        self._unwritten: set[int] = set()
        # Stored records that a newer one is to replace, by that one: they go when it is written. Guarded by _lock.
        self._replaced: dict[int, list[int]] = {}
        # Stored records whose replacement left before it was written: they go next. Guarded by _lock.
        self._abandoned: list[int] = []
        # Which blocks those are that only memory has. Guarded by _lock.
        self._memory_only: dict[int, LostBlock] = {}
        # Forgotten records that a call is about to remove from the catalog, and how many calls are. Guarded by _lock.
        self._leaving: Counter[int] = Counter()
        self._keeps_holes = False  # whether there is a catalog to keep them in; set once, before anything arrives
        self.departures = Departures()  # it has a lock of its own
        self._pins = Pins(self._path_with_holes, self.size_of)  # guarded by _lock
        self._expiry = Expiry()  # guarded by _lock
        self.coverage = Coverage()  # changed under _lock
        self.holes = Holes(self.index, self._lock, self.config.block_tokens, self._waiting_to_go)
        self._families = Families()  # changed under _lock; it has its own for readers
        self.savings = Savings(wanted=self.config.eviction not in ("lru", "lfu"))
        # Called with every record that is put, and that is gone; after _lock is released. Replaced as a whole.
        self._arrived: tuple[Callable[[int], None], ...] = ()
        self._forgotten: tuple[Callable[[int], None], ...] = ()

    def listen(
        self, arrived: Callable[[int], None] | None = None, forgotten: Callable[[int], None] | None = None
    ) -> None:
        """Call these from now on with every record that arrives, and that is gone; in any order, on any thread."""
        with self._lock:
            self._arrived += (arrived,) if arrived else ()
            self._forgotten += (forgotten,) if forgotten else ()

    def unlisten(self, arrived: Callable[[int], None], forgotten: Callable[[int], None]) -> None:
        """End `listen`; a call that is under way may still come."""
        with self._lock:
            self._arrived = tuple(listener for listener in self._arrived if listener != arrived)
            self._forgotten = tuple(listener for listener in self._forgotten if listener != forgotten)

    def path(self, record: int) -> list[int]:
        """The records of the prefix that ends with this one, root first; [] where the index does not know it."""
        return [r for r in self._path_with_holes(record) if r]

    def whole_path(self, record: int) -> tuple[bytes, Tokens] | None:
        """(namespace, all tokens up to the record's end); None where the index does not know it."""
        try:
            return self.index.path(record)
        except KeyError:
            return None

    def queued_records(self) -> int:
        """How many records are not written yet."""
        return len(self._pending)

    def queued(self, record: int) -> Block | None:
        """The block, if it is not written yet."""
        return self._pending.get(record)

    def unwritten_among(self, records: Iterable[int]) -> frozenset[int]:
        """Those whose write failed."""
        return frozenset(self._unwritten.intersection(records) if self._unwritten else ())

    def is_pinned(self, record: int) -> bool:
        """Whether a pinned sequence ends with the record."""
        return self._pins.is_pinned(record)

    def is_kept(self, record: int) -> bool:
        """Whether the record, or one that continues it, is pinned."""
        return self._pins.is_kept(record)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all records that pins keep; what is not written yet counts with its keys and values as they are."""
        return self._pins.nbytes

    def pin_stats(self) -> dict[str, int]:
        """sequences: pinned ones. bytes: see `pinned_bytes`."""
        return {"sequences": len(self._pins), "bytes": self.pinned_bytes}

    def size_of(self, record: int) -> int:
        """Bytes that a record takes, or may take when it is written; 0 where it is unknown."""
        block = self._pending.get(record)
        if block is None:
            return 0
        return most_bytes(block.view.layout, len(block.tokens), self.holds_pages) + block.view.state_bytes

    @property
    def holds_pages(self) -> bool:
        """Whether the tier that holds most has records of whole pages, and not tensors on a device."""
        return bool(self.config.disk.bytes) or self.config.host.bytes >= self.config.device.bytes

    def donors_of(self, record: int) -> tuple[int, ...]:
        """What the record is coded against, in the order of its own table; () for one that stands alone."""
        return self._families.donors(record)

    def members_of(self, records: Iterable[int]) -> list[int]:
        """What is coded against these records, by number. Whoever joins later finds that they left, if they did."""
        with self._lock:
            return sorted({member for record in records for member in self._families.members(record)})

    def family_stats(self) -> dict[str, int]:
        """members: records coded against others. donors: records that others need."""
        return self._families.stats()

    def expiry(self, record: int) -> float:
        """Unix seconds; 0 for never."""
        return self._expiry.of(record)

    def is_expired(self, record: int) -> bool:
        """Whether the record is past its time."""
        return self._expiry.is_over(record)

    # ---- arriving ------------------------------------------------------------------------------------------------

    def arrive(
        self,
        tokens: Tokens,
        blocks: Sequence[Block] | Sequence[StoredBlock],
        bits: Bits = UNIFORM_BITS_PER_TOKEN,
        needs: Iterable[int] = (),
        keep_tails: bool = False,
    ) -> list[int] | None:
        """Makes blocks of one sequence findable; returns the records that they replace, which are forgotten.

        tokens: of the sequence, to the end of the last block. Blocks that are queued wait for `written`; what they
        replace stays on disk until then. Blocks are pinned if they say so. needs: records that the caller takes to be
        there; None, and nothing is changed, where one of them left meanwhile. keep_tails: shorter tails stay, for they
        hold tokens of windows that the blocks lack.
        """
        last = blocks[-1]
        with self._lock:
            if any(record not in self.index for record in needs):
                return None
            for block in blocks:
                if block.queued is not None:
                    self._pending[block.record] = block.queued  # first: a reader that the index sends here must find it
                self._expiry.set(block.record, block.expiry)
                self.coverage.set(block.record, block.cut, block.has_states)
            self.savings.arrived(blocks)
            ends = np.array([block.end for block in blocks], np.uint32)
            numbers = np.array([block.record for block in blocks], np.uint64)
            pinned = self._to_pin(tokens, blocks)
            inserted = self.index.insert(last.namespace, tokens, ends, numbers, bits=bits, keep_tails=keep_tails)
            replaced: list[int] = inserted.tolist()
            stored = [old for record in replaced for old in (*self._replaced.pop(record, ()), record)]
            if stored and last.queued is not None and self.config.disk.bytes:
                self._replaced[last.record] = stored
            for record, again in pinned.items():  # before what they replace goes: what both keep is always kept
                self._pin(record, again)
            for record in replaced:
                self._forget(record)
            for block in blocks:
                if block.queued is None:
                    if block.donors:
                        self._families.add(block.record, block.donors)
                    self._offer(block)
            self._pins.arrived()
            self.departures.arrived(block.queued.key for block in blocks if block.queued is not None)
        self._tell(self._forgotten, replaced)
        self._tell(self._arrived, [block.record for block in blocks])
        return replaced

    def replaced_by(self, blocks: Sequence[Block]) -> tuple[list[int], list[int]]:
        """(stored records that are to go, the blocks that must be written for that)."""
        old = self._replaced.get(blocks[-1].record, []) if blocks else []
        return list(old), [block.record for block in blocks]

    def _waiting_to_go(self, coming: Container[int]) -> set[int]:
        """What is to be replaced by blocks that wait to be written, and are not `coming` to the disk now."""
        self._lock.check_held()
        waits = (olds for last, olds in self._replaced.items() if last in self._pending and last not in coming)
        return {old for olds in waits for old in olds}

    def _left_queue(self, blocks: Sequence[Block], on_disk: set[int]) -> list[int]:
        """The blocks of one put are queued no more; returns those that are wanted and not on disk."""
        lost = []
        with self._lock:
            if blocks and on_disk.issuperset(block.record for block in blocks):
                self._replaced.pop(blocks[-1].record, None)
            for block in blocks:
                wanted = self._pending.pop(block.record, None) is not None
                if wanted and block.record not in on_disk:
                    lost.append(block.record)
                    self._memory_only[block.record] = LostBlock.of(block)
                    self._could_not_write(block.record)
        return lost

    def _could_not_write(self, record: int) -> None:
        self._lock.check_held()
        if not self.config.disk.bytes:
            return
        self._unwritten.add(record)
        self.holes.note(self._memory_only[record])
        self._families.remove(record)  # what memory holds of it needs no donor
        if self.content is not None:
            self.content.remove(record)

    def pin(self, record: int) -> None:
        """The record, and what comes before it, is never evicted."""
        with self._lock:
            self._pin(record)

    def unpin(self, record: int) -> None:
        """A pinned record may be evicted from now on, unless another pin keeps it."""
        with self._lock:
            self.index.unpin(*self.index.path(record))
            self._no_longer_kept(self._pins.end(record))

    def _to_pin(self, tokens: Tokens, blocks: Sequence[Block] | Sequence[StoredBlock]) -> dict[int, bool]:
        """Records of arriving blocks that are pinned: whether the index has that pin already, for they take the place
        of pinned ones."""
        listed = [block for block in blocks if block.pinned]
        if not listed:
            return {}
        match = self.index.match(listed[0].namespace, tokens, touch=False)
        found = zip(match.ends.tolist(), match.records.tolist(), strict=True)
        there = {end: record for end, record in found if end <= match.depth}  # the last may be of other tokens
        return {block.record: self._pins.is_pinned(there.get(block.end, 0)) for block in listed}

    def _pin(self, record: int, again: bool = False) -> None:
        self._lock.check_held()
        if not again:
            self.index.pin(*self.index.path(record))
        self._pins.add(record)

    def _no_longer_kept(self, records: Sequence[int]) -> None:
        """Called with records that pins kept until now."""

    def set_expiry(self, record: int, expiry: float) -> None:
        """expiry: unix seconds; 0 for never."""
        with self._lock:
            self._expiry.set(record, expiry)

    def join(self, block: Block, donors: Sequence[int]) -> bool:
        """Makes a queued block a member: its donors stay as long as it does. False, and nothing is changed, where one
        of them may be no donor any more, or the block is not queued any more, or is pinned.

        A delete asks for the members of what it took out of the index, and a pin for the donors of what it keeps,
        under the same lock: either this sees them, or they see this.
        """
        with self._lock:
            fits = block.record in self._pending and not self.is_kept(block.record)
            if not fits or self._families.members(block.record) or not all(self.may_serve(d) for d in donors):
                return False
            self._families.add(block.record, donors)
            return True

    def leave_family(self, block: Block) -> None:
        """A member is coded without its donors after all: it may be one."""
        with self._lock:
            self._families.remove(block.record)
            if block.record in self._pending:
                self._offer(block)

    def offer(self, block: Block) -> None:
        """Lets others find a queued block as a donor, if it may be one."""
        with self._lock:
            if block.record in self._pending:
                self._offer(block)

    def may_serve(self, record: int) -> bool:
        """Whether a record that was offered as a donor may be one now."""
        size = self.config.block_tokens  # only whole blocks are offered
        return self.content is not None and record in self.content and self._may_be_donor(record, 0, size)

    def _offer(self, block: Block | StoredBlock) -> None:
        self._lock.check_held()
        if self.content is None or block.record in self.content:
            return
        if self._may_be_donor(block.record, block.parent, len(block.tokens)):
            tokens = np.ascontiguousarray(block.tokens)
            self.content.insert(block.namespace, block.record, block.parent, tokens)

    def _may_be_donor(self, record: int, parent: int, tokens: int) -> bool:
        return bool(
            may_be_donor(
                record=record,
                parent=parent,
                tokens=tokens,
                block_tokens=self.config.block_tokens,
                expiry=self.expiry(record),
                is_member=bool(self._families.donors(record)),
                is_indexed=record in self.index,
                is_unwritten=record in self._unwritten,
            )
        )

    def load(
        self,
        pinned: Iterable[int] = (),
        expiry: Mapping[int, float] | None = None,
        donors: Mapping[int, Sequence[int]] | None = None,
        sizes: Mapping[int, int] | None = None,
        covers: Iterable[tuple[int, int, bool]] = (),
    ) -> None:
        """What the catalog says of records that were put into the index at open: pins, ends of life, by member its
        donors, bytes, and what they lack."""
        with self._lock:
            self._pins.load(pinned, sizes or {})
            for record, end in (expiry or {}).items():
                self._expiry.set(record, end)
            for member, listed in (donors or {}).items():
                self._families.add(member, listed)
            for record, cut, has_states in covers:
                self.coverage.set(record, cut, has_states)

    def erase(self, namespace: bytes, tokens: Tokens) -> list[int]:
        """Takes a sequence that is stored in full out of the index: nobody finds its records any more, but those that
        are coded against them. Returns them; `forget` ends it. See `TrieIndex.erase`."""
        with self._lock:
            records: list[int] = self.index.erase(namespace, tokens).tolist()
            if self.content is not None:
                for record in records:
                    self.content.remove(record)
            return records

    def erase_namespace(self, namespace: bytes) -> list[int]:
        """Takes everything of a namespace out of the index, pinned or not; see `erase`."""
        with self._lock:
            pinned, _ = self._pins.snapshot()
            for record in pinned:
                if (known := self.whole_path(record)) is not None and known[0] == namespace:
                    self.index.unpin(*known)
                    self._no_longer_kept(self._pins.end(record))
            records: list[int] = self.index.prune(namespace, -1.0).tolist()
            if self.content is not None:
                for record in records:
                    self.content.remove(record)
            return records

    def take_abandoned(self) -> list[int]:
        """Stored records that the index has forgotten and that were to go with the next ones: they go now."""
        with self._lock:
            abandoned, self._abandoned = self._abandoned, []
            return abandoned

    def forget(self, records: Iterable[int], reason: Reason) -> list[int]:
        """Forgets records in memory and in the index; returns whose catalog entries are to go: theirs, and those of
        the stored records that they were to replace. Of a record that others continue a hole stays, see `Holes`.
        reason: why, for `departures`."""
        listed = list(records)
        with self._lock:
            gone = self._forget_all(listed, reason)
        self._tell(self._forgotten, listed)
        return gone

    def will_remove(self, records: Iterable[int]) -> None:
        """Note that the catalog entries of these forgotten records are about to be removed: until `has_removed`."""
        with self._lock:
            self._leaving.update(records)

    def has_removed(self, records: Iterable[int]) -> None:
        """Note that what `will_remove` said was done, or tried in vain."""
        with self._lock:
            self._leaving.subtract(records)
            self._leaving = +self._leaving

    def _written_members(self, record: int) -> list[int]:
        return [member for member in self._families.members(record) if member not in self._pending]

    def _forget_all(self, records: Sequence[int], reason: Reason) -> list[int]:
        """What `forget` does, and returns."""
        self._lock.check_held()
        for record in records:
            lost = self._depart(record, reason)
            if self._pins.is_pinned(record) and record in self.index:
                self.index.unpin(*self.index.path(record))
            self.index.remove(record)
            if lost is not None and self._keeps_holes and self.index.is_hole(record):
                self.holes.note(lost)
            self._forget(record)
        if not self._keeps_holes:
            self.index.take_released()
        return [*(old for record in records for old in self._replaced.pop(record, ())), *records]

    def _depart(self, record: int, reason: Reason) -> LostBlock | None:
        """Notes why a record leaves; which block it is of a stored one, its catalog entry will say. Returns what is
        known of one that is not stored."""
        self._lock.check_held()
        block = self._pending.get(record)
        lost = LostBlock.of(block) if block is not None else self._memory_only.get(record)
        if lost is not None:
            self.departures.add(lost.name, reason)
        else:
            self.departures.expect(record, reason)
        return lost

    def _forget(self, record: int) -> None:
        self._lock.check_held()
        self._pending.pop(record, None)
        self._memory_only.pop(record, None)
        self._unwritten.discard(record)
        self._families.remove(record)
        if self.content is not None:
            self.content.remove(record)
        self._no_longer_kept(self._pins.remove(record))
        self._expiry.remove(record)
        self.coverage.remove(record)
        self.savings.forget(record)

    @staticmethod
    def _tell(listeners: Iterable[Callable[[int], None]], records: Iterable[int]) -> None:
        for record, listener in product(records, listeners):
            listener(record)

    def census(self) -> Census:
        """What the ledger says at one moment."""
        with self._lock:
            pinned, kept = self._pins.snapshot()
            ends, waiting = self._expiry.snapshot()
            donors, members = self._families.snapshot()
            return Census(
                indexed=self.index.counts()[0],
                queued=dict(self._pending),
                unwritten=frozenset(self._unwritten),
                replaced=frozenset(chain(self._abandoned, *self._replaced.values())),
                leaving=frozenset(self._leaving),
                holes=frozenset(self.index.holes()[0].tolist()),
                holes_due=self.holes.due,
                released=self.holes.released,
                pinned=pinned,
                kept=kept,
                pinned_bytes=self._pins.nbytes,
                paths={record: tuple(self.path(record)) for record in pinned},
                expiry=ends,
                waiting=waiting,
                donors=donors,
                members=members,
            )

    def _path_with_holes(self, record: int) -> list[int]:
        known = self.whole_path(record)
        return [] if known is None else self.index.match(*known, touch=False).records.tolist()
