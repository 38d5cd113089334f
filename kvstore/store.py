"""`KVStore`: put, get, and everything a program calls. What it is made of is in `open`."""

from __future__ import annotations

import os
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, overload

from kvstore.config import StoreConfig, as_config
from kvstore.core.approximate import Approximate
from kvstore.core.arguments import as_folder
from kvstore.core.ending import check_may_open
from kvstore.core.identity import ModelIdentity, as_identity
from kvstore.core.learning_status import LearningStatus
from kvstore.core.loan import reading
from kvstore.core.opening import Opening, wait_for_given_up
from kvstore.core.prepared import PreparedCache
from kvstore.core.results import CompactResult, EraseResult, FlushResult, Hit, PutResult
from kvstore.core.session_record import SessionRecord
from kvstore.core.tokens import as_tokens
from kvstore.errors import ConfigError, ReadOnlyStore
from kvstore.learning.learner import silent
from kvstore.learning.trial import Progress
from kvstore.log import EventLog
from kvstore.metrics import Metric, Metrics
from kvstore.open import open_to_end
from kvstore.read.get import GetRequest
from kvstore.reports import StoreReports
from kvstore.residency.lifecycle import CallGuard, SlowCall
from kvstore.session import Session, SessionStore
from kvstore.tiers.disk.fs import FileSystem
from kvstore.write.plan import PutRequest
from kvstore.write.put import PutPath


