"""All sessions of a store: the latest change of each, and which of the changes the catalog has."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from kvstore.core.results import SessionInfo
from kvstore.core.session_record import SessionChange, SessionHead, SessionRecord
from kvstore.metrics import Metric
from kvstore.tiers.disk.catalog import CatalogError
from kvstore.tiers.disk.tier import DiskTier


class SessionTable:
    """All sessions: changes that are not written yet are here, the rest is in the catalog.

    Thread-safe: `_lock` guards `_recent` and `_last_change`; the catalog has locks of its own and is asked without it.

    Args:
        disk: the tier whose catalog has the sessions; None for a store in memory.

    Example:
        >>> SessionTable(None).all(bytes_per_token=1)
        []
    """

    def __init__(self, disk: DiskTier | None) -> None:
        self._disk = disk
        self._recent: dict[bytes, tuple[SessionRecord | None, int]] = {}
        self._lock = threading.Lock()
        self._last_change = max((head.sequence for head in self._stored()), default=0)

    def get(self, key: bytes) -> SessionRecord | None:
        """Return a session; None if there is none, its time is over, or it is damaged."""
        found = self._recently(key)
        record = found[0] if found is not None else None
        if found is None and self._disk is not None:
            try:
                record = self._disk.catalog.session(key)
            except CatalogError:
                self._disk.metrics.add(Metric.CATALOG_ERRORS)
        return record if record is not None and not _is_over(record) else None

    def created(self, key: bytes) -> float | None:
        """Return when a session was made, in unix seconds; None if there is none. Reads no tokens."""
        found = self._recently(key)
        known: SessionRecord | SessionHead | None = found[0] if found is not None else None
        if found is None and self._disk is not None:
            try:
                known = self._disk.catalog.session_head(key)
            except CatalogError:
                self._disk.metrics.add(Metric.CATALOG_ERRORS)
        return known.created if known is not None and not _is_over(known) else None

    def set(self, key: bytes, record: SessionRecord | None) -> SessionChange:
        """Change a session, or delete it (None), in memory; return the change for the catalog."""
        with self._lock:
            self._last_change += 1
            if record is not None:
                record = replace(record, sequence=self._last_change)
            self._recent[key] = record, self._last_change
            return SessionChange(key, record, self._last_change)

    def written(self, change: SessionChange) -> None:
        """Note that the catalog has the change now. A later change of the same session stays here."""
        if self._disk is not None:
            self._forget(change)

    def dropped(self, change: SessionChange) -> None:
        """The catalog could not take the change: the session is again what the catalog says."""
        self._forget(change)

    def all(self, bytes_per_token: int) -> list[SessionInfo]:
        """Return all sessions, in no order; reads no tokens.

        Args:
            bytes_per_token: raw bytes that the cache of a token takes.
        """
        with self._lock:
            recent = {key: record for key, (record, _) in self._recent.items()}
        rows = [
            SessionInfo(head.name, head.count, head.count * bytes_per_token, head.used)
            for head in self._stored()
            if head.key not in recent and not _is_over(head)
        ]
        rows += [
            SessionInfo(record.name, len(record.tokens), len(record.tokens) * bytes_per_token, record.used)
            for record in recent.values()
            if record is not None and not _is_over(record)
        ]
        return rows

    def _recently(self, key: bytes) -> tuple[SessionRecord | None, int] | None:
        with self._lock:
            return self._recent.get(key)

    def _forget(self, change: SessionChange) -> None:
        with self._lock:
            if self._recent.get(change.key, (None, 0))[1] == change.sequence:
                del self._recent[change.key]

    def _stored(self) -> list[SessionHead]:
        if self._disk is None:
            return []
        try:
            return self._disk.catalog.sessions()
        except CatalogError:
            self._disk.metrics.add(Metric.CATALOG_ERRORS)
            return []


def _is_over(session: SessionRecord | SessionHead) -> bool:
    return session.expiry != 0.0 and session.expiry <= time.time()
