"""Opens what is on disk: superblock, catalog, segments; mends what can be mended, and counts it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvstore.config import GIB, MIB, PAGE_BYTES, StoreConfig
from kvstore.core.distinct import distinct
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.errors import ConfigError, CorruptStore, DiskError, StoreNotFound
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk import budget, environment
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.catalog_file import DATA_FILE, LOCK_FILE, Metas, problem_of_pages
from kvstore.tiers.disk.entry import Entry, Scan
from kvstore.tiers.disk.environment import CatalogDamaged, CatalogError
from kvstore.tiers.disk.files import segment_path
from kvstore.tiers.disk.fs import FileSystem, NotAFile, close_quietly, is_passing, make_directory
from kvstore.tiers.disk.lock import WriterLock
from kvstore.tiers.disk.rebuild import rebuild, recover_entries
from kvstore.tiers.disk.segment_file import segment_numbers
from kvstore.tiers.disk.segments import Segments
from kvstore.tiers.disk.superblock import FORMAT, Superblock
from kvstore.tiers.disk.whole_file import read_whole

_MOST_LOCK_BYTES = 1 << 24  # LMDB's takes 64 bytes a reader
# What a store makes beside its segments and its catalog, and what file systems do.
_OWN = ("store.json", "writer.lock", "owner.sock", "profiles", "lost+found")
_log = logging.getLogger("kvstore.folder_not_empty")
# A catalog is written anew when it takes more than this many times what is in it, and so many bytes on top.
_GROWN, _GROWN_BYTES = 2, MIB
# A reader that looks at the file while a writer changes it looks again, and then waits so often, so many seconds.
_LOOKS, _WAITS, _WAIT_S = 3, 50, 0.02


@contextlib.contextmanager
def told(path: str) -> Iterator[None]:
    """Turn errors of the system into typed ones that name the file and say what to do, while `path` is opened.

    Raises:
        CorruptStore: something else stands where a file should be.
        ConfigError: `path` leads through a file.
        DiskError: everything else; nothing on disk is damaged by it.
    """
    try:
        yield
    except NotAFile as error:
        raise CorruptStore(f"{error.filename}: {error.strerror}; remove it, then open the store again") from error
    except (FileExistsError, NotADirectoryError) as error:
        where = str(error.filename or path)
        kind = "a file"
        with contextlib.suppress(OSError):  # it leads through a file
            kind = FileSystem().kind(where)
        raise ConfigError(f"path: {where} is {kind}; name a folder") from error
    except OSError as error:
        raise DiskError(
            f"{error.filename or path}: the store cannot be opened now: {error.strerror or error}. Its contents are "
            "not damaged by this; mend the cause (rights, open files, space, the disk), then open it again"
        ) from error


def settled_config(fs: FileSystem, path: str, config: StoreConfig, read_only: bool, layout: KVLayout) -> StoreConfig:
    """Return the settings with the sizes of the store at `path`; if there is none, with those that fit its budget.
    Changes nothing.

    Raises:
        StoreNotFound: there is none, and it is to be read only.
        ConfigError: `path` is a file, or the budget is too small for the sizes of the store.
        FormatVersion, CorruptStore, DiskError: the superblock cannot be read.
    """
    with told(path):
        try:
            kind = fs.kind(path)
        except FileNotFoundError:
            kind = ""
        if kind not in ("", "a folder"):
            raise ConfigError(f"path: {path} is {kind}; name a folder")
        superblock = Superblock.read(fs, path) if kind else None
        if superblock is not None:
            config = superblock.settled(config)
            if read_only:
                return config
            config = budget.checked(config, f"{path} keeps the segment_bytes that it was made with; ")
            budget.check_reservations(config)
            return config
        if read_only and not (kind and "segments" in fs.names(path) and fs.names(os.path.join(path, "segments"))):
            what = "there is no such folder" if not kind else "the folder holds no store"
            raise StoreNotFound(f"{path}: {what}, and read_only=True makes none; open it for writing first")
        config = budget.fitted(config, layout)
        budget.check_reservations(config)
        if kind:
            _warn_of_others(fs, path)
        return config


def _warn_of_others(fs: FileSystem, path: str) -> None:
    """Log that a store is made in a folder that holds other files."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # whoever opens the store will meet it
        names = sorted(fs.names(path))
    others = [name for name in names if not name.startswith(_OWN)]
    if others and not {"segments", "catalog"} & set(names):
        _log.warning(
            "%s: the folder is not empty and holds no store (%s, ...); the store's files are made among those that are "
            "there. Give a store a folder of its own, so that it can be deleted as a whole",
            path,
            ", ".join(others[:3]),
        )


