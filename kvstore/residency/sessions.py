"""All sessions of a store: the latest change of each, and which of the changes the catalog has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

from kvstore.core.session_record import SessionChange, SessionRecord, session_key
from kvstore.metrics import Metric
from kvstore.tiers.disk.catalog import CatalogError
from kvstore.tiers.disk.tier import DiskTier


class SessionTable:
    """All sessions: changes that are not written yet are here, the rest is in the catalog.

    Thread-safe: `_lock` guards `_recent` and `_last_change`; the catalog has locks of its own and is asked without it.

    Args:
        disk: the tier whose catalog has the sessions; None for a store in memory.

    Example:
        >>> SessionTable(None).all()
        []
    """

    def __init__(self, disk: DiskTier | None) -> None:
        self._disk = disk
        self._recent: dict[bytes, tuple[SessionRecord | None, int]] = {}
        self._lock = threading.Lock()
        self._last_change = max((record.sequence for record in self._stored()), default=0)

    def get(self, key: bytes) -> SessionRecord | None:
        """Return the record of a session; None if there is none, or its entry is damaged."""
        with self._lock:
            if key in self._recent:
                return self._recent[key][0]
        if self._disk is None:
            return None
        try:
            value = self._disk.catalog.session(key)
        except CatalogError:
            self._disk.metrics.add(Metric.CATALOG_ERRORS)
            return None
        return SessionRecord.unpack(value) if value is not None else None

    def set(self, key: bytes, record: SessionRecord | None) -> SessionChange:
        """Change a session, or delete it (None), in memory; return the change for the catalog."""
        with self._lock:
            self._last_change += 1
            if record is not None:
                record = replace(record, sequence=self._last_change)
            self._recent[key] = record, self._last_change
            return SessionChange(key, record.pack() if record is not None else None, self._last_change)

    def written(self, change: SessionChange) -> None:
        """Note that the catalog has the change now. A later change of the same session stays here."""
        with self._lock:
            if self._disk is not None and self._recent.get(change.key, (None, 0))[1] == change.sequence:
                del self._recent[change.key]

    def all(self) -> list[SessionRecord]:
        """Return all sessions, in no order."""
        with self._lock:
            recent = {key: record for key, (record, _) in self._recent.items()}
        stored = {session_key(r.namespace, r.name): r for r in self._stored()}
        return [record for record in {**stored, **recent}.values() if record is not None]

    def _stored(self) -> Iterator[SessionRecord]:
        if self._disk is None:
            return
        try:
            pairs = list(self._disk.catalog.sessions())
        except CatalogError:
            self._disk.metrics.add(Metric.CATALOG_ERRORS)
            return
        for _, value in pairs:
            record = SessionRecord.unpack(value)
            if record is not None:
                yield record
