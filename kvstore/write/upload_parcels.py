"""Writes blocks that follow each other to the remote tier together, where its engine wants that: as parcels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.core.keys import chain_keys
from kvstore.metrics import Metric
from kvstore.residency.residency import Residency
from kvstore.tiers.host import HostRecord
from kvstore.tiers.remote.tier import RemoteTier
from kvstore.write.leaving import LeavingRecord, LeavingRecords
from kvstore.write.portable import Portable, PortableRecords


@dataclass(frozen=True)
class _Row:
    """A block: its record here, or one that the disk gave up."""

    key: bytes
    parent_key: bytes
    record: int
    leaving: LeavingRecord | None = None


class _Stop(Enum):
    """Why no further row is written."""

    END = "all are there, or the store is being closed"
    LATER = "it is to be tried again"
    LEFT = "a record left the store"
    REFUSED = "the server refused"


@dataclass(frozen=True)
class _Gathered:
    """Records that are to make one parcel, and why the one behind them cannot be written now; END if it can."""

    found: Sequence[Portable | LeavingRecord]
    stop: _Stop = _Stop.END

    @property
    def data(self) -> list[memoryview]:
        """The bytes of the records; good as long as this object is referred to."""
        return [each.record.data for each in self.found]

    @property
    def profiles(self) -> list[bytes]:
        """Ids of the profiles that they need."""
        return [each.record.header.profile for each in self.found]

    @property
    def lives_s(self) -> list[float | None]:
        """How long each of them is of use; None: for ever."""
        return [each.life_s for each in self.found]


_DROPPED = {_Stop.LEFT: Metric.DROPPED_REMOTE_LEFT, _Stop.REFUSED: Metric.DROPPED_REMOTE_ERROR}


@dataclass(frozen=True)
class ParcelUpload:
    """Writes parcels, of at most the blocks of one group, which are all that is held in memory. For one thread.

    Attributes:
        portable: gives the bytes of a record.
        root: gives the key before the first block of a namespace.
        is_closing: whether the store is being closed.
        there: called with records that are in the remote tier, and their keys.
    """

    residency: Residency
    tier: RemoteTier
    portable: PortableRecords
    root: Callable[[bytes], bytes]
    is_closing: Callable[[], bool]
    there: Callable[[Sequence[int], Sequence[bytes]], None]

    def upload(self, records: Sequence[int], keys: Sequence[bytes]) -> bool:
        """Write what is missing of a sequence of whole blocks; False if that is to be tried again later.

        keys: of its blocks, behind that of its namespace.
        """
        held = self.tier.held(keys[1:], 0)
        if held is None:
            return False
        self.tier.renew(keys[1 : held + 1])
        rows = [_Row(keys[i + 1], keys[i], record) for i, record in enumerate(records)]
        self._replace(rows, held)
        self.there(records[:held], keys[1 : held + 1])
        done, stop = self._write(rows, held, 0)
        if stop in _DROPPED:
            self.residency.metrics.add(_DROPPED[stop], len(rows) - done)
        return stop is not _Stop.LATER

    def leave(self, chain: Sequence[LeavingRecord], leaving: LeavingRecords) -> bool:
        """Write records that the disk gave up, root first, after what stands before them; False to try again later."""
        headers = [each.record.header for each in chain]
        if headers[0].start:
            is_there = self._has_parent(chain[0])
            if is_there is None or (not is_there and leaving.may_come(headers[0].key)):
                return False  # what they follow may be leaving, too, and not be read yet
            if not is_there:
                self.residency.metrics.add(Metric.DROPPED_REMOTE_LEFT, len(chain))
                return self._end(chain, leaving)
        first = headers[0].start // self.residency.config.block_tokens
        held = self.tier.held([header.key for header in headers], first)
        if held is None:
            return False
        rows = [_Row(each.record.header.key, each.record.header.parent, 0, each) for each in chain]
        self._replace(rows, held)
        done, stop = self._write(rows, held, first)
        self._end(chain[:done], leaving)
        if stop in _DROPPED:
            self.residency.metrics.add(_DROPPED[stop], len(chain) - done)
            self._end(chain[done:], leaving)
        return stop is not _Stop.LATER

    def _end(self, chain: Sequence[LeavingRecord], leaving: LeavingRecords) -> bool:
        for each in chain:
            leaving.done(each)
        return True

    def _has_parent(self, leaving: LeavingRecord) -> bool | None:
        """Whether what a record follows is there, after what is here of that was written; None to try again later."""
        key, size = leaving.record.header.parent, self.residency.config.block_tokens
        if self.tier.has(key):
            return True
        path = self.residency.whole_path(leaving.parent) if leaving.parent in self.residency.index else None
        if path is None or len(path[1]) % size:
            return self.tier.holds(key)
        namespace, tokens = path
        keys = [self.root(namespace), *chain_keys(self.root(namespace), tokens, size)]
        first = (len(keys) - 2) // self.tier.group * self.tier.group  # of the group of the last block
        held = self.tier.held(keys[first + 1 :], first)
        if held is not None and first + 1 + held < len(keys):
            records = self.residency.index.match(namespace, tokens, touch=False).records.tolist()
            held = self.tier.held(keys[first + 1 :], first) if self.upload(records, keys) else None
        return None if held is None else first + 1 + held == len(keys)

    def _write(self, rows: Sequence[_Row], at: int, first: int) -> tuple[int, _Stop]:
        """Write rows from `at` on; return how many are there, and why not more.

        first: number of the first row's block.
        """
        group = self.tier.group
        while at < len(rows) and not self.is_closing():
            if self.tier.has(rows[at].key):
                done, count, here = 1, 1, _Gathered([])
            else:
                here = self._gather(rows[at : at + group - (first + at) % group])
                count = len(here.found)
                keys = [row.key for row in rows[at : at + count]]
                done = self.tier.write_parcel(keys, here.data, here.profiles, here.lives_s) if count else 0
            here_rows = [row for row in rows[at : at + done] if row.record]
            self.there([row.record for row in here_rows], [row.key for row in here_rows])
            at += done
            if count and not done:
                return at, _Stop.REFUSED if self.tier.takes_writes else _Stop.LATER
            if done == count and here.stop is not _Stop.END:
                return at, here.stop
        return at, _Stop.END

    def _gather(self, rows: Sequence[_Row]) -> _Gathered:
        """The records of the first rows, as far as they are not there, and can be read."""
        found = list[Portable | LeavingRecord]()
        for row in rows:
            if found and self.tier.has(row.key):
                break
            one = self._record(row)
            if isinstance(one, _Stop):
                return _Gathered(found, one)
            found.append(one)
        return _Gathered(found)

    def _record(self, row: _Row) -> Portable | LeavingRecord | _Stop:
        """The record of a row, or why it cannot be had."""
        if row.leaving is not None:
            return row.leaving
        if row.record and self.residency.queued(row.record) is not None:
            return _Stop.LATER
        gone = not row.record or self.residency.is_expired(row.record)
        found = None if gone else self.portable(row.record, row.parent_key)
        return _Stop.LEFT if found is None else found

    def _replace(self, rows: Sequence[_Row], held: int) -> None:
        """Write anew what is there of these rows and lives too short. held: so many of the first are known to be
        there."""
        by_key = {row.key: row for row in rows}
        expiries = {row.key: self._expiry(row) for row in rows}

        def take(key: bytes) -> tuple[HostRecord, float | None] | None:
            found = self._record(by_key[key])
            return None if isinstance(found, _Stop) else (found.record, found.life_s)

        keys, done = list(by_key), set[bytes]()
        for key in self.tier.suspects(keys, list(expiries.values()), keys[:held]):
            if key in done or self.is_closing():
                continue
            in_parcel = self.tier.is_in_parcel(key)  # all of which is read if it is known to be outlived
            known = in_parcel and self.tier.life(key) is not None
            if not (known or self.tier.is_outlived(key, expiries[key])):
                continue
            if in_parcel:
                done.update(self.tier.renew_parcel(key, expiries, take))
            elif taken := take(key):
                record, life_s = taken
                self.tier.write(key, record.data, record.header.profile, life_s, over=True)

    def _expiry(self, row: _Row) -> float:
        """When the life of a row's block ends here, 0 for never."""
        return self.residency.expiry(row.record) if row.leaving is None else row.leaving.record.header.expiry
