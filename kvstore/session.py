"""Sessions: a name for a sequence of tokens that goes on after eviction, close, restart and kill."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore.hit import Hit, PutResult
from kvstore.identity import Tokens, as_tokens
from kvstore.session_record import SessionRecord, session_key
from kvstore.tiers.disk.catalog import CatalogError
from kvstore.tiers.disk.tier import DiskTier
from kvstore.writeback import SessionChange

if TYPE_CHECKING:
    from kvstore.store import KVStore


class SessionTable:
    """All sessions: changes that are not written yet here, the rest in the catalog. Thread-safe."""

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
            self._disk.metrics.add("catalog_errors")
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
            self._disk.metrics.add("catalog_errors")
            return
        for _, value in pairs:
            record = SessionRecord.unpack(value)
            if record is not None:
                yield record


class Session:
    """A handle; holds no state of its own, so any number may exist. Made by `KVStore.session`. Thread-safe."""

    def __init__(self, store: KVStore, name: str, namespace: bytes) -> None:
        self.id = name
        self._key = session_key(namespace, name)
        self._store = store
        self._namespace = namespace

    @property
    def exists(self) -> bool:
        return self._record() is not None

    @property
    def tokens(self) -> Tokens:
        """The tokens of the session, `[n]` uint32; empty where it does not exist. They outlive the cache: a session
        whose blocks were evicted can be computed again from them."""
        record = self._record()
        return record.tokens if record is not None else as_tokens([0])[:0]

    def save(
        self, tokens: Any, kv: Any, *, logprobs: Any = None, ttl: float | None = None, pin: bool = False
    ) -> PutResult:
        """Puts the cache (see `KVStore.put`) and makes the session stand for these tokens. Both are durable together,
        after `flush()`."""
        ids = as_tokens(tokens)
        now = time.time()
        known = self._record()
        kept = ids.copy()
        kept.flags.writeable = False  # `tokens` hands it out
        record = SessionRecord(self.id, self._namespace, kept, known.created if known else now, now, 0)
        return self._store._put(ids, kv, self._namespace, logprobs, ttl, pin, (self._key, record))

    def resume(self, *, max_tokens: int | None = None, device: Any = None, reserve: int | None = None) -> Hit | None:
        """The cache of the session: all of it, or the longest prefix still stored; None where there is nothing.
        Counts as a use. Arguments and errors are those of `KVStore.get`."""
        record = self._record()
        if record is None:
            return None
        if not self._store.read_only:
            self._store._note_session(self._key, replace(record, used=time.time()))
        return self._store._get(record.tokens, record.namespace, max_tokens, device, reserve)

    def fork(self, new_id: str) -> Session:
        """Another session that starts from the same tokens; the stored blocks are shared. Raises `KeyError` where
        this session does not exist."""
        record = self._record()
        if record is None:
            raise KeyError(f"session {self.id!r} does not exist; save it first")
        fork = Session(self._store, new_id, record.namespace)
        now = time.time()
        self._store._note_session(fork._key, replace(record, name=new_id, created=now, used=now))
        return fork

    def delete(self) -> bool:
        """Forgets the session; its blocks stay until they are evicted or deleted, for others may share them (use
        `KVStore.delete(session.tokens)` to remove them). False where it does not exist. Durable after `flush()`."""
        if self._record() is None:
            return False
        self._store._note_session(self._key, None)
        return True

    def _record(self) -> SessionRecord | None:
        self._store._check_open()
        return self._store._sessions.get(self._key)
