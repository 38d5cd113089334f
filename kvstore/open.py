"""Opens a store: builds what it is made of, from the tiers up, and closes all of it in the reverse order."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvstore.approximate.assemble import Assembler
from kvstore.approximate.estimates import ProfileEstimates
from kvstore.codecs.profile import ProfileFile
from kvstore.config import StoreConfig
from kvstore.core.ending import Ending
from kvstore.core.history import Sample, unpack
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.learning_status import LearningStatus
from kvstore.core.precedence import Precedence
from kvstore.core.results import CompactResult, FlushResult
from kvstore.core.workers import Workers
from kvstore.dedup.donor_cache import DonorReader
from kvstore.dedup.encode import DonorCoding
from kvstore.dedup.match import DonorMatcher
from kvstore.errors import ConfigError
from kvstore.gate.gate import Gate
from kvstore.gate.open import open_gate
from kvstore.learning.learner import Learner, status_at_open
from kvstore.learning.trial import Progress
from kvstore.metrics import Metric, Metrics
from kvstore.open_remote import Remote, open_remote
from kvstore.read.decode import BlockDecoder
from kvstore.read.explain import Explainer
from kvstore.read.fetch import Fetcher
from kvstore.read.get import Getter
from kvstore.read.lookup import Lookup
from kvstore.read.placement import Placement
from kvstore.read.stored_block import BlockReader
from kvstore.read.worth import Worth
from kvstore.residency.block import most_bytes
from kvstore.residency.check import Checker
from kvstore.residency.clusters import ClusterIndex
from kvstore.residency.follow import Follower
from kvstore.residency.history import Recorder
from kvstore.residency.lifecycle import CallGuard
from kvstore.residency.load import load_index, save_traffic
from kvstore.residency.namespaces import usage_by_namespace
from kvstore.residency.record_check import RecordCheck
from kvstore.residency.residency import Residency
from kvstore.residency.sessions import SessionTable
from kvstore.tiers.base import Tier
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.codecs import LateCodecs
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.open import settled_config
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.profiles import Profiles
from kvstore.trie import TrieIndex
from kvstore.trie.content import ContentIndex
from kvstore.write.aging import Ager
from kvstore.write.commit import GroupCommit
from kvstore.write.encode import Encoder
from kvstore.write.put import PutPath
from kvstore.write.queue import WriteQueue
from kvstore.write.recent import RECENT_CODEC, RecentBlocks
from kvstore.write.standalone import Recoder


@dataclass(frozen=True)
class Engine:
    """What an open store is made of. Thread-safe, as each of its members is; made by `open_engine`.

    Attributes:
        residency: the tiers, and where each record is.
        pool: memory for records that are read or written.
        getter: the way of a get; its `lookup` finds stored prefixes.
        explainer: says why a get ends where it ends.
        assembler: the way of an approximate get.
        gate: decides between loading and computing.
        put_path: the way of a put; None in a store that is only read.
        sessions: the saved sessions.
        clusters: groups of alike sequences.
        recorder: keeps the history; None in a store that is only read.
        learner: fits a profile to what is stored; None in a store that is only read, or has no disk.
        background: the thread of prefetches.
        own: threads for what an interrupt must not cut short: to close the store, for example.
        remote: the tier on other machines; None if there is none.
    """

    residency: Residency
    pool: BufferPool
    getter: Getter
    explainer: Explainer
    assembler: Assembler
    gate: Gate
    put_path: PutPath | None
    sessions: SessionTable
    clusters: ClusterIndex
    recorder: Recorder | None
    learner: Learner | None
    background: Workers
    own: Workers
    remote: Remote | None
    _opened: contextlib.ExitStack

    def close(self) -> FlushResult:
        """Write what is queued, close files, end threads, give memory back. No call may be under way. Idempotent.

        Returns:
            What became of the blocks since the last flush.

        Raises:
            BlocksLost: the thread that writes died before.
        """
        self._opened.close()
        return self.put_path.flush() if self.put_path is not None else FlushResult(0, 0)

    def flush(self, put_path: PutPath, remote: bool) -> FlushResult:
        """See `KVStore.flush`."""
        if self.remote is not None:
            self.remote.settle()
        result = put_path.flush()
        if self.residency.disk is not None:
            self.residency.disk.finish_removals(at_once=True)
        due = self.remote.flush() if remote and self.remote is not None else 0
        return replace(result, remote_due=due)

    def abandon(self) -> int:
        """Write nothing any more, for time has run out; return how many blocks were not written."""
        return self.put_path.queue.abandon() if self.put_path is not None else 0

    def why_dropped(self) -> str:
        """Return the counters of blocks that were dropped since the store was opened."""
        found = self.residency.metrics.snapshot().items()
        return ", ".join(f"{name} {count:g}" for name, count in found if name.startswith("dropped_")) or "nothing"

    def compact(self, move: bool) -> CompactResult:
        """See `KVStore.compact`."""
        metrics, disk = self.residency.metrics, self.residency.disk
        before = [metrics[Metric.EXPIRED_RECORDS], metrics[Metric.DISK_MOVED_RECORDS]]
        self.residency.expire()
        freed = 0
        if disk is not None:
            disk.expire_sessions()
            freed = disk.compact(move)
        expired, moved = (
            int(metrics[metric] - old)
            for metric, old in zip((Metric.EXPIRED_RECORDS, Metric.DISK_MOVED_RECORDS), before, strict=True)
        )
        return CompactResult(freed, moved, expired)

    def learn(self, progress: Progress) -> LearningStatus:
        """See `KVStore.learn`."""
        if self.learner is None:
            raise ConfigError("learn: a store without a disk tier learns nothing; set disk.bytes")
        return self.learner.now(progress)

    def stats(self) -> dict[str, Any]:
        """See `KVStore.stats`."""
        residency = self.residency
        tiers: list[Tier[Any]] = [residency.device, residency.host, *residency.storage.values()]
        return {
            "index": residency.index.stats(),
            "families": residency.family_stats(),
            "pins": residency.pin_stats(),
            "content": residency.content.stats() if residency.content is not None else {},
            **{tier.name: tier.stats() for tier in tiers},
            **({"remote": self.remote.stats()} if self.remote is not None else {}),
            "queue": {
                "bytes": self.put_path.queue.pending_bytes if self.put_path is not None else 0,
                "records": residency.queued_records(),
            },
            "sessions": self.sessions.stats(),
            "namespaces": usage_by_namespace(residency, self.sessions),
            "learning": self.learner.status.numbers() if self.learner is not None else {},
            "buffers": {"free_bytes": self.pool.free_bytes + self.getter.fetcher.results.free_bytes},
            "gate": self.gate.stats(),
            "counters": residency.metrics.snapshot(),
        }

    def history(self) -> tuple[Sample, ...]:
        """See `KVStore.history`."""
        if self.recorder is not None:
            return self.recorder.history()
        return unpack(self.residency.disk.catalog.history()) if self.residency.disk is not None else ()

    def checker(self, calls: CallGuard) -> Checker:
        """Return what compares everything that the store says of itself, for one of its `calls`."""

        def is_idle() -> bool:
            self.getter.fetcher.finishing.finish()  # layers that are read after their get
            if calls.inside > 1:
                return False
            self.background.run(int)  # prefetches come one after the other: all before this one are done
            return calls.inside == 1 and not (self.remote is not None and self.remote.is_busy)

        residency, root = self.residency, self.getter.lookup.root
        decodes = self.getter.fetcher.decoder.profiles.knows
        records = RecordCheck(self.pool, root, residency.whole_path, residency.config.block_tokens, decodes)
        paused = self.put_path.paused if self.put_path is not None else contextlib.nullcontext
        return Checker(residency, records, paused, is_idle)


def open_engine(
    path: str,
    identity: ModelIdentity,
    config: StoreConfig,
    metrics: Metrics,
    calls: CallGuard,
    *,
    read_only: bool = False,
    fs: FileSystem | None = None,
) -> Engine:
    """Open the store at `path`, or make it where there is none. Nothing stays open if this fails.

    calls: those of the store, between which it may learn.

    Raises:
        The errors of `KVStore`.
    """
    fs = fs or FileSystem()
    if config.disk.bytes:
        config = settled_config(fs, path, config, read_only, identity.layout)
    with contextlib.ExitStack() as opened:
        opened.callback(metrics.log.close)  # last, after everything that may still be counted
        own = Workers(2, "kvstore-own")
        opened.callback(own.close)
        base = _open_base(opened, path, identity, config, metrics, read_only, fs, own)
        assembler, remote = _open_reading(opened, base, fs)
        sessions = SessionTable(base.residency.disk, config)
        recorder = None if read_only else Recorder(base.residency)
        put_path = None if recorder is None else _open_put_path(opened, base, assembler, sessions, recorder)
        if remote is not None and put_path is not None:
            remote.keep_with(opened, put_path, assembler.getter.fetcher.decoder)
            remote.erase_with(put_path, assembler.getter.lookup.root)
        learner = None if put_path is None else _open_learner(opened, base, put_path, calls)
        background = Workers(1, "kvstore-prefetch")
        opened.callback(background.close, cancel=True)
        return Engine(
            residency=base.residency,
            pool=base.pool,
            getter=assembler.getter,
            explainer=Explainer(
                assembler.getter.lookup,
                base.profiles,
                base.pool,
                assembler.getter.worth,
                assembler.getter.resumer or assembler.getter.remote,
            ),
            assembler=assembler,
            gate=base.gate,
            put_path=put_path,
            sessions=sessions,
            clusters=ClusterIndex(base.residency),
            recorder=recorder,
            learner=learner,
            background=background,
            own=own,
            remote=remote,
            _opened=opened.pop_all(),
        )


def open_to_end(
    place: str, path: str, identity: ModelIdentity, config: StoreConfig, metrics: Metrics, calls: CallGuard, **how: Any
) -> tuple[Engine, Ending]:
    """Open the store at `path` as `open_engine` does, and return with it what closes it. place: the folder's real path.

    Raises:
        The errors of `open_engine`.
    """
    engine = open_engine(path, identity, config, metrics, calls, **how)
    ends = engine.close, engine.abandon, engine.why_dropped
    return engine, Ending(place, engine.own, calls.close, *ends, config.exit_timeout_s)


@dataclass(frozen=True)
class _Base:
    """What reading and writing both stand on: the tiers with what they hold, and the codecs of new records.

    next_record: the number of the next new record. recent: the blocks that are exact because they are recent.
    """

    identity: ModelIdentity
    config: StoreConfig
    metrics: Metrics
    read_only: bool
    pool: BufferPool
    results: BufferPool
    profiles: Profiles
    codecs: LateCodecs
    residency: Residency
    next_record: int
    gate: Gate
    recent: RecentBlocks

    @property
    def is_exact(self) -> bool:
        """Whether every tier gives back the same values, bit for bit."""
        return self.identity.codec_family == "exact"


def _open_base(
    opened: contextlib.ExitStack,
    path: str,
    identity: ModelIdentity,
    config: StoreConfig,
    metrics: Metrics,
    read_only: bool,
    fs: FileSystem,
    own: Workers,
) -> _Base:
    """Opens the tiers, and fills the index from the catalog."""
    given = None if config.profile is None else ProfileFile.open(config.profile, identity)
    profiles = Profiles(fs, path if config.disk.bytes else None, identity, metrics, given, read_only)
    codecs = LateCodecs(config, identity, profiles, metrics)
    pool, results = (_open_pool(opened, config, read_only, pinned) for pinned in (torch.cuda.is_available(), False))

    def open_disk(owner: Residency) -> DiskTier:
        return DiskTier(
            fs,
            path,
            identity,
            config,
            read_only,
            metrics,
            pool,
            evict=owner.evict,
            alive=lambda record: owner.queued(record) is not None,
            leaves=owner.entries_leave,
            holes=owner.holes,
            quotas=owner.keep_quotas if config.tenants else None,
        )

    has_disk = config.disk.bytes > 0
    # Blocks of layouts with windows may lack what others would be coded against.
    has_donors = config.donors and has_disk and not identity.layout.is_grouped
    index = TrieIndex(config.block_tokens)
    content = ContentIndex(trie=index) if has_donors else None
    residency = Residency(config, index, metrics, content, open_disk if has_disk else None, own)
    opened.callback(residency.close)
    window = config.exact_recent_tokens if has_disk and not read_only and not _is_exact(identity, codecs) else 0
    loaded = load_index(residency, identity.layout.is_grouped, RECENT_CODEC.id if window else None)
    recent = RecentBlocks(window, loaded.coded)
    if window:
        residency.listen(forgotten=recent.forget)
    if residency.disk is not None and not read_only:
        if not residency.disk.keep_budget():
            metrics.add(Metric.FALLBACK_OVER_BUDGET)
        residency.shrink_to_quotas()
    if has_disk and not read_only:
        codecs.keep()
    token_bytes = max(1, identity.layout.bytes_per_token)
    gate = open_gate(opened, path, config, token_bytes, residency.disk, metrics, read_only, fs)
    residency.savings.ask = gate.growth
    next_record = loaded.next_record
    return _Base(
        identity, config, metrics, read_only, pool, results, profiles, codecs, residency, next_record, gate, recent
    )


def _open_pool(opened: contextlib.ExitStack, config: StoreConfig, read_only: bool, pinned: bool) -> BufferPool:
    """Memory that is recycled until the store is closed."""
    # A store that is only read has no thread that would give back what was kept while it was busy.
    pool = BufferPool(2 * config.group_bytes, 0 if read_only else config.write_queue_bytes, pinned)
    opened.callback(pool.close)
    return pool


def _open_reading(opened: contextlib.ExitStack, base: _Base, fs: FileSystem) -> tuple[Assembler, Remote | None]:
    """Everything that a get needs, approximate or not, and the remote tier."""
    config, residency, layout = base.config, base.residency, base.identity.layout
    # A store on disk goes by the identity that it was made with: names in it may be others by now.
    digest = residency.disk.digest if residency.disk is not None else base.identity.digest
    executor = Workers(config.threads + 1, "kvstore")  # one more than may compute, so that one can wait for the disk
    opened.callback(executor.close)
    donors = DonorReader(residency, base.pool, base.profiles, base.metrics, layout, base.is_exact)
    opened.callback(donors.clear)
    residency.listen(forgotten=donors.forget)
    decoder = BlockDecoder(residency, base.profiles, donors)
    follower = Follower(residency, layout.is_grouped) if base.read_only else None
    worth = Worth(base.gate, residency, base.pool, executor, layout.is_grouped)
    worth.look(base.next_record, base.codecs.disk_name)
    lookup = Lookup(residency, digest, config.block_tokens, follower, layout)
    fetcher = Fetcher(residency, base.pool, base.results, executor, config.threads, decoder, base.gate)
    opened.callback(fetcher.finishing.finish)
    remote = open_remote(opened, config, base.identity, lookup, fetcher, base.codecs, base.profiles, base.read_only, fs)
    placement = Placement(layout, base.codecs, base.profiles, base.metrics)
    reader, resumer = (None, None) if remote is None else (remote.reader, remote.resumer)
    getter = Getter(lookup, placement, fetcher, worth, layout, base.metrics, reader, resumer)
    return Assembler(residency, donors, getter, ProfileEstimates(base.profiles), base.metrics), remote


def _open_put_path(
    opened: contextlib.ExitStack, base: _Base, assembler: Assembler, sessions: SessionTable, recorder: Recorder
) -> PutPath:
    """Everything that a put needs; from here on the write queue has threads."""
    config, residency, pool = base.config, base.residency, base.pool
    fetcher, root = assembler.getter.fetcher, assembler.getter.lookup.root
    precedence = Precedence()

    def tick() -> None:
        residency.expire()
        sessions.expire()
        if residency.disk is not None:
            residency.disk.finish_removals()
            residency.disk.finish_erase()
        recorder.tick()
        pool.collect()
        base.results.collect()

    queue = WriteQueue(
        config.write_queue_bytes,
        _group_bytes(config, base.identity.layout),
        _encoder(base, assembler, precedence).encode,
        GroupCommit(residency, sessions, _ager(base, fetcher.executor)),
        tick,
        base.metrics,
        tidy=pool.collect,  # otherwise the next put would do it
    )
    opened.callback(save_traffic, residency, recorder)  # after the queue is closed
    opened.callback(queue.close)
    recoder = Recoder(residency, fetcher, pool, base.identity.layout, config.block_tokens, root, base.is_exact)
    given = pool, base.metrics, recoder, base.recent, base.next_record, precedence
    put_path = PutPath(residency, queue, sessions, *given)
    opened.callback(put_path.close)
    return put_path


def _open_learner(opened: contextlib.ExitStack, base: _Base, put_path: PutPath, calls: CallGuard) -> Learner | None:
    """What learns from the blocks on disk, while nobody calls the store and nothing waits to be written."""
    residency, config = base.residency, base.config
    if residency.disk is None:
        return None
    reader = _reader(base, residency.disk)
    learner = Learner(
        base.identity,
        config,
        reader,
        base.codecs,
        status_at_open(config, base.identity, base.profiles),
        lambda: put_path.next_record,
        lambda: 0.0 if put_path.queue.pending_bytes else calls.idle_s,
    )
    opened.callback(learner.close)
    return learner


def _encoder(base: _Base, assembler: Assembler, precedence: Precedence) -> Encoder:
    """What the write queue encodes with: against donors, if the codecs allow it."""
    residency, codecs, pool = base.residency, base.codecs, base.pool
    matcher = against = None
    if residency.content is not None:
        has_members = codecs.has_donors
        matcher = DonorMatcher(
            residency, residency.content, base.config.block_tokens, has_members, stored_only=not base.is_exact
        )
    if matcher is not None and codecs.has_donors:
        against = DonorCoding(matcher, assembler.reader, codecs, pool, base.metrics)
    return Encoder(
        residency, pool, assembler.getter.fetcher.executor, codecs, matcher, against, base.recent, precedence
    )


def _ager(base: _Base, executor: Workers) -> Ager | None:
    """What codes blocks with loss that are recent no longer; None if the settings keep none of them exact."""
    if base.residency.disk is None or not base.recent.tokens:
        return None
    return Ager(_reader(base, base.residency.disk), base.codecs, base.recent, executor)


def _reader(base: _Base, disk: DiskTier) -> BlockReader:
    """Reads blocks from disk to code them anew."""
    layout = base.identity.layout
    return BlockReader(base.residency, disk, base.pool, base.profiles, layout, base.config.block_tokens)


def _is_exact(identity: ModelIdentity, codecs: LateCodecs) -> bool:
    """Whether the disk gives back every bit; a codec that does may not have been made yet."""
    return identity.codec_family == "exact" or codecs.disk.exact


def _group_bytes(config: StoreConfig, layout: KVLayout) -> int:
    # A group is all held until its commit: it must leave space for what is evicted meanwhile. And what comes with a
    # group cannot be evicted for what comes after it in the same group.
    raw, tokens = config.block_tokens * layout.bytes_per_token, config.block_tokens
    share = raw / most_bytes(layout, tokens) / 2
    quotas = [max(1, int(t.quota_bytes * share)) for t in config.tenants.values() if t.quota_bytes is not None]
    return min(config.group_bytes, max(config.segment_bytes // 2, config.disk.bytes // 8), *quotas)
