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
    """All sessions: changes that are not written yet here, the rest in the catalog.

    Thread-safe: `_lock` guards `_recent` and `_sequence`; the catalog has locks of its own and is asked without it.
    """

    def __init__(self, disk: DiskTier | None) -> None:
        self._disk = disk
        self._recent: dict[bytes, tuple[SessionRecord | None, int]] = {}
        self._lock = threading.Lock()
        self._sequence = max((record.sequence for record in self._stored()), default=0)

    def get(self, key: bytes) -> SessionRecord | None:
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
        """Remembers a change; returns it for the catalog."""
        with self._lock:
            self._sequence += 1
            if record is not None:
                record = replace(record, sequence=self._sequence)
            self._recent[key] = record, self._sequence
            return SessionChange(key, record.pack() if record is not None else None, self._sequence)

    def written(self, change: SessionChange) -> None:
        """The catalog has the change now; a later one of the same session is still to come."""
        with self._lock:
            if self._disk is not None and self._recent.get(change.key, (None, 0))[1] == change.sequence:
                del self._recent[change.key]

    def all(self) -> list[SessionRecord]:
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
