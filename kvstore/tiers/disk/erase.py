"""Erasing: after records and sessions were removed, nothing of them is left in any file of the store."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable

from kvstore.config import PAGE_BYTES
from kvstore.errors import DiskError
from kvstore.metrics import Metric
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.files import segment_path
from kvstore.tiers.disk.overwrite import gaps, zero, zero_unused_pages
from kvstore.tiers.disk.space import DiskSpace

_WAIT_S = 10.0  # for gets that read what is to be overwritten, and for readers of the catalog in other processes
_LOOK_S = 0.002
NOTHING_ERASED = "nothing is removed or overwritten"


def not_removed(error: CatalogError) -> DiskError:
    """The error of an erase whose records the catalog could not remove."""
    return DiskError(
        f"erase: nothing is overwritten, and what was to be erased is still in the catalog, which cannot be written "
        f"({error}). No get finds it, and the store ends the erase when the disk is well; but it comes back if the "
        "store is closed before that: erase again then"
    )


class DiskErase(DiskSpace):
    """What `DiskTier` does to overwrite everything that nothing names any more; see FORMAT.md, "Erase"."""

    _unfinished = False  # an erase was cut short by a reader; guarded by the write lock

    def begin_erase(self) -> None:
        """Note that something is about to be removed and overwritten: if it is cut short, the next open for writing
        ends it. Durable on return. Raises `CatalogError`; then nothing was noted, and nothing may be removed."""
        with self._write_lock:
            try:
                self._durably(self.catalog.begin_erase)
            except CatalogError as error:
                raise CatalogError(
                    f"erase: {NOTHING_ERASED}: the catalog cannot be written ({error}); erase again when the disk is "
                    "well"
                ) from error.__cause__

    def end_erase(self, wait_s: float | None = None) -> None:
        """Overwrite all bytes of the segments and of the catalog that nothing names. Durable on return.

        Args:
            wait_s: how long to wait for readers of the catalog in other processes; default is ten seconds.

        Raises:
            DiskError: it could not be ended; the next erase, or the next open for writing, ends it. So does
                `finish_erase` where a reader was in the way.
        """
        with self._write_lock:
            try:
                self._remove(())
            except CatalogError as error:
                self.metrics.add(Metric.CATALOG_ERRORS, because=error)
                raise not_removed(error) from error
            try:
                self.catalog.environment.renew()
                has_holes = self._zero_segments()
                self._wait_for_readers(wait_s)
                zero_unused_pages(self._fs, self._opening.catalog_file, self.catalog.environment.version())
                self._durably(self.catalog.end_erase)
            except (OSError, CatalogError) as error:
                raise DiskError(
                    f"erase: everything is removed, but not overwritten yet ({error}); erase again, or open the store "
                    "anew, when the disk is well"
                ) from error
            self._unfinished = False
            self.metrics.add(Metric.ERASES)
            if not has_holes:
                self.metrics.add(Metric.FALLBACK_ZEROS)

    def finish_erase(self) -> None:
        """End an erase that a reader cut short, if the reader is gone. A failure is counted; call it again."""
        if not self._unfinished:
            return
        with self._write_lock:
            try:
                if not self.catalog.environment.readers_of_older_commits():
                    self.end_erase(0.0)
                    self.metrics.add(Metric.ERASES_RESUMED)
            except CatalogError:
                self.metrics.add(Metric.CATALOG_ERRORS)
            except DiskError:
                self.metrics.add(Metric.DISK_WRITE_ERRORS)

    def finish_removals(self, at_once: bool = False) -> None:
        """Remove from the catalog what the index forgot while that could not be written, and end the erase that it was
        for. A failure is counted; call it again.

        at_once: not only some seconds after it was tried last.
        """
        if not self._orphans or not (at_once or time.monotonic() >= self._orphans_at):
            return
        with self._write_lock, contextlib.suppress(CatalogError):
            self._remove_orphans()
            self._unfinished = self._unfinished or self.catalog.erasing()

    def resume_erase(self) -> None:
        """End an erase that was cut short in an earlier life of the store. A failure is counted, and leaves it to the
        next open."""
        try:
            if self.catalog.erasing():
                self.end_erase()
                self.metrics.add(Metric.ERASES_RESUMED)
        except CatalogError:
            self.metrics.add(Metric.CATALOG_ERRORS)
        except DiskError:
            self.metrics.add(Metric.DISK_WRITE_ERRORS)

    def _durably(self, change: Callable[[], object]) -> None:
        try:
            change()
        except CatalogError:
            self.metrics.add(Metric.CATALOG_ERRORS)
            self._reopen_catalog()
            raise

    def _zero_segments(self) -> bool:
        """Everything but page 0 and live records; returns whether that made holes everywhere."""
        live: dict[int, list[tuple[int, int]]] = defaultdict(list)
        rows = self.catalog.scan().entries
        for segment, page, pages in rows[["segment", "page", "pages"]].tolist():
            if pages:
                live[segment].append((page * PAGE_BYTES, (page + pages) * PAGE_BYTES))
        has_holes = True
        with self._lock:
            numbers = sorted(self.segments.by_number)
        for number in numbers:
            self._wait_for_gets(number)
            file = self.segments.files.get(number)
            end = min(self._config.segment_bytes, self._fs.size(segment_path(self.segments.directory, number)))
            for begin, last in gaps(sorted(live[number]), PAGE_BYTES, end - end % PAGE_BYTES):
                has_holes &= zero(self._fs, file.fd, begin, last)
            self._fs.fdatasync(file.fd)
        return has_holes

    def _wait_for_gets(self, number: int) -> None:
        """A get that began before reads what was removed since to its end; after some time it finds zeros."""
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            with self._lock:
                segment = self.segments.by_number.get(number)
                if segment is None or not segment.reads:
                    return
            time.sleep(_LOOK_S)

    def _wait_for_readers(self, wait_s: float | None) -> None:
        until = time.monotonic() + (_WAIT_S if wait_s is None else wait_s)
        while readers := self.catalog.environment.readers_of_older_commits():
            if time.monotonic() > until:
                self._unfinished = True
                raise DiskError(
                    "erase: everything is removed, and overwritten in the segments. What remains are old pages of "
                    f"{self._opening.catalog_file}: tokens and names, no keys or values. Process {readers[0]} still "
                    "reads the catalog as it was; end its read, or the process. Then this store ends the erase by "
                    "itself within seconds, as the next erase and the next open for writing do"
                )
            time.sleep(_LOOK_S)
