"""Sessions: a name for a sequence of tokens, which outlives the cache of it, close, restart and kill."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np

from kvstore.core.arguments import end_of_life
from kvstore.core.results import EraseResult, Hit, PutResult
from kvstore.core.session_note import pack_metadata, unpack_metadata
from kvstore.core.session_record import SessionHead, SessionRecord, session_key
from kvstore.core.tokens import Tokens, as_tokens
from kvstore.residency.lifecycle import CallGuard, SlowCall
from kvstore.residency.sessions import SessionTable
from kvstore.write.put import PutPath


@dataclass(frozen=True)
class SessionStore:
    """What a session asks of its store: calls, each of which raises `StoreClosed` after `close()`. Immutable.

    Attributes:
        read_only: whether `put`, `note` and `remove` raise `ReadOnlyStore`.
        calls: of the store.
        sessions: what is saved.
        put_path: the store's, to write with; raises `ReadOnlyStore`.
        slow: notes how long a call takes.
        put: as `KVStore.put`, with the digest of the namespace and the session's key and record, durable together.
        get: as `KVStore.get`, with the digest of the namespace.
        depth: as `KVStore.contains`, with the digest of the namespace.
    """

    read_only: bool
    calls: CallGuard
    sessions: SessionTable
    put_path: Callable[[], PutPath]
    slow: Callable[[str], SlowCall]
    put: Callable[[Any, Any, bytes, Any, float | None, bool, tuple[bytes, SessionRecord], int], PutResult]
    get: Callable[[Any, bytes, int | None, Any, int | None, bool, bool], Hit | None]
    depth: Callable[[bytes, Tokens], int]

    def note(self, key: bytes, record: SessionRecord | None) -> None:
        """Replace the record of a key, or with None forget it."""
        self.calls.run(self.put_path().note, key, record)

    def stored(self, namespace: bytes, tokens: Tokens) -> int:
        """Return how many leading tokens are stored."""
        return self.calls.run(self.depth, namespace, tokens)

    def record(self, key: bytes) -> SessionRecord | None:
        """Return the record of a key, None if there is none."""
        self.calls.check()
        return self.sessions.get(key)

    def known(self, key: bytes) -> SessionRecord | SessionHead | None:
        """Return what stands with the session of a key, None if there is none. Reads no tokens."""
        self.calls.check()
        return self.sessions.known(key)

    def use(self, key: bytes) -> None:
        """Count a use of a session that is resumed."""
        self.calls.run(self.put_path().use_session, key)

    def remove(self, key: bytes, blocks: bool, erase: bool) -> EraseResult:
        """Forget the session of a key, with or without its blocks, erased or not."""
        put_path = self.put_path()
        with self.slow("delete"):
            removed: EraseResult = self.calls.run(put_path.whole, put_path.remove_session, key, blocks, erase)
            return removed


class Session:
    """A handle on a session, made by `KVStore.session`.

    Holds no state of its own, so any number of handles on one session may exist. Thread-safe: all state is in the
    store, under its locks. Of two `save` at the same time one is kept whole. In the examples of the methods `session`
    and `kv` are those of the example below.

    Raises:
        StoreClosed: a method was called after the store was closed.

    Example:
        >>> import tempfile, torch
        >>> from kvstore import KVLayout, KVStore, ModelIdentity
        >>> identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
        >>> kv = [(torch.zeros(2, 3, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16())]
        >>> with tempfile.TemporaryDirectory() as folder, KVStore(folder, identity) as store:
        ...     session = store.session("alice")
        ...     saved = session.save([11, 12, 13], kv)
        ...     store.session("alice").resume().tokens
        3
    """

    def __init__(self, store: SessionStore, name: str, namespace: bytes) -> None:
        """`namespace` is its digest. Raises `ValueError` for a name that is not text of 1 to 400 bytes."""
        self.id = name
        self._key = session_key(namespace, name)
        self._store = store
        self._namespace = namespace

    @property
    def exists(self) -> bool:
        """Whether the session was saved, or forked, and not deleted since."""
        return self._store.known(self._key) is not None

    @property
    def tokens(self) -> Tokens:
        """The tokens of the session, `[n]` uint32, read-only; empty if it does not exist.

        They outlive the cache: if the blocks were evicted, the cache can be computed again from them. They have a
        budget of their own (`StoreConfig.session_bytes`; sessions that begin alike share their tokens). If all sessions
        take more, those that were saved, resumed or forked longest ago are forgotten, pinned ones last.

        torch does not join uint32 with other integers. To go on with a conversation use `tolist`.

        Example:
            >>> import torch
            >>> torch.tensor([session.tokens.tolist() + [14, 15]])  # 14 and 15 are those of the next message
            tensor([[11, 12, 13, 14, 15]])
        """
        record = self._record()
        return record.tokens if record is not None else as_tokens([0])[:0]

    @property
    def metadata(self) -> dict[str, Any]:
        """What `save` noted beside the session; empty if it does not exist."""
        known = self._store.known(self._key)
        return (unpack_metadata(known.metadata) or {}) if known is not None else {}

    def save(
        self,
        tokens: Any,
        kv: Any,
        *,
        then: Any = None,
        logprobs: Any = None,
        ttl: float | None = None,
        pin: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> PutResult:
        """Put a cache and make the session stand for its tokens.

        Both become durable together: after `flush()`, or on return if the store's durability is "put".

        Args:
            tokens, kv, logprobs: see `KVStore.put`.
            then: tokens that follow these and that the cache lacks, as it does the last token of an answer. The session
                stands for them, too.
            ttl: seconds after which the session is forgotten and its cache is removed, as `KVStore.put` does it.
            pin: see `KVStore.put`; the session itself is forgotten only after all that are not pinned.
            metadata: small facts to note beside the session: names, and of each None, a bool, a number, text, bytes, or
                a list or mapping of such; at most 4096 bytes as msgpack. None keeps what is noted; {} removes it.

        Returns:
            What `KVStore.put` returns.

        Raises:
            The errors of `KVStore.put`; the session stays as it was then.
            MetadataError: the metadata is too large, or of a kind that is not kept. Nothing is changed.
            ConfigError: this session alone would take more than all of them may. Nothing is changed.

        Example:
            >>> session.save([11, 12, 13], kv, metadata={"user": "ann"}).tokens
            3
            >>> session.metadata
            {'user': 'ann'}
            >>> done = session.save([11, 12, 13], kv, then=[14])
            >>> session.tokens.tolist(), session.resume().tokens
            ([11, 12, 13, 14], 3)
        """
        return self._save(as_tokens(tokens), kv, 0, then, logprobs, ttl, pin, metadata)

    def _save(
        self,
        ids: Tokens,
        kv: Any,
        start: int,
        then: Any = None,
        logprobs: Any = None,
        ttl: float | None = None,
        pin: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> PutResult:
        """As `save`; start: as for `KVStore.put`."""
        record = self._new_record(ids if then is None else np.concatenate([ids, as_tokens(then)]), ttl, pin, metadata)
        return self._store.put(ids, kv, self._namespace, logprobs, ttl, pin, (self._key, record), start)

    def point_to(self, tokens: Any, *, ttl: float | None = None, metadata: Mapping[str, Any] | None = None) -> int:
        """Make the session stand for these tokens, whose cache is stored already, or will be computed again.

        Durable after `flush()`.

        Args:
            tokens: see `KVStore.put`.
            ttl: seconds after which the session is forgotten.
            metadata: see `save`.

        Returns:
            How many leading tokens are stored: what `resume` returns.

        Raises:
            ValueError: tokens or ttl are malformed.
            MetadataError, ConfigError: this session alone would take more than all of them may. Nothing is changed.
            ReadOnlyStore: the store was opened with read_only=True.

        Example:
            >>> session.point_to([11, 12, 13, 14])
            3
        """
        ids = as_tokens(tokens)
        record = self._new_record(ids, ttl, False, metadata)
        self._store.sessions.check(record)
        self._store.note(self._key, record)
        return self._store.stored(self._namespace, ids)

    def _new_record(
        self, ids: Tokens, ttl: float | None, pin: bool, metadata: Mapping[str, Any] | None
    ) -> SessionRecord:
        given = None if metadata is None else pack_metadata(metadata)
        now, known = time.time(), self._store.known(self._key)
        kept = ids.copy()
        kept.flags.writeable = False  # `tokens` hands it out
        record = SessionRecord(self.id, self._namespace, kept, now, now, 0, end_of_life(ttl), bool(pin))
        if known is not None:
            record = replace(record, created=known.created, hits=known.hits, metadata=known.metadata)
        return record if given is None else replace(record, metadata=given)

    def resume(
        self, *, max_tokens: int | None = None, device: Any = None, reserve: int | None = None, lazy: bool = False
    ) -> Hit | None:
        """Return the cache of the session, or the longest prefix of it that is still stored.

        Counts as a use of the session and of its blocks. Returns all that is stored, also where computing it would be
        faster: who asks for a session may not have its tokens at hand.

        Args:
            max_tokens, device, reserve, lazy: see `KVStore.get`.

        Returns:
            A `Hit`, or None if the session does not exist or none of its blocks is stored.

        Raises:
            The errors of `KVStore.get`.

        Example:
            >>> session.resume(max_tokens=2).tokens
            2
        """
        record = self._record()
        if record is None:
            return None
        if not self._store.read_only:
            self._store.use(self._key)
        return self._store.get(record.tokens, record.namespace, max_tokens, device, reserve, False, lazy)

    def touch(self) -> None:
        """Count a use of the session, as `resume` does, and read nothing. Durable after `flush()`.

        Raises:
            ReadOnlyStore: the store was opened with read_only=True.

        Example:
            >>> session.touch()
        """
        self._store.use(self._key)

    def fork(self, new_id: str) -> Session:
        """Make another session that starts from the same tokens, which it shares, and the stored blocks with them.

        It ends when this one's time to live is over, is not pinned, and begins with this one's metadata.

        Args:
            new_id: the other session's name; a session with that name is replaced.

        Returns:
            A handle on the other session. It is durable after `flush()`.

        Raises:
            KeyError: this session does not exist.
            ValueError: `new_id` is not text of 1 to 400 bytes.
            ReadOnlyStore: the store was opened with read_only=True.

        Example:
            >>> session.fork("bob").tokens
            array([11, 12, 13], dtype=uint32)
        """
        record = self._record()
        if record is None:
            raise KeyError(f"session {self.id!r} does not exist; save it first")
        fork = Session(self._store, new_id, record.namespace)
        now = time.time()
        self._store.note(fork._key, replace(record, name=new_id, created=now, used=now, pinned=False, hits=0))
        return fork

    @overload
    def delete(self, *, blocks: bool = False, erase: Literal[False] = False) -> bool: ...

    @overload
    def delete(self, *, blocks: bool = False, erase: Literal[True]) -> EraseResult: ...

    def delete(self, *, blocks: bool = False, erase: bool = False) -> bool | EraseResult:
        """Forget the session; durable after `flush()`, and with blocks or erase on return.

        Args:
            blocks: also remove its cache, and what continues it; blocks that another session begins with, or another
                stored sequence shares, stay. Without this all of its cache stays until it is evicted.
            erase: overwrite its name and tokens, and with blocks the cache, in every file of the store; see
                `KVStore.delete`. Without blocks the tokens stay where the cache is.

        Returns:
            False if the session does not exist; with erase an `EraseResult`.

        Raises:
            ReadOnlyStore: the store was opened with read_only=True.
            DiskError: the disk refuses; with erase, the next erase or open for writing ends what was begun.

        Example:
            >>> session.delete(), session.exists
            (True, False)
        """
        found = self.exists
        if not erase and not (found and blocks):
            if found:
                self._store.note(self._key, None)
            return found
        result = self._store.remove(self._key, blocks, erase)
        return result if erase else found

    def _record(self) -> SessionRecord | None:
        return self._store.record(self._key)
