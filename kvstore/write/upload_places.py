"""What is written to the remote tier of caches with windows or states: places, after the records that lead to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstore.codecs.profile import NO_PROFILE
from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_keys
from kvstore.core.layout import KVLayout
from kvstore.core.places import MARK, MOST_BLOCKS, PLACE_BYTES, Place
from kvstore.core.record import FLAG_STATES
from kvstore.core.tokens import Tokens
from kvstore.core.windows import block_cut, raw_bytes, usable_end
from kvstore.metrics import Metric
from kvstore.read.lookup import Lookup
from kvstore.residency.residency import Residency
from kvstore.tiers.remote.names import mark_of, part_of, place_of
from kvstore.tiers.remote.tier import RemoteTier
from kvstore.write.leaving import LeavingRecord
from kvstore.write.portable import Portable, PortableRecords


@dataclass(frozen=True)
class _Row:
    """One block on the way to a place: its record here, or one that the disk gave up. path: where the place lies inside
    of the record, which is longer, the tokens up to there."""

    key: bytes
    parent_key: bytes
    cut: int
    has_states: bool
    record: int
    leaving: LeavingRecord | None = None
    path: Tokens | None = None

    @property
    def part(self) -> bytes:
        return part_of(self.key, self.cut, self.has_states)


@dataclass(frozen=True)
class PlaceUpload:
    """Writes places. For one thread.

    Attributes:
        lookup: says where a cache can be gone on with here.
        portable: gives the bytes of a record.
        is_closing: whether the store is being closed.
    """

    residency: Residency
    tier: RemoteTier
    portable: PortableRecords
    lookup: Lookup
    layout: KVLayout
    is_closing: Callable[[], bool]

    def upload(self, last: int, end: int, there: Callable[[bytes], None]) -> bool:
        """Write the place at the end of a record, if there is one; False if that is to be tried again later.

        Args:
            end: where the place is, in the record; 0: at its end.
            there: called with what the last record goes by, if the place is in the remote tier then.
        """
        path = self.residency.whole_path(last)
        if path is None:
            return self._left(1)
        namespace, tokens = path[0], path[1][: end or len(path[1])]
        records, found = self.lookup.place(namespace, tokens, touch=False)
        if found < len(tokens):
            return True  # no place
        if len(tokens) == len(path[1]):
            records = [*records[:-1], last]  # not a longer one that begins with it
        if any(self.residency.is_expired(record) for record in records):
            return self._left(len(records))
        rows = self._rows(namespace, tokens, records)
        if not self._is_place(rows, tokens):
            return True
        done = self._write(namespace, tokens, rows, there)
        return self._left(len(rows)) if done is None else done

    def leave(self, chain: Sequence[LeavingRecord], may_come: Callable[[bytes], bool]) -> bool:
        """Write the place at the end of records that the disk gave up, which follow each other; False to try again
        later.

        may_come: whether what the last of them needs may still come, by its key.
        """
        first, last = chain[0].record.header, chain[-1].record.header
        path = self.residency.whole_path(chain[0].parent) if first.start else (first.namespace, first.tokens[:0])
        done: bool | None = None
        if path is not None and len(path[1]) == first.start:
            namespace, tokens = path
            records = self.residency.index.match(namespace, tokens, touch=False).records.tolist()
            rows = self._rows(namespace, tokens, records)
            for leaving in chain:
                header = leaving.record.header
                has_states = bool(header.flags & FLAG_STATES)
                rows.append(_Row(header.key, header.parent, header.cut, has_states, 0, leaving))
            tokens = np.concatenate([tokens, *(leaving.record.header.tokens for leaving in chain)])
            done = not self._is_place(rows, tokens) or self._write(namespace, tokens, rows, lambda _: None)
        if done is None:  # what it follows may be leaving, too, and not be read yet
            return not may_come(last.key) and self._left(len(chain))
        return done

    def _left(self, count: int) -> bool:
        self.residency.metrics.add(Metric.DROPPED_REMOTE_LEFT, count)
        return True

    def _rows(self, namespace: bytes, tokens: Tokens, records: Sequence[int]) -> list[_Row]:
        root, coverage = self.lookup.root(namespace), self.residency.coverage
        keys = [root, *chain_keys(root, tokens, self.lookup.block_tokens)]
        rows = [
            _Row(keys[i + 1], keys[i], coverage.cut(record), coverage.has_states(record), record)
            for i, record in enumerate(records)
        ]
        longer = self.residency.whole_path(records[-1]) if rows else None
        if longer is not None and len(longer[1]) > len(tokens):
            start = (len(rows) - 1) * self.lookup.block_tokens
            cut = block_cut(self.layout, rows[-1].cut, start, len(tokens) - start)
            rows[-1] = replace(rows[-1], cut=cut, has_states=False, path=tokens)
        return rows

    def _is_place(self, rows: Sequence[_Row], tokens: Tokens) -> bool:
        size, count = self.lookup.block_tokens, len(tokens)
        if (
            len(rows) != -(-count // size)
            or len(rows) > MOST_BLOCKS
            or (self.layout.states and not rows[-1].has_states)
        ):
            return False
        ends = [min((i + 1) * size, count) for i in range(len(rows))]
        return usable_end(self.layout, size, [row.cut for row in rows], ends, count) == count

    def _write(
        self, namespace: bytes, tokens: Tokens, rows: Sequence[_Row], there: Callable[[bytes], None]
    ) -> bool | None:
        """Write what the remote tier lacks of a place: its records, root first, then itself, and its mark at last. None
        if one of them left."""
        tier, key = self.tier, rows[-1].key
        plain = not len(tokens) % self.lookup.block_tokens and all(row.part == row.key for row in rows)
        place, mark = place_of(key), mark_of(rows[-1].parent_key)
        values = [row.part for row in rows] + ([] if plain else [place, mark])
        missing = tier.absent(values)
        if missing is None:
            return False
        absent = set(missing)
        tier.renew([value for value in values if value not in absent])
        parts = [row.part for row in rows]
        outlived = self._outlived(rows, parts, [part for part in parts if part not in absent])
        is_stale = not plain and place not in absent and (bool(outlived) or self._leads_nowhere(place, rows))
        lives = list[float]()
        for i, row in enumerate(rows):
            if row.part not in absent and row.part not in outlived:
                continue
            if self.is_closing():
                return True
            if row.record and self.residency.queued(row.record) is not None:
                return False  # not written yet
            found = self._record(namespace, row)
            if found is None:
                return None
            header, life_s = found.record.header, found.life_s
            lives += [] if life_s is None else [life_s]
            if not tier.write(row.part, found.record.data, header.profile, life_s, over=row.part in outlived):
                return self._refused(len(rows) - i)
        if place in absent or is_stale:
            state_bytes = self._state_bytes(namespace, rows[-1])
            if state_bytes is None:
                return None
            value = memoryview(self._place(namespace, tokens, rows, state_bytes).pack())
            if not tier.write(place, value, NO_PROFILE, min(lives, default=None), is_stale):
                return self._refused(1)
        if mark in absent and not tier.write(mark, memoryview(MARK), NO_PROFILE):
            return self._refused(1)
        there(rows[-1].part)
        return True

    def _outlived(self, rows: Sequence[_Row], parts: Sequence[bytes], there: Sequence[bytes]) -> set[bytes]:
        """Those of the records of the rows, which go by `parts`, that live too short. there: those that are there."""
        expiry = self.residency.expiry
        lives = [expiry(row.record) if row.leaving is None else row.leaving.record.header.expiry for row in rows]
        ends = dict(zip(parts, lives, strict=True))
        suspects = self.tier.suspects(parts, lives, there)
        return {part for part in suspects if part in there and self.tier.is_outlived(part, ends[part])}

    def _leads_nowhere(self, place: bytes, rows: Sequence[_Row]) -> bool:
        """Whether a place that is there is none, or names other records than these, and one of them is not there, or
        past its time."""
        deadline = self.tier.clock() + self.tier.config.write_timeout_s
        value = self.tier.read(place, PLACE_BYTES, deadline)
        if isinstance(value, Reason):
            return False
        try:
            found = Place.unpack(value)
        except ValueError:
            return True
        if len(found.cuts) != len(rows):
            return True
        kinds = zip(rows, found.cuts, found.with_states, strict=True)
        parts = [part_of(row.key, cut, has_states) for row, cut, has_states in kinds]
        if parts == [row.part for row in rows]:
            return False
        return bool(self.tier.absent(parts)) or bool(self._outlived(rows, parts, parts))

    def _record(self, namespace: bytes, row: _Row) -> LeavingRecord | Portable | None:
        """The record of a row; None if it left, or is another one by now."""
        found: LeavingRecord | Portable | None = row.leaving
        if row.path is not None:
            found = self.portable.beginning(row.record, row.parent_key, namespace, row.path, row.cut)
        elif found is None:
            found = self.portable(row.record, row.parent_key)
        if found is None:
            return None
        header = found.record.header
        is_same = (header.key, header.cut, bool(header.flags & FLAG_STATES)) == (row.key, row.cut, row.has_states)
        return found if is_same else None

    def _state_bytes(self, namespace: bytes, row: _Row) -> int | None:
        """What the states of a record take; None if it left."""
        if not row.has_states:
            return 0
        found = self._record(namespace, row)
        if found is None:
            return None
        header = found.record.header
        return header.raw_bytes - raw_bytes(self.layout, header.cut, header.start, header.count)

    def _refused(self, count: int) -> bool:
        if not self.tier.takes_writes:
            return False
        self.residency.metrics.add(Metric.DROPPED_REMOTE_ERROR, count)
        return True

    def _place(self, namespace: bytes, tokens: Tokens, rows: Sequence[_Row], state_bytes: int) -> Place:
        cuts, states = tuple(row.cut for row in rows), tuple(row.has_states for row in rows)
        size = self.lookup.block_tokens
        return Place(rows[-1].key, namespace, len(tokens), size, cuts, states, state_bytes)
