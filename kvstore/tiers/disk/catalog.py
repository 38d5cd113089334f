"""The catalog: which records exist and where they lie, the sessions, the namespaces. It lives in LMDB.

LMDB keeps what was committed through kill and power loss (default flags only), but has no checksums: every value
here carries its own. Records are keyed by their number, which only grows, so a commit dirties few pages.
See FORMAT.md, "Catalog".
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.config import PAGE_BYTES
from kvstore.core.history import is_history_sized
from kvstore.core.session_record import SessionChange, SessionHead, SessionRecord
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk.entry import (
    ENTRY,
    MAX_RECORD,
    SUM_BYTES,
    Entry,
    Scan,
    checked,
    cut_of,
    donors_of,
    is_entry,
    is_entry_sized,
    tokens_end,
    with_sum,
)
from kvstore.tiers.disk.environment import CatalogDamaged, CatalogError, Environment, Transaction
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.saved_notes import SavedNotes
from kvstore.tiers.disk.saved_sessions import SavedSessions
from kvstore.tiers.disk.saved_traffic import SavedTraffic, is_run_sized
from kvstore.tiers.disk.segment import Extent

_RECORD_KEY = struct.Struct(">Q")
_PLACE_KEY = struct.Struct(">II")
_FIRST_KEY = b"\0"
_DATABASES = (b"records", b"places", b"namespaces", b"sessions", b"traffic", b"texts", b"tasks")
_OF_FORMAT_2 = (b"texts", b"tasks")
_ERASE, _HISTORY = b"erase", b"history"
_UPGRADE_RUN = 1024  # sessions that one commit of an upgrade rewrites
_SCAN_RUN = 4096  # entries that one transaction of a scan reads: a longer one would keep pages from being used again


class Catalog:
    """An open catalog. Reads are thread-safe; the disk tier's lock lets one thread write at a time.

    Args:
        directory: of the LMDB files; it must exist. The caller has checked the file (`environment.check`).
        map_bytes: the most bytes that the catalog may take.
        readonly: open it beside a writer.
        metrics: where readers that died and scans done twice are counted; None for nowhere.
        fs: the file system.

    Attributes:
        environment: what it lives in: transactions, and the file.

    Raises:
        CatalogDamaged: the file is damaged.
        CatalogError: LMDB refuses the file.
        StoreLocked: this process has the file open already; LMDB allows one environment of a file per process.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> catalog = Catalog(folder.name, 1 << 24, readonly=False)
        >>> tokens = np.array([1, 2], np.uint32)
        >>> gone = catalog.commit(added=[Entry(5, 0, 10, 0, Extent(1, 4096, 8192), 0, 1, codec=7, tokens=tokens)])
        >>> [entry.record for entry in catalog.get([5])], len(catalog.scan().entries)
        ([5], 1)
        >>> catalog.close()
        >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str,
        map_bytes: int,
        readonly: bool,
        metrics: Metrics | None = None,
        fs: FileSystem | None = None,
    ) -> None:
        self.environment = Environment(
            directory, map_bytes, readonly, _DATABASES, _OF_FORMAT_2, self._opened, metrics, fs
        )
        self._metrics = metrics or Metrics()
        self._ready: tuple[int, Scan] | None = None

    def _opened(self, databases: Sequence[Any]) -> None:
        self._records, self._places, self._namespaces, sessions, traffic, texts, self._tasks = databases
        self._saved = SavedSessions(sessions, texts, SavedNotes(self._tasks))
        self._traffic = SavedTraffic(traffic)
        self._session_bytes: int | None = None  # not counted yet; changed by who writes

    def close(self) -> None:
        self.environment.close()

    def is_sound(self, entries: bool = True) -> bool:
        """Whether every key that is there is found when it is looked for, keys and values have the lengths that they
        must have, and sessions and numbers of namespaces are intact. Raises `CatalogError` if it cannot be said now.

        `environment.check` knows nothing of that. One flipped bit in a key hides entries, or makes a session one of
        another name; a value of another length must not even be deleted, for LMDB would move what lies beside it;
        without its number a namespace would lose all entries.

        Args:
            entries: look at records and their places, too: False where that was done already.
        """
        try:
            with self.environment.reading() as txn:
                saved = self._saved
                databases = [self._namespaces, self._traffic.runs, saved.sessions, saved.texts, self._tasks]
                if entries:
                    databases += [self._records, self._places]
                return all(self._are_sound(txn, db) for db in databases if db is not None)
        except CatalogDamaged:
            return False
        except CatalogError as error:
            if error.is_passing:
                raise
            return False

    def _are_sound(self, txn: Transaction, db: Any) -> bool:
        numbers, count = set(), 0
        with txn.cursor(db=db) as cursor:
            for count, key in enumerate(cursor.iternext(values=False), 1):
                # Each is looked for from the root; a cursor would first look where it stands.
                value = txn.get(key, db=db)
                if value is None:
                    return False
                if db is self._records:
                    sound = len(key) == 8 and is_entry_sized(value)
                elif db is self._places:
                    sound = len(key) == len(value) == 8
                elif db is self._traffic.runs:
                    sound = is_run_sized(key, value)
                elif key == _HISTORY and db is self._tasks:
                    sound = is_history_sized(len(value) - SUM_BYTES)  # worth no rebuild: a damaged one is ignored
                elif db is self._namespaces:
                    numbers.add(_number(key, value))
                    sound = None not in numbers and len(numbers) == count
                elif db in (self._saved.sessions, self._saved.texts):
                    sound = self._saved.is_intact(db, key, value)
                else:
                    sound = checked(value) is not None
                if not sound:
                    return False
        return bool(count == txn.stat(db)["entries"])  # an empty key, which can only be damage, ends the loop above

    # ---- records -------------------------------------------------------------------------------------------------

    def commit(
        self,
        added: Iterable[Entry] = (),
        removed: Iterable[Entry] = (),
        sessions: Sequence[SessionChange] = (),
        session_budget: int | None = None,
    ) -> tuple[int, int]:
        """Commit changes: all or nothing. Durable on return.

        Args:
            added: entries to add, or to replace those of the same record.
            removed: entries to remove.
            sessions: changes, the oldest first.
            session_budget: bytes that all sessions may take; if `sessions` make them take more, those that were used
                least recently go in the same commit. None: they may take any.

        Returns:
            How many sessions went because their time was over, and how many for space.

        Raises:
            CatalogError: nothing changed.
        """
        with self.environment.writing() as txn:
            for entry in removed:
                self._forget(txn, entry)
            for entry in added:
                key = _RECORD_KEY.pack(entry.record)
                old = txn.get(key, db=self._records)
                known = Entry.unpack(old) if old is not None else None
                if known is not None:
                    self._forget(txn, known)
                txn.put(key, entry.pack(), db=self._records)
                if not entry.is_hole:
                    txn.put(_place(entry.extent), key, db=self._places)
            total, gone = self._change_sessions(txn, sessions, session_budget) if sessions else (None, (0, 0))
        if total is not None:
            self._session_bytes = total
        return gone

    def _change_sessions(
        self, txn: Transaction, changes: Sequence[SessionChange], budget: int | None
    ) -> tuple[int, tuple[int, int]]:
        """Returns what all sessions take then, and how many of them went."""
        saved, total, gone = self._saved, self._session_bytes, (0, 0)
        if total is None:
            total = saved.counted(txn)
        for change in changes:
            if change.record is None:
                total += saved.delete(txn, change.key)
            else:
                total += saved.put(txn, change.key, change.record)
        if budget is not None and total > budget:
            grown, *counts = saved.shrink(txn, time.time(), total - budget, budget)
            total, gone = total + grown, (counts[0], counts[1])
        return total, gone

    def purge(self, keys: Sequence[bytes]) -> None:
        """Remove damaged entries by their raw keys. Durable on return. Raises `CatalogError`."""
        with self.environment.writing() as txn:
            for key in keys:
                txn.delete(key, db=self._records)

    def get(self, records: Iterable[int]) -> list[Entry | None]:
        """Return the entries at one moment, of records and holes; None if one is gone or damaged."""
        with self.environment.reading() as txn:
            values = [txn.get(_RECORD_KEY.pack(record), db=self._records) for record in records]
        entries = [Entry.unpack(value) if value is not None else None for value in values]
        return [e if e is not None and e.record == r else None for e, r in zip(entries, records, strict=True)]

    def misplaced(self, keys: Sequence[bytes]) -> list[Entry]:
        """Return the entries under these raw keys that are whole, though of a record that is not the key's."""
        with self.environment.reading() as txn:
            values = [txn.get(key, db=self._records) for key in keys]
        entries = [Entry.unpack(value) for value in values if value is not None]
        return [entry for entry in entries if entry is not None and 0 < entry.record < MAX_RECORD]

    def in_segment(self, segment: int) -> list[Entry]:
        """Return the entries whose records lie in a segment, in the order in which they lie."""
        numbers = []
        with self.environment.reading() as txn, txn.cursor(db=self._places) as cursor:
            if cursor.set_range(_PLACE_KEY.pack(segment, 0)):
                for key, value in cursor:
                    if _PLACE_KEY.unpack(key)[0] != segment:
                        break
                    numbers.append(_RECORD_KEY.unpack(value)[0])
        found = self.get(numbers)
        return [entry for entry in found if entry is not None and entry.extent.segment == segment]

    def offer(self, commit: int, scan: Scan) -> None:
        """Give what the first `scan` is to return, if it sees this commit."""
        self._ready = commit, scan

    def scan(self, after: int = 0) -> Scan:
        """Return all entries with a number above `after`. Damaged ones are left out and their keys reported."""
        ready, self._ready = self._ready, None
        if ready is not None and not after:
            if ready[0] == self.environment.version():
                return ready[1]
            self._metrics.add(Metric.FALLBACK_CATALOG_SCAN, because="the catalog was changed after it")
        values: list[bytes] = []
        damaged: list[bytes] = []
        # No record has the number 0: a key that says so is damaged, and is to be found.
        begin: bytes | None = _RECORD_KEY.pack(after + 1) if after else _FIRST_KEY
        while begin is not None:
            begin = self._scan_run(begin, values, damaged)
        heads = b"".join([value[: ENTRY.itemsize] for value in values])
        tokens = b"".join([value[ENTRY.itemsize : tokens_end(value)] for value in values])
        entries = np.frombuffer(heads, ENTRY)
        longer = [
            (record, value)
            for record, value in zip(entries["record"].tolist(), values, strict=True)
            if len(value) > tokens_end(value)
        ]
        donors = {record: found for record, value in longer if (found := donors_of(value))}
        cuts = {record: cut for record, value in longer if (cut := cut_of(value))}
        return Scan.of(entries, np.frombuffer(tokens, "<u4"), damaged, donors, cuts)

    def _scan_run(self, begin: bytes, values: list[bytes], damaged: list[bytes]) -> bytes | None:
        """Reads the next entries from the key `begin` on; returns where the ones after them begin, None for nowhere."""
        with self.environment.reading() as txn, txn.cursor(db=self._records) as cursor:
            there = cursor.set_range(begin)
            for _ in range(_SCAN_RUN):
                if not there:
                    return None
                key, value = cursor.item()
                if is_entry(key, value):
                    values.append(value)
                else:
                    damaged.append(key)
                there = cursor.next()
            return cursor.key() if there else None

    # ---- namespaces and sessions ---------------------------------------------------------------------------------

    def namespace(self, digest: bytes) -> int:
        """Return the number of a namespace, which it gets at its first use. Durable on return."""
        with self.environment.writing() as txn:
            value = txn.get(digest, db=self._namespaces)
            number = _number(digest, value)
            if number is None:
                number = txn.stat(self._namespaces)["entries"] + 1
                txn.put(digest, with_sum(digest + number.to_bytes(4, "little")), db=self._namespaces)
            return number

    def namespaces(self) -> dict[bytes, int]:
        """Return all namespaces: number by digest."""
        with self.environment.reading() as txn, txn.cursor(db=self._namespaces) as cursor:
            pairs = [(key, _number(key, value)) for key, value in cursor]
        return {key: number for key, number in pairs if number is not None and len(key) == 32}

    def session(self, key: bytes) -> SessionRecord | None:
        """Return a session with its tokens; None if there is none or it is damaged."""
        with self.environment.reading() as txn:
            return self._saved.get(txn, key)

    def session_head(self, key: bytes) -> SessionHead | None:
        """Return what stands with a session, without its tokens; None if there is none or it is damaged."""
        with self.environment.reading() as txn:
            return self._saved.head(txn, key)

    def sessions(self) -> list[SessionHead]:
        """Return what stands with each intact session, by key; reads no tokens."""
        with self.environment.reading() as txn:
            return list(self._saved.heads(txn))

    def session_count(self, keys: Iterable[bytes] = ()) -> tuple[int, set[bytes]]:
        """Return how many sessions there are, damaged ones included, and which of some keys are among them; of the
        same moment."""
        with self.environment.reading() as txn:
            return self._saved.count(txn), self._saved.held(txn, keys)

    def session_bytes(self) -> int:
        """Return how many bytes all sessions take."""
        if self._session_bytes is not None:
            return self._session_bytes
        with self.environment.reading() as txn:
            return self._saved.nbytes(txn)

    def sessions_by_namespace(self, keys: Iterable[bytes] = ()) -> tuple[Counter[bytes], set[bytes]]:
        """Return how many sessions each namespace has, by the first 16 bytes of its digest, and which of some keys are
        among them; of the same moment."""
        with self.environment.reading() as txn:
            return self._saved.by_namespace(txn), self._saved.held(txn, keys)

    def expire_sessions(self) -> int:
        """Remove the sessions whose time is over; return how many. Durable on return. Raises `CatalogError`."""
        if not any(0.0 < head.expiry <= time.time() for head in self.sessions()):
            return 0
        with self.environment.writing() as txn:
            total = self._saved.counted(txn) if self._session_bytes is None else self._session_bytes
            grown, expired, _ = self._saved.shrink(txn, time.time(), over=0, budget=0)
        self._session_bytes = total + grown
        return expired

    def session_problems(self) -> tuple[int, list[str]]:
        """Return how many sessions there are, and what is wrong with them."""
        with self.environment.reading() as txn:
            found, taken = self._saved.problems(txn), self._saved.nbytes(txn)
            if self._session_bytes not in (None, taken):
                found.append(f"sessions are counted with {self._session_bytes} bytes, and take {taken}")
            return self._saved.count(txn), found

    def upgrade_sessions(self) -> None:
        """Rewrite all sessions of format 1, in some commits; if it is cut short, it is to be called again.

        Raises:
            CatalogError: the sessions that are left stay as they were.
        """
        # Texts that nothing shares take up to twice the room, and stand beside the old sessions for a while.
        self.environment.grow(times=2)
        after: bytes | None = b""
        while after is not None:
            with self.environment.writing() as txn:
                after = self._saved.upgrade(txn, after, _UPGRADE_RUN)
        self._session_bytes = None

    # ---- tasks ---------------------------------------------------------------------------------------------------

    def erasing(self) -> bool:
        """Return whether an erase was begun and not ended."""
        with self.environment.reading() as txn:
            return self._tasks is not None and txn.get(_ERASE, db=self._tasks) is not None

    def begin_erase(self) -> None:
        """Note that something is to be overwritten. Durable on return. Raises `CatalogError`."""
        with self.environment.writing() as txn:
            txn.put(_ERASE, with_sum(bytes(8)), db=self._tasks)

    def end_erase(self) -> None:
        """Note that all of it was overwritten. Durable on return. Raises `CatalogError`."""
        with self.environment.writing() as txn:
            txn.delete(_ERASE, db=self._tasks)

    # ---- traffic -------------------------------------------------------------------------------------------------

    def save_traffic(
        self, records: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint32], history: bytes | None = None
    ) -> None:
        """Replace what is known of traffic. Durable on return.

        Args:
            records: numbers, uint64 `[m]`, rising.
            counts: how often each was used, uint32 `[m]`.
            history: see `save_history`; None to leave it as it is.

        Raises:
            CatalogError: nothing changed.
        """
        with self.environment.writing() as txn:
            self._traffic.replace(txn, records, counts)
            if history is not None:
                txn.put(_HISTORY, with_sum(history), db=self._tasks)

    def save_history(self, history: bytes) -> None:
        """Replace the history, as `kvstore.core.history.pack` makes it. Durable on return. Raises `CatalogError`."""
        with self.environment.writing() as txn:
            txn.put(_HISTORY, with_sum(history), db=self._tasks)

    def history(self) -> bytes:
        """Return the history; b"" if there is none or it is damaged. Raises `CatalogError`."""
        with self.environment.reading() as txn:
            value = txn.get(_HISTORY, db=self._tasks) if self._tasks is not None else None
        return (checked(value) or b"") if value is not None else b""

    def traffic(self, records: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Return how often each record had been used when that was last saved, `[m]`; 0 if it is not known."""
        with self.environment.reading() as txn:
            return self._traffic.counts(txn, records)

    def _forget(self, txn: Transaction, entry: Entry) -> None:
        key, place = _RECORD_KEY.pack(entry.record), _place(entry.extent)
        txn.delete(key, db=self._records)
        if txn.get(place, db=self._places) == key:
            txn.delete(place, db=self._places)


def _place(extent: Extent) -> bytes:
    return _PLACE_KEY.pack(extent.segment, extent.offset // PAGE_BYTES)


def _number(namespace: bytes, value: bytes | None) -> int | None:
    # The namespace stands in the value too, for the sum to cover: the key alone would not tell that it is damaged.
    body = checked(value) if value is not None else None
    if body is None or len(body) != 36 or body[:32] != namespace:
        return None
    return int.from_bytes(body[32:], "little")
