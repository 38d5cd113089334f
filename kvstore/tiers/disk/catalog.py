"""The catalog: which records exist and where they lie, the sessions, the namespaces. An LMDB environment.

LMDB keeps what was committed through kill and power loss (default flags only), but has no checksums: every value
here carries its own. Records are keyed by their number, which only grows, so a commit dirties few pages.
This is the only module that imports lmdb. See FORMAT.md, "Catalog".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
from lmdb import _envid as lmdb_files
from lmdb import verify as lmdb_verify

from kvstore.config import PAGE_BYTES
from kvstore.core.session_record import SessionChange, SessionHead, SessionRecord
from kvstore.errors import DiskError, StoreLocked
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk.catalog_file import DATA_FILE, META_BYTES, renumbered
from kvstore.tiers.disk.entry import (
    ENTRY,
    SUM_BYTES,
    Entry,
    Scan,
    checked,
    donors_of,
    is_entry,
    is_entry_sized,
    tokens_end,
    with_sum,
)
from kvstore.tiers.disk.fs import FileSystem, close_quietly, is_passing
from kvstore.tiers.disk.saved_sessions import SavedSessions
from kvstore.tiers.disk.segments import Extent

_RECORD_KEY = struct.Struct(">Q")
_PLACE_KEY = struct.Struct(">II")
_DATABASES = (b"records", b"places", b"namespaces", b"sessions", b"traffic", b"texts", b"tasks")
_OF_FORMAT_2 = (b"texts", b"tasks")
_ERASE = b"erase"
_RENEW_WAIT_S = 30.0
_TRAFFIC_RUN = 4096  # records whose counts of traffic stand in one value
_UPGRADE_RUN = 1024  # sessions that one commit of an upgrade rewrites
_SCAN_RUN = 4096  # entries that one transaction of a scan reads: a longer one would keep pages from being used again
_LOOK_FOR_STALE = 32  # commits between two looks for readers that died inside of a transaction

# The engine's format, pinned: an environment variable of py-lmdb could otherwise change it.
_ENGINE = 0


class CatalogError(DiskError):
    """LMDB refused. The transaction changed nothing."""


class CatalogDamaged(CatalogError):
    """LMDB refused the file itself: it is damaged, or of another version."""


class Catalog:
    """An open catalog. Reads are thread-safe; the disk tier's lock lets one thread write at a time.

    Args:
        directory: of the LMDB files; it must exist. The caller has checked the file (`check`).
        map_bytes: the most bytes that the catalog may take.
        readonly: open it beside a writer.
        metrics: where readers that died are counted; None for nowhere.
        fs: the file system.

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
        self.path = os.path.join(directory, DATA_FILE)
        self._fs = fs or FileSystem()
        self._metrics = metrics or Metrics()
        self._commits = 0
        self._directory, self._map_bytes, self._readonly = directory, map_bytes, readonly
        self._gate = threading.Condition()
        self._inside, self._renewing = 0, False  # transactions that read; guarded by _gate
        self._open()

    def _open(self) -> None:
        readonly = self._readonly
        with _errors("open"):
            self._env = lmdb.open(
                self._directory,
                map_size=self._map_bytes,
                max_dbs=8,
                readonly=readonly,
                create=not readonly,
                mode=0o600,
                max_readers=1024,
                lib_version=_ENGINE,
            )
            try:
                with self._env.begin() as txn, txn.cursor() as cursor:
                    unknown = set(cursor.iternext(values=False)) - set(_DATABASES)
                if unknown:
                    # One of ours was renamed by damage; opening it would make an empty one.
                    raise CatalogDamaged(f"catalog: open: unknown database {min(unknown)!r}")
                opened = [self._open_db(name, readonly) for name in _DATABASES]
            except (lmdb.Error, CatalogDamaged):
                self._env.close()
                raise
        self._records, self._places, self._namespaces, sessions, self._traffic, texts, self._tasks = opened
        self._saved = SavedSessions(sessions, texts)
        self._session_bytes: int | None = None  # not counted yet; changed by who writes
        _open_environments.add(self._env)
        if not readonly:
            self._free_stale_readers()
            self._lengthen()

    def _open_db(self, name: bytes, readonly: bool) -> Any:
        try:
            return self._env.open_db(name, create=not readonly)
        except lmdb.NotFoundError:
            if readonly and name in _OF_FORMAT_2:
                return None  # a store of format 1, which only a writer upgrades
            raise

    def close(self) -> None:
        self._env.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction[bytes]]:
        """A transaction that sees one commit; `renew` waits for its end."""
        with self._gate:
            self._gate.wait_for(lambda: not self._renewing)
            self._inside += 1
        try:
            with _errors("read"), self._env.begin() as txn:
                yield txn
        finally:
            with self._gate:
                self._inside -= 1
                self._gate.notify_all()

    def renew(self) -> None:
        """Open the file anew. LMDB writes pages from buffers that it uses again: what had been in them would come back
        in the gaps of pages. Waits for readers in this process; who writes must be the caller.

        Raises:
            CatalogError: it cannot be opened.
        """
        with self._gate:
            self._renewing = True
            try:
                if not self._gate.wait_for(lambda: not self._inside, _RENEW_WAIT_S):
                    raise CatalogError("catalog: open: a thread of this process reads it all the time")
                self._env.close()
                self._open()
            finally:
                self._renewing = False
                self._gate.notify_all()

    def version(self) -> int:
        """Number of the last commit: a reader that sees another one has something to catch up with."""
        with _errors("read"):
            return int(self._env.info()["last_txnid"])

    def is_sound(self) -> bool:
        """Whether every key that is there is found when it is looked for, keys and values have the lengths that they
        must have, and sessions and numbers of namespaces are intact. Raises `CatalogError` if it cannot be said now.

        `check` knows nothing of that. One flipped bit in a key hides entries; a value of another length must not even
        be deleted, for LMDB would move what lies beside it; without its number a namespace would lose all entries.
        """
        try:
            with self._reading() as txn:
                saved = self._saved
                databases = (self._records, self._places, self._namespaces, self._traffic)
                others = (saved.sessions, saved.texts, self._tasks)
                return all(self._are_sound(txn, db) for db in (*databases, *others) if db is not None)
        except CatalogDamaged:
            return False
        except CatalogError as error:
            if _is_passing(error):
                raise
            return False

    def _are_sound(self, txn: lmdb.Transaction[bytes], db: Any) -> bool:
        numbers = set()
        with txn.cursor(db=db) as cursor:
            for count, key in enumerate(cursor.iternext(values=False)):
                # Each is looked for from the root; a cursor would first look where it stands.
                value = txn.get(key, db=db)
                if value is None:
                    return False
                if db is self._records:
                    sound = len(key) == 8 and is_entry_sized(value)
                elif db is self._places:
                    sound = len(key) == len(value) == 8
                elif db is self._traffic:
                    sound = len(key) == 8 and len(value) == SUM_BYTES + 4 * _TRAFFIC_RUN
                elif db is self._namespaces:
                    numbers.add(_number(key, value))
                    sound = None not in numbers and len(numbers) == count + 1
                else:
                    sound = checked(value) is not None
                if not sound:
                    return False
        return True

    # ---- the file ------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return how large the file would be without free pages. Raises `CatalogError`."""
        saved = self._saved
        databases = (self._records, self._places, self._namespaces, self._traffic, self._tasks)
        with self._reading() as txn:
            stats = [txn.stat(db) for db in (*databases, saved.sessions, saved.texts) if db is not None]
        stats.append(self._env.stat())
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return META_BYTES + pages * PAGE_BYTES

    def write_compacted(self, path: str) -> None:
        """Write a copy without free pages to a new file, of the same commit. Durable on return.

        Raises:
            CatalogError, OSError: the copy is of no use.
        """
        commit = self.version()
        fd = self._fs.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with _errors("copy"):
                self._env.copyfd(fd, compact=True)
            renumbered(self._fs, fd, commit)
            self._fs.fdatasync(fd)
        finally:
            close_quietly(self._fs, fd)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction[bytes]]:
        """A transaction that is committed at the end, durably."""
        with _errors("commit"), self._env.begin(write=True) as txn:
            yield txn
        self._lengthen()
        self._commits += 1
        if self._commits % _LOOK_FOR_STALE == 0:
            self._free_stale_readers()

    def _free_stale_readers(self) -> None:
        """Pages that a reader may see are not used again; a reader that was killed inside of a transaction would keep
        them for ever."""
        with contextlib.suppress(lmdb.Error):  # it is tried again
            found = int(self._env.reader_check())
            if found:
                self._metrics.add(Metric.STALE_READERS, found)

    def _lengthen(self) -> None:
        """LMDB does not write free pages at the end of its file. A file that has them is known to be whole by its
        length alone, which is all that a reader beside a busy writer can check."""
        end = (int(self._env.info()["last_pgno"]) + 1) * PAGE_BYTES
        with contextlib.suppress(OSError):  # it costs a reader a second look
            if self._fs.size(self.path) < end:
                fd = self._fs.open(self.path, os.O_WRONLY)
                try:
                    self._fs.truncate(fd, end)
                finally:
                    close_quietly(self._fs, fd)

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
        with self._writing() as txn:
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
        self, txn: lmdb.Transaction[bytes], changes: Sequence[SessionChange], budget: int | None
    ) -> tuple[int, tuple[int, int]]:
        """Returns what all sessions take then, and how many of them went."""
        saved, total, gone = self._saved, self._session_bytes, (0, 0)
        if total is None:
            total = saved.nbytes(txn)
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
        with self._writing() as txn:
            for key in keys:
                txn.delete(key, db=self._records)

    def get(self, records: Iterable[int]) -> list[Entry | None]:
        """Return the entries at one moment, of records and holes; None if one is gone or damaged."""
        with self._reading() as txn:
            values = [txn.get(_RECORD_KEY.pack(record), db=self._records) for record in records]
        entries = [Entry.unpack(value) if value is not None else None for value in values]
        return [e if e is not None and e.record == r else None for e, r in zip(entries, records, strict=True)]

    def in_segment(self, segment: int) -> list[Entry]:
        """Return the entries whose records lie in a segment, in the order in which they lie."""
        numbers = []
        with self._reading() as txn, txn.cursor(db=self._places) as cursor:
            if cursor.set_range(_PLACE_KEY.pack(segment, 0)):
                for key, value in cursor:
                    if _PLACE_KEY.unpack(key)[0] != segment:
                        break
                    numbers.append(_RECORD_KEY.unpack(value)[0])
        found = self.get(numbers)
        return [entry for entry in found if entry is not None and entry.extent.segment == segment]

    def scan(self, after: int = 0) -> Scan:
        """Return all entries with a number above `after`. Damaged ones are left out and their keys reported."""
        values: list[bytes] = []
        damaged: list[bytes] = []
        begin: bytes | None = _RECORD_KEY.pack(after + 1)
        while begin is not None:
            begin = self._scan_run(begin, values, damaged)
        heads = b"".join([value[: ENTRY.itemsize] for value in values])
        tokens = b"".join([value[ENTRY.itemsize : tokens_end(value)] for value in values])
        entries = np.frombuffer(heads, ENTRY)
        donors = {
            record: donors_of(value)
            for record, value in zip(entries["record"].tolist(), values, strict=True)
            if len(value) > tokens_end(value)
        }
        return Scan.of(entries, np.frombuffer(tokens, "<u4"), damaged, donors)

    def _scan_run(self, begin: bytes, values: list[bytes], damaged: list[bytes]) -> bytes | None:
        """Reads the next entries from the key `begin` on; returns where the ones after them begin, None for nowhere."""
        with self._reading() as txn, txn.cursor(db=self._records) as cursor:
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
        with self._writing() as txn:
            value = txn.get(digest, db=self._namespaces)
            number = _number(digest, value)
            if number is None:
                number = txn.stat(self._namespaces)["entries"] + 1
                txn.put(digest, with_sum(digest + number.to_bytes(4, "little")), db=self._namespaces)
            return number

    def namespaces(self) -> dict[bytes, int]:
        """Return all namespaces: number by digest."""
        with self._reading() as txn, txn.cursor(db=self._namespaces) as cursor:
            pairs = [(key, _number(key, value)) for key, value in cursor]
        return {key: number for key, number in pairs if number is not None and len(key) == 32}

    def session(self, key: bytes) -> SessionRecord | None:
        """Return a session with its tokens; None if there is none or it is damaged."""
        with self._reading() as txn:
            return self._saved.get(txn, key)

    def session_head(self, key: bytes) -> SessionHead | None:
        """Return what stands with a session, without its tokens; None if there is none or it is damaged."""
        with self._reading() as txn:
            return self._saved.head(txn, key)

    def sessions(self) -> list[SessionHead]:
        """Return what stands with each intact session, by key; reads no tokens."""
        with self._reading() as txn:
            return list(self._saved.heads(txn))

    def session_count(self) -> int:
        """Return how many sessions there are, damaged ones included."""
        with self._reading() as txn:
            return self._saved.count(txn)

    def session_bytes(self) -> int:
        """Return how many bytes all sessions take."""
        if self._session_bytes is not None:
            return self._session_bytes
        with self._reading() as txn:
            return self._saved.nbytes(txn)

    def expire_sessions(self) -> int:
        """Remove the sessions whose time is over; return how many. Durable on return. Raises `CatalogError`."""
        if not any(0.0 < head.expiry <= time.time() for head in self.sessions()):
            return 0
        with self._writing() as txn:
            total = self._saved.nbytes(txn) if self._session_bytes is None else self._session_bytes
            grown, expired, _ = self._saved.shrink(txn, time.time(), over=0, budget=0)
        self._session_bytes = total + grown
        return expired

    def session_problems(self) -> tuple[int, list[str]]:
        """Return how many sessions there are, and what is wrong with them."""
        with self._reading() as txn:
            found, taken = self._saved.problems(txn), self._saved.nbytes(txn)
            if self._session_bytes not in (None, taken):
                found.append(f"sessions are counted with {self._session_bytes} bytes, and take {taken}")
            return self._saved.count(txn), found

    def upgrade_sessions(self) -> None:
        """Rewrite all sessions of format 1, in some commits; if it is cut short, it is to be called again.

        Raises:
            CatalogError: the sessions that are left stay as they were.
        """
        with _errors("commit"):
            # Texts that nothing shares take up to twice the room, and stand beside the old sessions for a while.
            info = self._env.info()
            self._env.set_mapsize(int(info["map_size"]) + 2 * (int(info["last_pgno"]) + 1) * PAGE_BYTES)
        after: bytes | None = b""
        while after is not None:
            with self._writing() as txn:
                after = self._saved.upgrade(txn, after, _UPGRADE_RUN)
        self._session_bytes = None

    # ---- tasks ---------------------------------------------------------------------------------------------------

    def erasing(self) -> bool:
        """Return whether an erase was begun and not ended."""
        with self._reading() as txn:
            return self._tasks is not None and txn.get(_ERASE, db=self._tasks) is not None

    def begin_erase(self) -> None:
        """Note that something is to be overwritten. Durable on return. Raises `CatalogError`."""
        with self._writing() as txn:
            txn.put(_ERASE, with_sum(bytes(8)), db=self._tasks)

    def end_erase(self) -> None:
        """Note that all of it was overwritten. Durable on return. Raises `CatalogError`."""
        with self._writing() as txn:
            txn.delete(_ERASE, db=self._tasks)

    def readers_of_older_commits(self) -> list[int]:
        """Return the process ids of readers that see an older commit than the last. Raises `CatalogError`."""
        with _errors("read"):
            self._env.reader_check()  # those of processes that died
            last, rows = self.version(), [line.split() for line in str(self._env.readers()).splitlines()]
        return [int(row[0]) for row in rows if len(row) == 3 and row[2].isdigit() and int(row[2]) < last]

    # ---- traffic -------------------------------------------------------------------------------------------------

    def save_traffic(self, records: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint32]) -> None:
        """Replace what is known of traffic. Durable on return.

        Args:
            records: numbers, uint64 `[m]`, rising.
            counts: how often each was used, uint32 `[m]`.

        Raises:
            CatalogError: nothing changed.
        """
        runs = records // _TRAFFIC_RUN
        numbers, firsts = np.unique(runs, return_index=True)
        ends = [*firsts.tolist(), len(records)][1:]
        with self._writing() as txn:
            txn.drop(self._traffic, delete=False)
            for number, first, end in zip(numbers.tolist(), firsts.tolist(), ends, strict=True):
                run = np.zeros(_TRAFFIC_RUN, "<u4")
                run[records[first:end] % _TRAFFIC_RUN] = counts[first:end]
                txn.put(_RECORD_KEY.pack(number), with_sum(run.tobytes()), db=self._traffic, append=True)

    def traffic(self, records: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Return how often each record had been used when that was last saved, `[m]`; 0 if it is not known."""
        found = np.zeros(len(records), np.uint32)
        with self._reading() as txn:
            for number in np.unique(records // _TRAFFIC_RUN).tolist():
                value = txn.get(_RECORD_KEY.pack(number), db=self._traffic)
                body = checked(value) if value is not None else None
                if body is not None and len(body) == 4 * _TRAFFIC_RUN:
                    here = records // _TRAFFIC_RUN == number
                    found[here] = np.frombuffer(body, "<u4")[records[here] % _TRAFFIC_RUN]
        return found

    def _forget(self, txn: lmdb.Transaction[bytes], entry: Entry) -> None:
        key, place = _RECORD_KEY.pack(entry.record), _place(entry.extent)
        txn.delete(key, db=self._records)
        if txn.get(place, db=self._places) == key:
            txn.delete(place, db=self._places)


def check(directory: str, name: str = DATA_FILE) -> list[str]:
    """Return what is wrong with the structure of the LMDB file, as text; [] if nothing is.

    This reads the file without handing it to LMDB, which would map a truncated file and die by SIGBUS. It looks at no
    page of a long value but the first: see `is_cut_short`.

    Raises:
        OSError: the file cannot be read, which says nothing about its bytes.
    """
    try:
        return [str(problem) for problem in _verify(os.path.join(directory, name))]
    except OSError as error:
        if is_passing(error):
            raise
        return [str(error)]
    except (lmdb_verify.VerifyError, struct.error, ValueError, IndexError, OverflowError) as error:
        return [str(error)]


def _verify(path: str) -> list[Any]:
    found: list[Any] = lmdb_verify.verify(path, subdir=False)  # type: ignore[no-untyped-call]
    return found


def _place(extent: Extent) -> bytes:
    return _PLACE_KEY.pack(extent.segment, extent.offset // PAGE_BYTES)


def _number(namespace: bytes, value: bytes | None) -> int | None:
    # The namespace stands in the value too, for the sum to cover: the key alone would not tell that it is damaged.
    body = checked(value) if value is not None else None
    if body is None or len(body) != 36 or body[:32] != namespace:
        return None
    return int.from_bytes(body[32:], "little")


_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
_open_environments: weakref.WeakSet[lmdb.Environment] = weakref.WeakSet()
_keys_of_files = lmdb_files.env_keys


def _leave_inherited() -> None:
    """In a forked child: lets go of the parent's environments without touching them.

    To close one, or to let Python free it, waits for the transactions that the parent's other threads were inside of
    at the fork; in the child these threads do not exist, and it waits for ever. So the child keeps them. And py-lmdb
    refuses to open a file twice in one process; here it is another process, whose files it must tell from the parent's.
    """
    for environment in list(_open_environments):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(environment))
        _open_environments.discard(environment)
    lmdb_files.env_keys = _keys_in_this_process


def _keys_in_this_process(path: Any, subdir: bool) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _keys_of_files(path, subdir)  # type: ignore[no-untyped-call]
    return tuple((os.getpid(), key) for key in found)


os.register_at_fork(after_in_child=_leave_inherited)


def _is_passing(error: CatalogError) -> bool:
    """Whether an error of LMDB says nothing about the file."""
    cause = error.__cause__
    code = getattr(cause, "code", None)
    return isinstance(cause, lmdb.ReadersFullError) or (isinstance(code, int) and is_passing(OSError(code, "")))


@contextlib.contextmanager
def _errors(doing: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise CatalogDamaged(f"catalog: {doing}: {error}") from error
    except lmdb.Error as error:
        if "already open in this process" in str(error):
            raise StoreLocked(
                "the store is open in this process already; share that KVStore object, or open it from another process"
            ) from error
        raise CatalogError(f"catalog: {doing}: {error}") from error