class KVStore(StoreReports):
    """A persistent, tiered store of KV caches. Thread-safe; a context manager.

    One process writes; any number of processes may read the same store meanwhile. In the examples of the methods
    `store` and `kv` are those of the example below.

    Args:
        path: a folder; it is made if it is missing. `~` is the home of the user.
        identity: whose caches; a store holds those of one model.
        config: budgets and settings; default is `StoreConfig()`. `store.config` has the sizes that a store which exists
            was made with.
        read_only: open for reading only. Everything that changes the store raises `ReadOnlyStore` then.
        fs: the file system, for tests that make it fail.

    Raises:
        StoreLocked: another process has the store open for writing.
        StoreNotFound: there is no store to be read.
        DiskError: the store cannot be read now: rights, descriptors, a failing disk. It is not damaged by this.
        IdentityMismatch: the store holds the caches of another model.
        FormatVersion: another version of kvstore wrote the store.
        CorruptStore: a file is damaged beyond repair. Damaged entries alone are dropped and counted.
        ConfigError: a setting or an argument does not fit, or the path leads to a file.
        ProfileError: the codecs need a profile that is missing, damaged or another model's.

    Example:
        >>> import tempfile, torch
        >>> from kvstore import KVLayout
        >>> identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
        >>> kv = [(torch.zeros(2, 3, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16())]
        >>> with tempfile.TemporaryDirectory() as folder, KVStore(folder, identity) as store:
        ...     done = store.put([11, 12, 13], kv)
        ...     store.get([11, 12, 13, 14]).tokens
        3
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: ModelIdentity,
        config: StoreConfig | None = None,
        *,
        read_only: bool = False,
        fs: FileSystem | None = None,
    ) -> None:
        self.path = as_folder(path)
        self.identity = as_identity(identity)
        self.config = as_config(config)
        self.metrics = Metrics(EventLog(self.path))
        self.read_only = read_only
        if read_only and not self.config.disk.bytes:
            raise ConfigError("read_only: a store without a disk tier has nothing to read; set disk.bytes")
        place = os.path.realpath(self.path)
        wait_for_given_up(place)
        check_may_open(place)
        self._calls = CallGuard()
        open_it = partial(
            open_to_end, place, self.path, identity, self.config, self.metrics, self._calls, read_only=read_only, fs=fs
        )
        opening = Opening(self, place, open_it)
        try:
            self._engine, self._ending = opening.result()
            self._residency = self._engine.residency
            self.config = self._residency.config
            self._lookup = self._engine.getter.lookup
        except BaseException:
            opening.give_up()
            raise

    def put(
        self,
        tokens: Any,
        kv: Any,
        *,
        namespace: str | bytes = b"",
        logprobs: Any = None,
        ttl: float | None = None,
        pin: bool = False,
        start: int = 0,
    ) -> PutResult:
        """Store the cache of a sequence: the blocks of it that are not stored yet.

        Returns as soon as the blocks are queued; `get` finds them from then on. They are durable after `flush()`, or on
        return with durability "put". After a kill or a power cut a put is stored whole or not at all; only a disk that
        fills up in the middle of a put may keep the beginning of it.

        Args:
            tokens: token ids `[n]`, 1-D integers in [0, 2**32), any array-like.
            kv: a transformers cache, or per layer (K, V), `[1, heads, n, dim]` or `[heads, n, dim]`, K after the rotary
                embedding. The tensors of a transformers cache are referenced, others are copied.
            namespace: text, or bytes; text stands for its UTF-8. Sequences of different namespaces never share blocks.
            logprobs: natural log-probabilities of the tokens, `[n]`, for the trie.
            ttl: seconds after which the sequence is removed.
            pin: never evict the sequence, until `unpin`, `delete` or the end of its `ttl`.
            start: `kv` holds the tokens from here on, for the blocks before are stored; best a multiple of
                `config.block_tokens`. If one of them is not (any more), nothing is stored, and the result says from
                where on it is missing (`missing_from`). No pins, windows or states.

        Returns:
            What was new. If the write queue stays full for `put_timeout_s`, the blocks are dropped; the result says so,
            and also whether the sequence is pinned: a pin beyond `StoreConfig.pinned_share` is refused.

        Raises:
            ValueError: tokens, logprobs, ttl or namespace are malformed. Nothing is changed then, nor below.
            LayoutMismatch, UnsupportedLength, UnsupportedTokens: tensors or tokens do not fit the identity's layout.
            UnsupportedCache: the cache has layers that cannot be stored, or is approximate.
            ReadOnlyStore: the store was opened with read_only=True.

        Example:
            >>> store.put([11, 12, 13], kv).tokens
            3
        """
        return self._put(tokens, kv, self._digest(namespace), logprobs, ttl, pin, start=start)

    def _put(
        self,
        tokens: Any,
        kv: Any,
        digest: bytes,
        logprobs: Any,
        ttl: float | None,
        pin: bool,
        session: tuple[bytes, SessionRecord] | None = None,
        start: int = 0,
    ) -> PutResult:
        put_path = self._put_path()
        layout, root = self.identity.layout, self._lookup.root(digest)
        request = PutRequest.of(layout, root, digest, tokens, logprobs, ttl, pin, start)
        with reading():
            cache = PreparedCache.of(layout, kv, len(request.tokens) - start)
            request = request.of_cache(cache.layers, cache.states)
        if session is not None:
            self._engine.sessions.check(session[1])
        with self._slow("put") as call:
            return call.returned(self._calls.run(put_path.put, request, cache.layers, cache.mutable, session))

    def get(
        self,
        tokens: Any,
        *,
        namespace: str | bytes = b"",
        max_tokens: int | None = None,
        device: Any = None,
        reserve: int | None = None,
        approximate: Approximate | None = None,
        gate: bool | None = None,
        lazy: bool = False,
    ) -> Hit | None:
        """Return the cache of the longest stored prefix of `tokens`.

        Args:
            tokens: ids of all tokens that the model is to see, 1-D integers in [0, 2**32), any array-like.
            namespace: that of the put.
            max_tokens: return at most this many tokens.
            device: where the tensors go; default is the CPU.
            reserve: space to reserve behind the tensors, in tokens, so that `Hit.cache()` appends to them instead of
                copying them. Default: the number of tokens that did not match, but no more than matched, and 64. 0
                gives contiguous tensors. On other devices than the CPU nothing is reserved.
            approximate: if other sequences hold the tokens that follow the stored prefix, return their keys and values,
                too, with the keys rotated to the new positions, as far as this request allows. `Hit` says which tokens
                these are, and which positions to compute anew. Needs `StoreConfig.donors`; see `Approximate`.
            gate: whether to leave out what is expected to be computed sooner than loaded (docs/gate.md). Default: as
                `StoreConfig.gate` says. An approximate get leaves out nothing.
            lazy: return as soon as the first layers are decoded; whoever takes a layer waits for it (docs/lazy.md).

        Returns:
            A `Hit`, or None if nothing is stored, or worth loading. With exact codecs the tensors are bit-identical to
            what was put, unless an approximate cache was asked for.

        Raises:
            ValueError: an argument is malformed; UnsupportedLength: see `put`. The state of the store never raises:
                damaged, lost and evicted blocks make the prefix shorter.

        Example:
            >>> hit = store.get([11, 12, 13, 14])
            >>> hit.tokens, hit.layers[0][0].shape
            (3, torch.Size([1, 2, 3, 8]))
        """
        gated = self._engine.gate.enabled if gate is None else bool(gate)
        how = max_tokens, device, reserve, gated, lazy
        return self._get(tokens, self._digest(namespace), *how, approximate=approximate)

    def _get(self, tokens: Any, digest: bytes, *how: Any, approximate: Approximate | None = None) -> Hit | None:
        self._calls.check()
        request = GetRequest.of(self.identity.layout, tokens, digest, *how)
        if approximate is not None and not isinstance(approximate, Approximate):
            raise ValueError(f"approximate: expected an Approximate, found {type(approximate).__name__}")
        self.metrics.add(Metric.GET_TOKENS, len(request.tokens))
        with self._slow("get") as call:
            if approximate is not None:
                return call.returned(self._calls.run(self._engine.assembler.get, approximate, request))
            return call.returned(self._calls.run(self._engine.getter.get, request))

    def contains(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        """Return how many leading tokens are stored. Reads nothing but the index, and counts as no use.

        Raises:
            ValueError: tokens or namespace are malformed.

        Example:
            >>> store.contains([11, 12, 99])
            2
        """
        self._calls.check()
        ids, digest = as_tokens(tokens), self._digest(namespace)
        return self._calls.run(self._lookup.depth, digest, ids)

    def prefetch(self, tokens: Any, *, namespace: str | bytes = b"") -> Future[int]:
        """Bring the stored prefix from disk into the host tier, in the background.

        Returns:
            A future of the number of leading tokens that are in memory when it is done.

        Raises:
            ValueError: tokens or namespace are malformed.

        Example:
            >>> store.prefetch([11, 12, 13]).result()
            3
        """
        self._calls.check()
        ids, digest = as_tokens(tokens).copy(), self._digest(namespace)
        return self._calls.run(self._engine.background.submit, self._engine.getter.prefetch, digest, ids)

    def touch(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        """Count the stored prefix as used, as a get does, and read nothing. Returns how many tokens it has.

        Raises:
            ValueError: tokens or namespace are malformed.

        Example:
            >>> store.touch([11, 12, 13, 14])
            3
        """
        ids, digest = as_tokens(tokens), self._digest(namespace)
        return self._calls.run(self._lookup.use, digest, ids)

    @overload
    def delete(self, tokens: Any, *, namespace: str | bytes = b"", erase: Literal[False] = False) -> int: ...

    @overload
    def delete(self, tokens: Any, *, namespace: str | bytes = b"", erase: Literal[True]) -> EraseResult: ...

    def delete(self, tokens: Any, *, namespace: str | bytes = b"", erase: bool = False) -> int | EraseResult:
        """Remove a stored sequence, durably on return.

        This removes the block of its last token, every block that continues it, and the blocks before that no other
        sequence shares; pinned blocks stay. A sequence that is not stored in full is left as it is.

        Args:
            tokens, namespace: as of `put`.
            erase: also overwrite what is removed, tokens, keys and values, in every file of the store, with all older
                copies of it, and remove it from the remote tier; of a sequence that is not stored in full what is left
                of it, unless others go on there. Takes time in proportion to the free space of the segments and to the
                catalog; other writes wait. `explain` forgets what left. Sessions keep their tokens (`Session.delete`).

        Returns:
            How many blocks were removed; with erase an `EraseResult`, which says what stays.

        Raises:
            ValueError: tokens or namespace are malformed.
            DiskError: the catalog cannot be written. The sequence is gone from this process all the same. With erase it
                may also be that not all is overwritten yet, which the next erase, or open for writing, ends; or that
                nothing was begun, which the error says: then erase again.
            ReadOnlyStore: the store was opened with read_only=True.

        Example:
            >>> store.delete([11, 12, 13]), store.contains([11, 12, 13])
            (1, 0)
        """
        put_path, ids, digest = self._put_path(), as_tokens(tokens), self._digest(namespace)
        with self._slow("delete") as call:
            how = (put_path.whole, put_path.erase) if erase else (put_path.delete,)
            removed: int | EraseResult = self._calls.run(*how, digest, ids)
            return call.returned(removed)

    @overload
    def delete_namespace(self, namespace: str | bytes, *, erase: Literal[False] = False) -> int: ...

    @overload
    def delete_namespace(self, namespace: str | bytes, *, erase: Literal[True]) -> EraseResult: ...

    def delete_namespace(self, namespace: str | bytes, *, erase: bool = False) -> int | EraseResult:
        """Remove everything of a namespace, durably on return: all blocks, also pinned ones, and all sessions.

        Args:
            namespace: that of the puts.
            erase: also overwrite it in every file of the store, as `delete` does it. A hash of the namespace's name
                stays.

        Returns:
            How many blocks were removed; with erase an `EraseResult`.

        Raises:
            The errors of `delete`.

        Example:
            >>> store.delete_namespace(b"")
            1
        """
        put_path, digest = self._put_path(), self._digest(namespace)
        with self._slow("delete") as call:
            how = put_path.erase_namespace if erase else put_path.delete_namespace
            removed: int | EraseResult = self._calls.run(put_path.whole, how, digest)
            return call.returned(removed)

    def unpin(self, tokens: Any, *, namespace: str | bytes = b"") -> bool:
        """Let a pinned sequence be evicted again; it stays stored until then. Durable after `flush`.

        Args:
            tokens, namespace: as of the put that pinned it. Sequences that end in the same block share one pin.

        Returns:
            False if the sequence is not stored in full, or not pinned.

        Raises:
            ValueError: tokens or namespace are malformed.
            ReadOnlyStore: the store was opened with read_only=True.

        Example:
            >>> store.put([11, 12, 13], kv, pin=True).pinned, store.unpin([11, 12, 13]), store.unpin([11, 12, 13])
            (True, True, False)
        """
        put_path, ids, digest = self._put_path(), as_tokens(tokens), self._digest(namespace)
        return self._calls.run(put_path.unpin, digest, ids)

    def flush(self, *, remote: bool = False) -> FlushResult:
        """Return when every put and session change made before is durable, or was dropped and counted.

        Args:
            remote: also wait until what is to be in the remote tier by now is there, but no longer than its
                `flush_timeout_s`, nor for a server that does not answer; `FlushResult.remote_due` says what is not.

        Raises:
            ReadOnlyStore: the store was opened with read_only=True.

        Example:
            >>> store.flush()
            FlushResult(durable_blocks=1, dropped_blocks=0)
        """
        put_path = self._put_path()
        with self._slow("flush") as call:
            return call.returned(self._calls.run(self._engine.flush, put_path, remote))

    def compact(self, *, move: bool = True) -> CompactResult:
        """Give space back to the file system, without evicting anything. Durable on return.

        What has expired is removed, and files of segments that hold nothing are deleted. The catalog's file becomes
        smaller when the store is opened the next time.

        Args:
            move: also move the records of segments that are partly empty together. Takes time in proportion to what is
                moved; other writes wait.

        Raises:
            ReadOnlyStore: the store was opened with read_only=True.
            DiskError: the disk refuses; nothing is lost.

        Example:
            >>> store.compact().moved_records
            0
        """
        put_path = self._put_path()
        put_path.flush()
        done: CompactResult = self._calls.run(put_path.whole, self._engine.compact, move)
        return done

    @property
    def learning(self) -> LearningStatus | None:
        """What this store has learned from its blocks so far; None if it is only read, or has no disk.

        Example:
            >>> store.learning.state
            'waiting'
        """
        learner = self._engine.learner
        return None if learner is None else learner.status

    def learn(self, progress: Progress = silent) -> LearningStatus:
        """Fit a profile to the stored blocks now, adopt it if that pays, and recode cold records (docs/learning.md).

        Durable on return. Takes a minute or some; other calls go on, and an interrupt of this one does not end it.

        Args:
            progress: called with what is being done, how much of it is done, and how much there is.

        Returns:
            What came of it: `state` is "adopted" if new records take less from now on, else `why` says why not.

        Raises:
            ConfigError: this store has nothing to learn; the message says why.
            ReadOnlyStore: the store was opened with read_only=True.

        Example:
            >>> store.learn().state
            'waiting'
        """
        self._put_path()
        return self._calls.run(self._engine.learn, progress)

    # ---- sessions ------------------------------------------------------------------------------------------------

    def session(self, name: str, *, namespace: str | bytes = b"") -> Session:
        """Return a handle on the session with this name, which need not exist yet.

        Raises:
            ValueError: the name is not text of 1 to 400 bytes, or the namespace is malformed.

        Example:
            >>> store.session("alice").exists
            False
        """
        self._calls.check()
        store = SessionStore(
            self.read_only,
            self._calls,
            self._engine.sessions,
            self._put_path,
            self._slow,
            self._put,
            self._get,
            self._lookup.depth,
        )
        return Session(store, name, self._digest(namespace))

    def close(self) -> FlushResult:
        """Write what is queued, durably, and close the store; waits for the calls of other threads.

        Idempotent: a call that was interrupted can be repeated. Everything else raises `StoreClosed` from then on. A
        store that nobody refers to any more is closed soon after, one that is open when the program ends after its
        threads, other than daemons, have ended: in at most `StoreConfig.exit_timeout_s` and five seconds more, and what
        is not written by then is lost, and logged. A process that is killed, calls `os._exit` or executes another
        program keeps what was written by then.

        Returns:
            What became of the blocks since the last `flush`. Blocks that could not be written are lost, and logged.

        Raises:
            BlocksLost: the thread that writes blocks died before; what was queued is lost.
            StoreBusy: a signal handler closes the store while it interrupts a call of it, or the decoding of a layer;
                let the handler raise.

        Example:
            >>> store.close().dropped_blocks
            0
        """
        self._engine.getter.fetcher.finishing.check()
        self._calls.close()
        return self._ending.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _slow(self, call: str) -> SlowCall:
        return SlowCall(call, self.config.slow_call_s, self.metrics)

    def _put_path(self) -> PutPath:
        self._calls.check()
        if self._engine.put_path is None:
            raise ReadOnlyStore("the store was opened with read_only=True; open it for writing in one process")
        return self._engine.put_path
