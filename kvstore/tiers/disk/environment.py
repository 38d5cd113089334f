"""The LMDB environment that the catalog lives in: opening, transactions, the file, forks, and what goes wrong.

What is stored in it, the catalog says. This is the only module that imports lmdb.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import lmdb
from lmdb import _envid as lmdb_files
from lmdb import verify as lmdb_verify

from kvstore.config import PAGE_BYTES
from kvstore.core.waiting import Bell
from kvstore.errors import DiskError, StoreLocked
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk.catalog_file import DATA_FILE, META_BYTES, renumbered
from kvstore.tiers.disk.fs import FileSystem, close_quietly, is_passing

Transaction: TypeAlias = "lmdb.Transaction[bytes]"

_RENEW_WAIT_S = 30.0
_LOOK_FOR_STALE = 32  # commits between two looks for readers that died inside of a transaction

# The engine's format, pinned: an environment variable of py-lmdb could otherwise change it.
_ENGINE = 0


class CatalogError(DiskError):
    """LMDB refused. The transaction changed nothing."""

    @property
    def is_passing(self) -> bool:
        """Whether it says nothing about the file."""
        cause = self.__cause__
        code = getattr(cause, "code", None)
        return isinstance(cause, lmdb.ReadersFullError) or (isinstance(code, int) and is_passing(OSError(code, "")))


class CatalogDamaged(CatalogError):
    """LMDB refused the file itself: it is damaged, or of another version."""


class Environment:
    """An open LMDB environment. Reads are thread-safe; the disk tier's lock lets one thread write at a time.

    Args:
        directory: of the LMDB files; it must exist. The caller has checked the file (`check`).
        map_bytes: the most bytes that the file may take.
        readonly: open it beside a writer.
        databases: names of all that there may be in it; whoever writes makes those that are missing.
        may_lack: names of those that a reader can do without.
        opened: called with what stands for each of the databases (None for one that is lacking) whenever the file was
            opened, before anybody reads.
        metrics: where readers that died are counted; None for nowhere.
        fs: the file system.

    Attributes:
        path: of the file.

    Raises:
        CatalogDamaged: the file is damaged.
        CatalogError: LMDB refuses the file.
        StoreLocked: this process has the file open already; LMDB allows one environment of a file per process.

    Example:
        >>> import tempfile
        >>> folder, opened = tempfile.TemporaryDirectory(), []
        >>> environment = Environment(folder.name, 1 << 24, False, [b"words"], (), opened.extend)
        >>> with environment.writing() as txn:
        ...     txn.put(b"key", b"value", db=opened[0])
        True
        >>> with environment.reading() as txn:
        ...     txn.get(b"key", db=opened[0])
        b'value'
        >>> environment.close()
        >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str,
        map_bytes: int,
        readonly: bool,
        databases: Sequence[bytes],
        may_lack: Collection[bytes],
        opened: Callable[[Sequence[Any]], None],
        metrics: Metrics | None = None,
        fs: FileSystem | None = None,
    ) -> None:
        self.path = os.path.join(directory, DATA_FILE)
        self._fs = fs or FileSystem()
        self._metrics = metrics or Metrics()
        self._commits = 0
        self._directory, self._map_bytes, self._readonly = directory, map_bytes, readonly
        self._names, self._may_lack, self._opened = databases, may_lack, opened
        # The transactions that read: each has a lock of its own, held meanwhile, which Python gives back however it
        # ends. One that was interrupted may stay here, with its lock free.
        self._inside: dict[threading.Lock, None] = {}
        self._renewing, self._renewed = False, Bell()
        self._open()

    def _open(self) -> None:
        readonly = self._readonly
        with _errors("open"):
            self._lmdb = lmdb.open(
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
                with self._lmdb.begin() as txn, txn.cursor() as cursor:
                    unknown = set(cursor.iternext(values=False)) - set(self._names)
                if unknown:
                    # One of ours was renamed by damage; opening it would make an empty one.
                    raise CatalogDamaged(f"catalog: open: unknown database {min(unknown)!r}")
                self._databases = [self._open_database(name) for name in self._names]
            except (lmdb.Error, CatalogDamaged):
                self._lmdb.close()
                raise
        self._opened(self._databases)
        _open_environments.add(self._lmdb)
        if not readonly:
            self._free_stale_readers()
            self._lengthen()

    def _open_database(self, name: bytes) -> Any:
        try:
            return self._lmdb.open_db(name, create=not self._readonly)
        except lmdb.NotFoundError:
            if self._readonly and name in self._may_lack:
                return None
            raise

    def close(self) -> None:
        self._lmdb.close()

    def renew(self) -> None:
        """Open the file anew. LMDB writes pages from buffers that it uses again: what had been in them would come back
        in the gaps of pages. Waits for readers in this process; who writes must be the caller.

        Raises:
            CatalogError: it cannot be opened, or was removed.
        """
        try:
            self._fs.size(self.path)
        except OSError as error:  # LMDB would make an empty one
            raise CatalogError(
                f"catalog: {self.path} was removed ({error}); close the store, and open it anew, which rebuilds it"
            ) from error
        self._renewing = True  # who begins to read from here on waits; the others are in the list
        try:
            end = time.monotonic() + _RENEW_WAIT_S
            for running in list(self._inside):
                if not running.acquire(timeout=max(0.0, end - time.monotonic())):
                    raise CatalogError("catalog: open: a thread of this process reads it all the time")
                running.release()
                self._inside.pop(running, None)
            self._lmdb.close()
            self._open()
        finally:
            self._renewing = False
            self._renewed.ring()

    # ---- transactions --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[Transaction]:
        """A transaction that sees one commit; `renew` waits for its end."""
        done = False
        while not done:
            self._renewed.wait_for(lambda: not self._renewing)
            running = threading.Lock()
            try:
                with running:
                    self._inside[running] = None
                    if not self._renewing:  # otherwise `renew` may not have seen us
                        done = True
                        with _errors("read"), self._lmdb.begin() as txn:
                            yield txn
            finally:
                self._inside.pop(running, None)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Transaction]:
        """A transaction that is committed at the end, durably."""
        with _errors("commit"), self._lmdb.begin(write=True) as txn:
            yield txn
        self._lengthen()
        self._commits += 1
        if self._commits % _LOOK_FOR_STALE == 0:
            self._free_stale_readers()

    def version(self) -> int:
        """Number of the last commit that a transaction sees which begins now: a reader that sees another one has
        something to catch up with.

        LMDB's own last number rises while the commit is on its way to the disk and no transaction sees it yet.
        """
        with self.reading() as txn:
            return int(txn.id())

    def readers_of_older_commits(self) -> list[int]:
        """Return the process ids of readers that see an older commit than the last. Raises `CatalogError`."""
        with _errors("read"):
            self._lmdb.reader_check()  # those of processes that died
            last, rows = self.version(), [line.split() for line in str(self._lmdb.readers()).splitlines()]
        return [int(row[0]) for row in rows if len(row) == 3 and row[2].isdigit() and int(row[2]) < last]

    def _free_stale_readers(self) -> None:
        """Pages that a reader may see are not used again; a reader that was killed inside of a transaction would keep
        them for ever."""
        with contextlib.suppress(lmdb.Error):  # it is tried again
            found = int(self._lmdb.reader_check())
            if found:
                self._metrics.add(Metric.STALE_READERS, found)

    # ---- the file ------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return how large the file would be without free pages. Raises `CatalogError`."""
        with self.reading() as txn:
            stats = [txn.stat(database) for database in self._databases if database is not None]
        stats.append(self._lmdb.stat())
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return META_BYTES + pages * PAGE_BYTES

    def grow(self, times: int) -> None:
        """Let the file take so many times its size more than it may. Raises `CatalogError`."""
        with _errors("commit"):
            info = self._lmdb.info()
            self._lmdb.set_mapsize(int(info["map_size"]) + times * (int(info["last_pgno"]) + 1) * PAGE_BYTES)

    def write_compacted(self, path: str) -> None:
        """Write a copy without free pages to a new file, of the same commit. Durable on return.

        Raises:
            CatalogError, OSError: the copy is of no use.
        """
        commit = self.version()
        fd = self._fs.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with _errors("copy"):
                self._lmdb.copyfd(fd, compact=True)
            renumbered(self._fs, fd, commit)
            self._fs.fdatasync(fd)
        finally:
            close_quietly(self._fs, fd)

    def _lengthen(self) -> None:
        """LMDB does not write free pages at the end of its file. A file that has them is known to be whole by its
        length alone, which is all that a reader beside a busy writer can check."""
        end = (int(self._lmdb.info()["last_pgno"]) + 1) * PAGE_BYTES
        with contextlib.suppress(OSError):  # it costs a reader a second look
            if self._fs.size(self.path) < end:
                fd = self._fs.open(self.path, os.O_WRONLY)
                try:
                    self._fs.truncate(fd, end)
                finally:
                    close_quietly(self._fs, fd)


def check(directory: str, name: str = DATA_FILE) -> list[str]:
    """Return what is wrong with the structure of the LMDB file, as text; [] if nothing is.

    This reads the file without handing it to LMDB, which would map a truncated file and die by SIGBUS. It looks at no
    page of a long value but the first, and not at how long nodes are: see `problem_of_pages`.

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


_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
_REMEDY = (
    "; also who only reads needs the right to write this folder and the files in it, for LMDB lists its readers there: "
    "give this user that right, or a copy of the store"
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


@contextlib.contextmanager
def _errors(doing: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise CatalogDamaged(f"catalog: {doing}: {error}") from error
    except lmdb.Error as error:
        if "already open in this process" in str(error):
            raise StoreLocked(
                "the store is open in this process already",
                "share that KVStore object, or open it from another process",
            ) from error
        remedy = _REMEDY if "Permission denied" in str(error) else ""
        raise CatalogError(f"catalog: {doing}: {error}{remedy}") from error
