"""All sessions of a store: the latest change of each, and which of the changes the catalog has."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvstore.config import StoreConfig
from kvstore.core.keys import NamespaceDigest
from kvstore.core.results import SessionInfo
from kvstore.core.session_note import unpack_metadata
from kvstore.core.session_record import TEXT_KEY_BYTES, SessionChange, SessionHead, SessionRecord
from kvstore.core.tokens import Tokens
from kvstore.errors import ConfigError
from kvstore.metrics import Metric
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.saved_sessions import most_bytes
from kvstore.tiers.disk.tier import DiskTier

Known = TypeVar("Known", SessionRecord, SessionHead)
_RELIEF = 16  # see `SavedSessions.shrink`
_EXPIRE_EVERY_S = 60.0  # bytes of sessions whose time is over; they are not found any more at once


class SessionTable:
    """All sessions: changes that are not written yet are here, the rest is in the catalog.

    Without a disk all of them are here, within the same budget. Thread-safe: `_lock` guards every field; the catalog
    has locks of its own and is asked without it.

    Args:
        disk: the tier whose catalog has the sessions; None for a store in memory.
        config: the settings of the store.

    Example:
        >>> SessionTable(None, StoreConfig()).all(bytes_per_token=1)
        []
    """

    def __init__(self, disk: DiskTier | None, config: StoreConfig) -> None:
        self._disk = disk
        self._budget = config.most_session_bytes
        self._recent: dict[bytes, tuple[SessionRecord | None, int]] = {}
        self._bytes = 0  # of those in `_recent`
        self._lock = threading.Lock()
        self._last_change = 0
        self._expire_at = time.monotonic() + _EXPIRE_EVERY_S

    def check(self, record: SessionRecord) -> None:
        """Raise `ConfigError` if a session alone would take more than all of them may."""
        needed = most_bytes(record)
        if needed > self._budget:
            raise ConfigError(
                f"session {record.name!r}: {len(record.tokens)} tokens take up to {needed} bytes, and all sessions may "
                f"take {self._budget}; raise session_bytes or disk.bytes in the StoreConfig"
            )

    def get(self, key: bytes) -> SessionRecord | None:
        """Return a session; None if there is none, its time is over, or it is damaged."""
        return self._current(key, lambda catalog: catalog.session(key))

    def known(self, key: bytes) -> SessionRecord | SessionHead | None:
        """Return what stands with a session; None if there is none. Reads no tokens."""
        return self._current(key, lambda catalog: catalog.session_head(key))

    def _current(self, key: bytes, read: Callable[[Catalog], Known | None]) -> SessionRecord | Known | None:
        """What is in memory, or else what is read of the catalog; None if its time is over, or it cannot be read."""
        found = self._recently(key)
        known: SessionRecord | Known | None = found[0] if found is not None else None
        if found is None and self._disk is not None:
            try:
                known = read(self._disk.catalog)
            except CatalogError:
                self._disk.metrics.add(Metric.CATALOG_ERRORS)
        return known if known is not None and not _is_over(known) else None

    def set(self, key: bytes, record: SessionRecord | None) -> SessionChange:
        """Change a session, or delete it (None), in memory; return the change for the catalog."""
        with self._lock:
            # By the clock, so that nothing need be read to go on where another life of the store ended.
            self._last_change = max(self._last_change + 1, time.time_ns())
            if record is not None:
                record = replace(record, sequence=self._last_change)
            self._remove(key)
            self._recent[key] = record, self._last_change
            self._bytes += most_bytes(record) if record is not None else 0
            return SessionChange(key, record, self._last_change)

    def written(self, changes: Sequence[SessionChange]) -> int:
        """Note that the catalog has these changes now. A later change of the same session stays here.

        Returns:
            How many sessions a store without a disk forgot now, because all of them took more than they may.
        """
        with self._lock:
            for change in changes:
                if self._disk is not None or change.record is None:
                    self._remove(change.key, change.sequence)
            return self._shrink() if self._disk is None and self._bytes > self._budget else 0

    def dropped(self, changes: Sequence[SessionChange]) -> None:
        """The catalog could not take these changes: the sessions are again what the catalog says."""
        with self._lock:
            for change in changes:
                self._remove(change.key, change.sequence)

    def expire(self) -> None:
        """Remove what is left of sessions whose time is over, now and then."""
        if time.monotonic() < self._expire_at:
            return
        self._expire_at = time.monotonic() + _EXPIRE_EVERY_S
        if self._disk is not None:
            self._disk.expire_sessions()

    def all(self, bytes_per_token: int) -> list[SessionInfo]:
        """Return all sessions, in no order; reads no tokens.

        Args:
            bytes_per_token: raw bytes that the cache of a token takes.
        """
        with self._lock:
            recent = {key: record for key, (record, _) in self._recent.items()}
        now = time.time()
        rows = [
            _info(head, head.length, bytes_per_token)
            for head in self._stored()
            if not 0.0 < head.expiry <= now and not (recent and head.key in recent)
        ]
        rows += [
            _info(record, len(record.tokens), bytes_per_token)
            for record in recent.values()
            if record is not None and not _is_over(record)
        ]
        return rows

    def by_namespace(self) -> Counter[bytes]:
        """Return how many sessions each namespace has, by the first 16 bytes of its digest; those that are not written
        yet included, and those that are to be deleted left out."""
        recent, _ = self._lately()
        found, held = Counter[bytes](), set[bytes]()
        if self._disk is not None:
            try:
                found, held = self._disk.catalog.sessions_by_namespace(recent)
            except CatalogError:
                self._disk.metrics.add(Metric.CATALOG_ERRORS)
        for key, is_there in recent.items():
            found[key[:TEXT_KEY_BYTES]] += is_there - (key in held)
        return +found

    def keys(self, namespace: bytes) -> list[bytes]:
        """Return the keys of all sessions of a namespace (its digest), also of those whose time is over."""
        return [key for key, _ in self._of(namespace)]

    def that_begin_with(self, namespace: bytes, tokens: Tokens, but: bytes = b"") -> list[str]:
        """Return the names of a namespace's sessions that begin with these tokens, sorted. but: key of one to leave
        out."""
        return sorted(
            record.name
            for key, record in self._records(namespace)
            if key != but and np.array_equal(record.tokens[: len(tokens)], tokens)
        )

    def longest_shared(self, namespace: bytes, tokens: Tokens, but: bytes) -> int:
        """Return how many leading tokens another session of the namespace than the one with key `but` shares."""
        return max(
            (_shared(record.tokens, tokens) for key, record in self._records(namespace) if key != but), default=0
        )

    def stats(self) -> dict[str, int]:
        """Return numbers: sessions, bytes that they take, budget. The bytes of what is not written yet are counted as
        if it shared nothing, beside those of what it replaces."""
        recent, taken = self._lately()
        sessions, held = 0, set[bytes]()
        if self._disk is not None:
            try:
                sessions, held = self._disk.catalog.session_count(recent)
                taken += self._disk.catalog.session_bytes()
            except CatalogError:
                self._disk.metrics.add(Metric.CATALOG_ERRORS)
        sessions += sum(recent.values()) - len(held)
        return {"sessions": sessions, "bytes": taken, "budget": self._budget}

    def _lately(self) -> tuple[dict[bytes, bool], int]:
        """Which changed sessions are not written yet, whether each of them will be there, and their bytes."""
        with self._lock:
            return {key: record is not None for key, (record, _) in self._recent.items()}, self._bytes

    def _of(self, namespace: bytes) -> list[tuple[bytes, SessionRecord | None]]:
        """Key and, if it is not written yet, record of every session of a namespace."""
        with self._lock:
            recent = {key: record for key, (record, _) in self._recent.items()}
        found = {head.key: None for head in self._stored() if head.namespace == namespace and head.key not in recent}
        changed = {key: record for key, record in recent.items() if record is not None}
        return [*found.items(), *((key, record) for key, record in changed.items() if record.namespace == namespace)]

    def _records(self, namespace: bytes) -> Iterator[tuple[bytes, SessionRecord]]:
        for key, known in self._of(namespace):
            record = known or self.get(key)
            if record is not None:
                yield key, record

    def _recently(self, key: bytes) -> tuple[SessionRecord | None, int] | None:
        with self._lock:
            return self._recent.get(key)

    def _remove(self, key: bytes, sequence: int | None = None) -> None:
        known = self._recent.get(key)
        if known is None or sequence not in (None, known[1]):
            return
        del self._recent[key]
        self._bytes -= most_bytes(known[0]) if known[0] is not None else 0

    def _shrink(self) -> int:
        """Of a store in memory: forgets what is over, then what was changed first; returns how many that were."""
        evicted, goal = 0, self._budget - self._budget // _RELIEF
        for key, (record, _) in sorted(self._recent.items(), key=_first_to_go):
            if self._bytes <= goal:
                break
            self._remove(key)
            evicted += record is not None and not _is_over(record)
        return evicted

    def _stored(self) -> list[SessionHead]:
        if self._disk is None:
            return []
        try:
            return self._disk.catalog.sessions()
        except CatalogError:
            self._disk.metrics.add(Metric.CATALOG_ERRORS)
            return []


def _info(session: SessionRecord | SessionHead, tokens: int, bytes_per_token: int) -> SessionInfo:
    return SessionInfo(
        session.name,
        tokens,
        tokens * bytes_per_token,
        session.used,
        NamespaceDigest(session.namespace),
        session.created,
        session.hits,
        session.expiry,
        session.pinned,
        unpack_metadata(session.metadata) or {},
    )


def _first_to_go(item: tuple[bytes, tuple[SessionRecord | None, int]]) -> tuple[bool, bool, int]:
    record, sequence = item[1]
    return record is not None and not _is_over(record), record is not None and record.pinned, sequence


def _shared(a: Tokens, b: Tokens) -> int:
    count = min(len(a), len(b))
    differ = np.flatnonzero(a[:count] != b[:count])
    return int(differ[0]) if len(differ) else count


def _is_over(session: SessionRecord | SessionHead) -> bool:
    return session.expiry != 0.0 and session.expiry <= time.time()
