"""`KVStore`: put, get, and everything a program calls."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from kvstore.approximate.assemble import Assembler
from kvstore.codecs import Profile
from kvstore.config import StoreConfig
from kvstore.core.approximate import Approximate
from kvstore.core.explanation import Explanation
from kvstore.core.identity import ModelIdentity
from kvstore.core.keys import namespace_digest
from kvstore.core.results import ClusterInfo, FlushResult, Hit, PutResult, SessionInfo
from kvstore.core.session_record import SessionRecord
from kvstore.core.tokens import as_tokens
from kvstore.dedup.donor_cache import DonorReader
from kvstore.dedup.encode import DonorCoding
from kvstore.dedup.match import Matchmaker
from kvstore.errors import ConfigError, ReadOnlyStore, UnsupportedCache
from kvstore.metrics import Metric, Metrics
from kvstore.read.decode import BlockDecoder
from kvstore.read.explain import Explainer
from kvstore.read.fetch import Fetcher
from kvstore.read.get import GetRequest, Getter
from kvstore.read.lookup import Lookup
from kvstore.read.placement import Placement
from kvstore.read.result import is_on_cpu
from kvstore.residency.check import Checker, CheckReport
from kvstore.residency.clusters import Grouping
from kvstore.residency.lifecycle import Gate
from kvstore.residency.load import load_index, save_traffic
from kvstore.residency.record_check import RecordCheck
from kvstore.residency.residency import Residency
from kvstore.residency.sessions import SessionTable
from kvstore.session import Session, SessionStore
from kvstore.tiers.base import Tier
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.profiles import Profiles
from kvstore.trie import UNIFORM_BITS_PER_TOKEN, TrieIndex, bits_from_logprobs
from kvstore.trie.content import ContentIndex
from kvstore.write.commit import GroupCommit
from kvstore.write.encode import Encoder
from kvstore.write.plan import PutRequest
from kvstore.write.put import Intake
from kvstore.write.queue import WriteQueue
from kvstore.write.standalone import Recoder

_MOST_RESERVE = 1 << 24
# About a paragraph by a model's probabilities, sixteen tokens where nothing is known of them.
_RADIUS_BITS = 256.0


class KVStore:
    """A persistent, tiered store of KV caches. Thread-safe; a context manager.

    path: a directory (made where it is missing). identity: whose caches; a store holds those of one model.
    config: budgets and settings. read_only: any number of processes may read while one writes.
    fs: the file system, for tests that make it fail.

    Raises `StoreLocked` where another writer has it open, `IdentityMismatch`, `FormatVersion`, `CorruptStore`,
    `ConfigError`, `ProfileError`. Damaged entries are dropped and counted, never raised.

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
        self.path = os.fspath(path)
        self.identity = identity
        self.config = config = config or StoreConfig()
        self.metrics = Metrics()
        self.read_only = read_only
        self._gate = Gate()
        if read_only and not config.disk.bytes:
            raise ConfigError("read_only: a store without a disk tier has nothing to read")
        fs = fs or FileSystem()
        given = None if config.profile is None else Profile.load(config.profile, identity)
        profiles = Profiles(fs, self.path if config.disk.bytes else None, identity, self.metrics, given)
        codecs = TierCodecs.of(config, identity, profiles)

        index = TrieIndex(config.block_tokens)
        content = ContentIndex() if config.donors and config.disk.bytes else None
        self._residency = Residency(config, index, self.metrics, content)
        self._pool = BufferPool(keep_bytes=2 * config.group_bytes, pinned=_cuda_is_there())
        next_record = 1
        if config.disk.bytes:
            self._residency.disk = DiskTier(
                fs,
                self.path,
                identity,
                config,
                read_only,
                self.metrics,
                self._pool,
                evict=self._residency.evict,
                alive=self._residency.is_pending,
                lost=self._residency.quarantine,
                leaves=self._residency.entries_leave,
            )
            try:
                next_record = load_index(self._residency)
                if not read_only:
                    codecs = codecs.kept(profiles, self.metrics)
            except BaseException:
                self._residency.disk.close()  # or the lock would outlive the failure
                raise
        # One more than may compute, so that one can wait for the disk.
        self._executor = ThreadPoolExecutor(config.threads + 1, "kvstore")
        self._background = ThreadPoolExecutor(1, "kvstore-prefetch")
        exact = identity.codec_family == "exact"
        self._donors = DonorReader(self._residency, self._pool, profiles, self.metrics, identity.layout, exact)
        self._residency.listen(forgotten=self._donors.forget)
        decoder = BlockDecoder(self._residency, profiles, self._donors)
        self._fetcher = Fetcher(self._residency, self._pool, self._executor, config.threads, decoder)
        self._sessions = SessionTable(self._residency.disk)
        self._lookup = Lookup(self._residency, identity, config.block_tokens, follows=read_only)
        self._explainer = Explainer(self._lookup, profiles, self._pool)
        self._placement = Placement(identity.layout, codecs, profiles, self.metrics)
        self._getter = Getter(self._lookup, self._placement, self._fetcher, identity.layout, self.metrics)
        self._assembler = Assembler(self._residency, self._donors, self._getter, self.metrics)
        self._grouping = Grouping(self._residency)
        self._intake: Intake | None = None
        if not read_only:
            matchmaker = against = None
            if content is not None:
                members = codecs.donor is not None
                matchmaker = Matchmaker(self._residency, content, config.block_tokens, members, stored_only=not exact)
            if matchmaker is not None and codecs.donor is not None:
                against = DonorCoding(matchmaker, self._donors, codecs.donor, codecs.disk, self._pool, self.metrics)
            encoder = Encoder(self._residency, self._pool, self._executor, codecs, matchmaker, against)
            writer = WriteQueue(
                config.write_queue_bytes,
                _group_bytes(config),
                encoder.encode,
                GroupCommit(self._residency, self._sessions).commit,
                self._residency.expire,
            )
            recoder = Recoder(
                self._residency,
                self._fetcher,
                self._pool,
                identity.layout,
                config.block_tokens,
                self._lookup.root,
                exact,
            )
            self._intake = Intake(
                self._residency, writer, self._sessions, self._pool, self.metrics, recoder, next_record
            )

    # ---- the main job --------------------------------------------------------------------------------------------

    def put(
        self,
        tokens: Any,
        kv: Any,
        *,
        namespace: bytes = b"",
        logprobs: Any = None,
        ttl: float | None = None,
        pin: bool = False,
    ) -> PutResult:
        """Stores the cache of a sequence: the blocks of it that are not stored yet.

        tokens: `[n]` ids < 2^32. kv: a transformers cache, or per layer (K, V), `[1, heads, n, dim]` or
        `[heads, n, dim]`, K after the rotary embedding. namespace: sequences of different namespaces never share.
        logprobs: `[n]` natural log-probabilities of the tokens, for the trie. ttl: seconds after which it is gone.
        pin: never evict it.

        Returns when the blocks are taken and can be got; they are written behind, and durable after `flush()` (or on
        return with durability "put"). Takes references to a transformers cache's tensors, copies others. Waits up to
        `put_timeout_s` for room in the write queue, then drops the blocks and says so. A kill or a power cut leaves
        a put whole or not at all; a disk that fills up in the middle of one may keep its beginning.
        Raises `ValueError` for bad tokens, `LayoutMismatch` for a bad kv; nothing is changed then.
        """
        return self._put(tokens, kv, self._digest(namespace), logprobs, ttl, pin)

    def _put(
        self,
        tokens: Any,
        kv: Any,
        digest: bytes,
        logprobs: Any,
        ttl: float | None,
        pin: bool,
        session: tuple[bytes, SessionRecord] | None = None,
    ) -> PutResult:
        intake = self._check_writable()
        if getattr(kv, "is_approximate", False):
            raise UnsupportedCache(
                "kv: this cache began as an approximate one, which is never stored as exact; compute the sequence anew "
                "to store it"
            )
        ids = as_tokens(tokens)
        layout = self.identity.layout
        layers, mutable = layout.layers_of(kv, len(ids))
        bits = UNIFORM_BITS_PER_TOKEN if logprobs is None else bits_from_logprobs(_array(logprobs), len(ids))
        request = PutRequest(layout, self._lookup.root(digest), digest, ids, bits, _expiry(ttl), bool(pin))
        with self._gate:
            return intake.put(request, layers, mutable, session)

    def get(
        self,
        tokens: Any,
        *,
        namespace: bytes = b"",
        max_tokens: int | None = None,
        device: Any = None,
        reserve: int | None = None,
        approximate: Approximate | None = None,
    ) -> Hit | None:
        """The cache of the longest stored prefix of `tokens`, exact to the token; None where nothing is stored.

        max_tokens: return at most so many tokens. device: where the tensors go (default: the CPU).
        reserve: room behind the tensors, in tokens, so that `Hit.cache()` appends to them instead of copying them;
        by default for the tokens that did not match, but no more than matched, and 64; 0 for contiguous tensors.
        There is none on other devices.
        approximate: where other sequences hold tokens that follow the stored prefix, give their keys and values for
        them too, keys turned to the new positions, as far as the request allows; `Hit` says which these are and which
        positions to compute anew. Needs `StoreConfig.donors`.
        What comes back otherwise is bit-identical to what was put (with exact codecs). Damaged, lost and evicted blocks
        make the prefix shorter, never wrong. Raises `ValueError` for bad arguments, nothing for any state of the store.
        """
        return self._get(tokens, self._digest(namespace), max_tokens, device, reserve, approximate)

    def _get(
        self,
        tokens: Any,
        digest: bytes,
        max_tokens: int | None,
        device: Any,
        reserve: int | None = None,
        approximate: Approximate | None = None,
    ) -> Hit | None:
        self._check_open()
        begin = time.perf_counter()
        ids = as_tokens(tokens)
        wanted = ids[: _positive("max_tokens", max_tokens, 1)]
        _positive("reserve", reserve, 0, _MOST_RESERVE)
        if approximate is not None and not isinstance(approximate, Approximate):
            raise ValueError(f"approximate: expected an Approximate, found {type(approximate).__name__}")
        request = GetRequest(digest, wanted, len(ids), device, is_on_cpu(device), reserve, begin)
        self.metrics.add(Metric.GET_TOKENS, len(wanted))
        with self._gate:
            if approximate is not None:
                return self._assembler.get(approximate, request)
            return self._getter.get(request)

    def contains(self, tokens: Any, *, namespace: bytes = b"") -> int:
        """How many leading tokens are stored, by the index alone: nothing is read, nothing counts as used."""
        self._check_open()
        ids, digest = as_tokens(tokens), self._digest(namespace)
        with self._gate:
            return self._lookup.depth(digest, ids)

    def explain(self, tokens: Any, *, namespace: bytes = b"") -> Explanation:
        """Say why a get of these tokens returns what it returns, block by block; `print` shows a table.

        Reads no payload, and nothing counts as used. Of the blocks that left since the store was opened, the last
        16,384 are known by their reason. The answer counts other namespaces that have the block: it is for whoever
        runs the store. Caches of another identity cannot be in it: opening it as another raises `IdentityMismatch`.

        Args:
            tokens, namespace: as of `put`.

        Returns:
            An `Explanation`. Damage to a payload shows once a get has met it.

        Raises:
            ValueError: bad tokens or namespace.
        """
        self._check_open()
        ids, digest = as_tokens(tokens), self._digest(namespace)
        with self._gate:
            return self._explainer.explain(digest, ids)

    def prefetch(self, tokens: Any, *, namespace: bytes = b"") -> Future[int]:
        """Brings the stored prefix from disk into the host tier, in the background.

        The future gives the leading tokens that are in memory when it is done.
        """
        self._check_open()
        ids, digest = as_tokens(tokens).copy(), self._digest(namespace)
        with self._gate:
            return self._background.submit(self._getter.prefetch, digest, ids)

    def delete(self, tokens: Any, *, namespace: bytes = b"") -> int:
        """Removes a stored sequence: the block of its last token, everything that continues it, and the blocks before
        that no other sequence shares (pinned ones stay). Returns how many blocks went. Durable on return.

        A sequence that is not stored in full removes nothing. Raises `DiskError` where the catalog cannot be written;
        the sequence is gone from this process all the same.
        """
        intake, ids, digest = self._check_writable(), as_tokens(tokens), self._digest(namespace)
        with self._gate:
            count, records = intake.delete(digest, ids)
            if self._residency.disk is not None and records:
                # A tail that the deleted one replaced may still be on disk: it goes with the group in the queue.
                intake.writer.wait()
                self._residency.disk.remove(records)
        self.metrics.add(Metric.DELETED_RECORDS, count)
        return count

    def flush(self) -> FlushResult:
        """Returns when every put and session change made before is durable, or was dropped and counted."""
        intake = self._check_writable()
        with self._gate:
            return intake.writer.flush()

    # ---- sessions ------------------------------------------------------------------------------------------------

    def session(self, name: str, *, namespace: bytes = b"") -> Session:
        """A handle on the session with this id, which may not exist yet. Raises `ValueError` for a bad one."""
        self._check_open()
        calls = SessionStore(self.read_only, self._put, self._get, self._note_session, self._session_record)
        return Session(calls, name, self._digest(namespace))

    def sessions(self) -> list[SessionInfo]:
        """All saved sessions, the last used first."""
        width = self.identity.layout.bytes_per_token
        with self._gate:
            rows = [SessionInfo(r.name, len(r.tokens), len(r.tokens) * width, r.used) for r in self._sessions.all()]
        return sorted(rows, key=lambda row: row.last_use, reverse=True)

    def clusters(self, radius_bits: float = _RADIUS_BITS, *, namespace: bytes | None = None) -> list[ClusterInfo]:
        """Stored sequences that are alike, the largest group first: those within `radius_bits` of the most probable one
        of them, in bits of what the two have not in common, by the probabilities of the trie (docs/semantic.md).

        namespace: only of this one. The first call with a radius looks at everything; from then on they are kept up
        to date. Raises `ValueError` for a radius that is not above 0.
        """
        self._check_open()
        digest = None if namespace is None else self._digest(namespace)
        with self._gate:
            return self._grouping.groups(float(radius_bits), digest)

    # ---- state ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Sizes and counters as plain numbers: `index`, one entry per tier, `queue`, and `counters` (which only
        grow; see ARCHITECTURE.md for their meaning). Every drop, fallback and damaged entry is there."""
        with self._gate:
            return self._stats()

    def _stats(self) -> dict[str, Any]:
        residency = self._residency
        tiers: list[Tier[Any]] = [residency.device, residency.host, *residency.storage.values()]
        return {
            "index": residency.index.stats(),
            "families": residency.family_stats(),
            "content": residency.content.stats() if residency.content is not None else {},
            **{tier.name: tier.stats() for tier in tiers},
            "queue": {
                "bytes": self._intake.writer.pending_bytes if self._intake else 0,
                "records": residency.queued_records(),
            },
            "buffers": {"free_bytes": self._pool.free_bytes},
            "counters": self.metrics.snapshot(),
        }

    def check(self, deep: bool = False) -> CheckReport:
        """Looks whether everything that the store says of itself agrees: index, tiers, catalog, segments, families,
        pins, ends of life, sessions. Repairs nothing.

        deep: also read every record on disk and verify checksums, keys and tokens. Takes time in proportion to the
        number of records, deep to their bytes. Other calls go on; a put or delete waits while one look is taken, and
        what is only under way is looked at again before it is reported.

        Example:
            >>> import tempfile
            >>> from kvstore import KVLayout
            >>> identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
            >>> with tempfile.TemporaryDirectory() as folder, KVStore(folder, identity) as store:
            ...     store.check(deep=True).problems
            ()
        """
        self._check_open()
        with self._gate:
            return self._checker().check(deep)

    def _checker(self) -> Checker:
        residency, intake = self._residency, self._intake
        records = RecordCheck(self._pool, self._lookup.root, residency.whole_path, self.config.block_tokens)
        paused = intake.paused if intake is not None else contextlib.nullcontext
        return Checker(residency, records, paused, self._is_idle)

    def _is_idle(self) -> bool:
        """Whether no other call is under way, and no prefetch."""
        if self._gate.inside > 1:
            return False
        self._background.submit(int).result()  # prefetches come one after the other: all before this one are done
        return self._gate.inside == 1

    def close(self) -> None:
        """Waits for the calls of other threads, writes what is queued, closes files and ends threads. Idempotent;
        everything else raises `StoreClosed` from now on."""
        if not self._gate.close():
            return
        self._background.shutdown(cancel_futures=True)
        if self._intake is not None:
            self._intake.writer.close()
        self._executor.shutdown()
        if self._residency.disk is not None:
            if not self.read_only:
                save_traffic(self._residency)
            self._residency.disk.close()
        self._donors.clear()
        self._residency.host.clear()
        self._residency.device.clear()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _note_session(self, key: bytes, record: SessionRecord | None) -> None:
        intake = self._check_writable()
        with self._gate:
            intake.note(key, record)

    def _session_record(self, key: bytes) -> SessionRecord | None:
        self._check_open()
        return self._sessions.get(key)

    def _check_open(self) -> None:
        self._gate.check()

    def _check_writable(self) -> Intake:
        self._check_open()
        if self._intake is None:
            raise ReadOnlyStore("this store was opened with read_only=True; open it for writing in one process")
        return self._intake

    def _digest(self, namespace: bytes) -> bytes:
        digest = namespace_digest(namespace)
        allowed = self.config.namespaces
        if allowed and bytes(namespace) not in allowed:
            raise ValueError(f"namespace: {namespace!r} is not one of the configured namespaces")
        return digest


def _group_bytes(config: StoreConfig) -> int:
    # A group is all held until its commit: it must leave room for what is evicted meanwhile.
    return min(config.group_bytes, max(config.segment_bytes, config.disk.bytes // 8))


def _positive(name: str, value: int | None, least: int, most: int | None = None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name}: expected an integer of at least {least}, found {value!r}")
    if value is not None and most is not None and value > most:
        raise ValueError(f"{name}: expected at most {most}, found {value}")
    return value


def _expiry(ttl: float | None) -> float:
    if ttl is None:
        return 0.0
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < float("inf"):
        raise ValueError(f"ttl: expected seconds > 0, found {ttl!r}")
    return time.time() + ttl


def _array(values: Any) -> Any:
    return values.detach().float().cpu().numpy() if hasattr(values, "detach") else values


def _cuda_is_there() -> bool:
    import torch

    return bool(torch.cuda.is_available())