@dataclass(frozen=True)
class Opening:
    """One attempt to open the store at `path`. Immutable.

    Attributes:
        fs, path, config, read_only, metrics: as for `DiskTier`.
    """

    fs: FileSystem
    path: str
    config: StoreConfig
    read_only: bool
    metrics: Metrics

    @property
    def segment_directory(self) -> str:
        return os.path.join(self.path, "segments")

    @property
    def catalog_directory(self) -> str:
        return os.path.join(self.path, "catalog")

    @property
    def catalog_file(self) -> str:
        return os.path.join(self.catalog_directory, DATA_FILE)

    @property
    def _damaged_file(self) -> str:
        return self.catalog_file + ".damaged"

    def superblock(self, identity: ModelIdentity, lock: WriterLock) -> Superblock:
        """Take the lock (a reader does not), and read or make the superblock.

        Raises:
            StoreLocked, FormatVersion, IdentityMismatch, CorruptStore: the lock is not held then.
        """
        if not self.read_only:
            for directory in (self.path, self.segment_directory, self.catalog_directory):
                make_directory(self.fs, directory)
            lock.take()
        try:
            self._check_kinds()
            superblock = Superblock.read(self.fs, self.path)
            if superblock is None:
                if self.read_only or self.fs.names(self.segment_directory):
                    raise CorruptStore(
                        f"{self.path}: store.json is missing; name the folder of a store, or restore the file"
                    )
                superblock = Superblock.new(identity, self.config.block_tokens, self.config.segment_bytes)
                superblock.write(self.fs, self.path)
            superblock.check(self.path, identity)
            if superblock.settled(self.config) != self.config:
                raise DiskError(f"{self.path}: another process made a store here at this moment; open it again")
            if superblock.format != FORMAT and not self.read_only:
                superblock.write(self.fs, self.path)  # before the catalog changes: an older program must not see that
            return self._with_tokenizer(superblock, identity)
        except BaseException:
            lock.release()
            raise

    def _with_tokenizer(self, superblock: Superblock, identity: ModelIdentity) -> Superblock:
        """Notes the tokenizer that is named first. It is a label, so that a disk which refuses it refuses nothing."""
        if self.read_only or superblock.tokenizer or not identity.tokenizer:
            return superblock
        named = replace(superblock, tokenizer=identity.tokenizer)
        try:
            named.write(self.fs, self.path)
        except OSError:
            self.metrics.add(Metric.DISK_WRITE_ERRORS)
            return superblock
        return named

    def _check_kinds(self) -> None:
        """Raises `CorruptStore` where something else stands in place of a folder, or of a file that LMDB opens."""
        expected = dict.fromkeys((self.segment_directory, self.catalog_directory), "a folder")
        expected[os.path.join(self.path, "profiles")] = "a folder"
        expected |= dict.fromkeys((self.catalog_file, self._damaged_file), "a file")
        expected[os.path.join(self.catalog_directory, LOCK_FILE)] = "a file"
        for path, kind in expected.items():
            with contextlib.suppress(FileNotFoundError):
                found = self.fs.kind(path)
                if found != kind:
                    raise CorruptStore(f"{path}: is {found}, not {kind}; remove it, then open the store for writing")
        lock_file = os.path.join(self.catalog_directory, LOCK_FILE)
        with contextlib.suppress(FileNotFoundError):
            if self.fs.size(lock_file) > _MOST_LOCK_BYTES:
                raise CorruptStore(f"{lock_file}: is no lock file of LMDB; remove it, then open the store again")

    def upgrade(self, superblock: Superblock, catalog: Catalog) -> None:
        """Make a store of format 1 one of format 2. If this is cut short, the next open for writing goes on with it.

        Raises:
            CatalogError, OSError: the disk refuses; nothing is lost.
        """
        if superblock.format != FORMAT and not self.read_only:
            catalog.upgrade_sessions()
            replace(superblock, format=FORMAT).write(self.fs, self.path)
            self.metrics.add(Metric.FORMAT_UPGRADED)

    def catalog(self, lock: WriterLock) -> Catalog:
        """Open the catalog, or rebuild it from the segments if it is damaged. A reader waits a moment for a writer that
        makes or rebuilds it.

        Raises:
            StoreNotFound: to a reader: the store is not made yet.
            CorruptStore: to a reader: the catalog is damaged.
        """
        found = self._sound_catalog(lock)
        if self.read_only and isinstance(found, str) and not lock.is_free():
            for _ in range(_WAITS):
                time.sleep(_WAIT_S)
                found = self._sound_catalog(lock)
                if not isinstance(found, str):
                    break
        if not isinstance(found, str):
            return found
        if self.read_only and not self._segment_numbers():
            raise StoreNotFound(
                f"{self.path}: the store is being made, or was not finished (catalog: {found}); open it again when a "
                "program has opened it for writing"
            )
        return self.rebuilt(found)

    def _sound_catalog(self, lock: WriterLock) -> Catalog | str:
        """The catalog, or what is wrong with it."""
        if self._is_there(self._damaged_file):  # it is begun again
            return f"a rebuild was cut short ({DATA_FILE}.damaged is there)"
        is_new = not self._is_there(self.catalog_file)
        found = "it is new" if is_new else read_whole(self.fs, self.catalog_file)
        whole = None if isinstance(found, str) else found
        problems, busy = self._look() if whole is None else ([], False)
        if problems:
            return problems[0]
        if is_new and self.read_only:
            return "it is missing"
        try:
            catalog = self.new_catalog()
        except CatalogDamaged as error:
            return str(error)
        # A live writer has looked at every entry when it opened the file.
        try:
            if is_new:
                self._keep_names(catalog)
            if busy or (self.read_only and not lock.is_free()) or catalog.is_sound(entries=whole is None):
                if whole is not None:
                    catalog.offer(*whole)
                elif not is_new:
                    self.metrics.add(Metric.FALLBACK_CATALOG_SCAN, because=found)
                return catalog
        except BaseException:
            catalog.close()
            raise
        catalog.close()
        return "entries that are there cannot be found, or the number of a namespace is lost"

    def compacted(self, catalog: Catalog) -> Catalog:
        """Return the catalog, in a smaller file if its own has grown far beyond what is in it.

        It grows when readers live long. The new file takes the place of the old one only if nobody else has that open,
        and whole or not at all. What fails is counted, and the catalog stays as it is.

        Raises:
            CatalogError: the catalog cannot be opened again.
        """
        copy = self.catalog_file + ".new"
        if self.read_only:
            return catalog
        written = False
        try:
            if self._is_there(copy):
                self.fs.unlink(copy)  # of a time that was cut short
            if self.fs.size(self.catalog_file) > _GROWN * catalog.environment.used_bytes() + _GROWN_BYTES:
                catalog.environment.write_compacted(copy)
                written = not environment.check(self.catalog_directory, os.path.basename(copy))
        except (CatalogError, OSError) as error:
            self.metrics.add(Metric.CATALOG_ERRORS, because=error)
        if written:
            catalog.close()
            try:
                self._replace_catalog(copy)
            except OSError as error:
                self.metrics.add(Metric.CATALOG_ERRORS, because=error)
            catalog = self.new_catalog()
        with contextlib.suppress(OSError):
            if self._is_there(copy):
                self.fs.unlink(copy)
        return catalog

    def _replace_catalog(self, copy: str) -> None:
        """Puts the copy in the place of the catalog's file, which this process has closed, if no other has it open."""
        fd = self.fs.open(os.path.join(self.catalog_directory, LOCK_FILE), os.O_RDWR)
        try:
            if self.fs.is_sole_user(fd):
                self.fs.rename(copy, self.catalog_file)
                self.fs.sync_directory(self.catalog_directory)
                self.metrics.add(Metric.CATALOG_COMPACTED)
        finally:
            close_quietly(self.fs, fd)

    def rebuilt(self, problem: str) -> Catalog:
        """Make a new catalog from the segments, in place of the damaged one. Raises `CorruptStore` for a reader."""
        self.metrics.add(Metric.CATALOG_DAMAGED, because=problem)
        if self.read_only:
            raise CorruptStore(f"{self.catalog_file}: {problem}; open the store for writing to rebuild it")
        return self._rebuild()

    def _look(self) -> tuple[list[str], bool]:
        """(what is wrong with the catalog's file, whether a writer changed it all the while, so that only its length
        could be checked)."""
        for _ in range(_LOOKS):
            before = self._commits()
            problems = self._problems()
            if not problems or not self.read_only or before == self._commits():
                return problems, False
        for _ in range(_WAITS):
            metas = Metas.read(self.fs, self.catalog_file)
            if self.fs.size(self.catalog_file) >= metas.end:
                return [], True
            time.sleep(_WAIT_S)
        raise DiskError(f"{self.catalog_file}: its writer changes it all the time; open the store again")

    def _commits(self) -> tuple[int, int] | None:
        try:
            return Metas.read(self.fs, self.catalog_file).commits
        except OSError as error:
            if is_passing(error):
                raise
            return None

    def _problems(self) -> list[str]:
        if not self._is_there(self.catalog_file):
            # The catalog is made before the first segment.
            return ["it is missing"] if self._segment_numbers() else []
        if problems := environment.check(self.catalog_directory):
            return problems
        try:
            if problem := problem_of_pages(self.fs, self.catalog_file):
                return [problem]
            agree = Metas.read(self.fs, self.catalog_file).agree
        except OSError as error:
            if is_passing(error):
                raise
            return [str(error)]
        return [] if agree else ["its two meta pages are not of two commits in a row"]

    def new_catalog(self) -> Catalog:
        """Open or make the LMDB environment as it is. Raises `CatalogError`, `StoreLocked`."""
        map_bytes = min(max(self.config.disk.bytes // 4, 64 * MIB), 64 * GIB)
        with contextlib.suppress(OSError):
            # A full one can still be opened, and made smaller.
            map_bytes = max(map_bytes, self.fs.size(self.catalog_file) + MIB)
        while True:
            before = self._inode()
            catalog = Catalog(self.catalog_directory, map_bytes, self.read_only, self.metrics, self.fs)
            if not self.read_only or before == self._inode():
                return catalog
            catalog.close()  # a writer put another file in its place meanwhile

    def _inode(self) -> tuple[int, int] | None:
        try:
            return self.fs.inode(self.catalog_file)
        except OSError:
            return None

    def scan(self, catalog: Catalog, segments: Segments) -> Scan:
        """Open the segments, and return all sound entries.

        Damaged entries are read again from their records, and those with a damaged key put under their own. Those that
        cannot be are dropped and counted.
        """
        scan = catalog.scan()
        numbers = self._segment_numbers()
        if scan.damaged:
            self.metrics.add(Metric.DAMAGED_ENTRIES, len(scan.damaged))
            if not self.read_only:
                mended = self._mended(catalog, scan, numbers)
                catalog.purge(scan.damaged)
                catalog.commit(mended)
                self.metrics.add(Metric.MENDED_ENTRIES, len(mended))
                scan = catalog.scan()
        rows = scan.entries
        ends = (rows["page"].astype(np.uint64) + rows["pages"]) * PAGE_BYTES
        sound = (ends <= self.config.segment_bytes) & (rows["page"] > 0) & (rows["pages"] > 0)
        sound &= np.isin(rows["segment"], np.array(numbers, dtype=np.uint32))
        if not sound.all():
            self.metrics.add(Metric.LOST_ENTRIES, int((~sound).sum()))
            # What is behind these records is found by their tokens.
            lost = [entry for entry in catalog.get(rows["record"][~sound].tolist()) if entry is not None]
            if not self.read_only:
                catalog.commit(added=[entry.as_hole() for entry in lost])
            scan = scan.subset(sound).with_holes([entry.as_hole() for entry in lost])
        self._open_segments(scan, segments)
        return scan

    def _mended(self, catalog: Catalog, scan: Scan, numbers: list[int]) -> list[Entry]:
        """What the damaged entries of a scan were."""
        there = {record for rows in (scan.entries, scan.holes) for record in rows["record"].tolist()}
        found = {entry.record: entry for entry in catalog.misplaced(scan.damaged) if entry.record not in there}
        again = recover_entries(
            self.fs, self.segment_directory, numbers, self.config.segment_bytes, scan, catalog.namespaces()
        )
        return list({**{entry.record: entry for entry in again}, **found}.values())

    def _open_segments(self, scan: Scan, segments: Segments) -> None:
        rows = scan.entries
        numbers, where = distinct(rows["segment"])
        ends = np.zeros(len(numbers), np.int64)
        np.maximum.at(ends, where, (rows["page"].astype(np.int64) + rows["pages"]) * PAGE_BYTES)
        live = np.bincount(where, rows["pages"], len(numbers)).astype(np.int64) * PAGE_BYTES
        used = {int(n): (int(e), int(b)) for n, e, b in zip(numbers, ends, live, strict=True)}
        damaged = segments.open_existing(used, not self.read_only)
        if damaged:
            self.metrics.add(Metric.DAMAGED_SEGMENTS, len(damaged))
        if not segments.files.direct:
            self.metrics.add(Metric.FALLBACK_BUFFERED_IO)

    def _rebuild(self) -> Catalog:
        if self._is_there(self._damaged_file):
            # What the cut-short rebuild made is worth nothing; what it started from is still there.
            if self._is_there(self.catalog_file):
                self.fs.unlink(self.catalog_file)
        elif self._is_there(self.catalog_file):
            self.fs.rename(self.catalog_file, self._damaged_file)
            self.fs.sync_directory(self.catalog_directory)  # or what is made anew could be taken for the old one
        catalog, found = rebuild(
            self.fs,
            self.segment_directory,
            self._damaged_file,
            self._segment_numbers(),
            self.config.segment_bytes,
            self.new_catalog,
        )
        self.metrics.add(Metric.CATALOG_REBUILT)
        self.metrics.add(Metric.CATALOG_REBUILT_RECORDS, found.records)
        self.metrics.add(Metric.CATALOG_REBUILT_SESSIONS, found.sessions)
        self._keep_names(catalog)
        if self._is_there(self._damaged_file):
            self.fs.unlink(self._damaged_file)
        return catalog

    def _keep_names(self, catalog: Catalog) -> None:
        """Makes it durable that the files of the catalog are there. Closes it and raises `OSError` where that fails."""
        try:
            self.fs.sync_directory(self.catalog_directory)
        except BaseException:
            catalog.close()
            raise

    def _segment_numbers(self) -> list[int]:
        """The segments that are files: what else is there under such a name is left alone."""
        found = []
        for number in segment_numbers(self.fs, self.segment_directory):
            with contextlib.suppress(NotAFile, FileNotFoundError):  # a writer may remove one at this moment
                self.fs.size(segment_path(self.segment_directory, number))
                found.append(number)
        return found

    def _is_there(self, path: str) -> bool:
        return os.path.basename(path) in self.fs.names(self.catalog_directory)
