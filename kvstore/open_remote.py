"""Opens what a store has of the remote tier: how it reads there, what it writes there, what it keeps of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from kvstore.config import PAGE_BYTES, StoreConfig
from kvstore.core.identity import ModelIdentity
from kvstore.errors import ConfigError
from kvstore.metrics import Metric, Metrics
from kvstore.read.decode import BlockDecoder
from kvstore.read.fetch import Fetcher
from kvstore.read.lookup import Lookup
from kvstore.read.remote import RemoteReader
from kvstore.read.remote_places import PlaceSearch
from kvstore.read.remote_resume import RemoteResumer
from kvstore.remote_config import RemoteConfig
from kvstore.residency.block import most_bytes
from kvstore.residency.residency import Residency
from kvstore.tiers.codecs import NewCodecs
from kvstore.tiers.disk.fs import FileSystem, read_file
from kvstore.tiers.profiles import Profiles
from kvstore.tiers.remote.beliefs import Beliefs
from kvstore.tiers.remote.engine import ChangingEngine, RemoteEngine
from kvstore.tiers.remote.link import RemoteLink
from kvstore.tiers.remote.listing import Listing
from kvstore.tiers.remote.names import RemoteNames
from kvstore.tiers.remote.opening import open_engine
from kvstore.tiers.remote.profiles import RemoteProfiles
from kvstore.tiers.remote.sealing import Sealer, key_from
from kvstore.tiers.remote.tier import RemoteTier
from kvstore.write.erase_remote import RemoteErasure
from kvstore.write.keep import Keeper
from kvstore.write.leaving import LeavingRecords
from kvstore.write.portable import PortableRecords
from kvstore.write.put import PutPath
from kvstore.write.upload import Uploader

# A payload that coding made larger, and what seals it.
_SLACK_BYTES, _SLACK_SHARE = 1 << 16, 8
_KEY_FILE_BYTES = 1 << 10


@dataclass
class Remote:
    """The remote side of an open store. Thread-safe.

    Attributes:
        tier: the servers.
        reader: reads there for gets.
        resumer: goes on from places there; None but of layouts with windows or states.
        uploader: writes there; None if nothing is written.
        keeper: keeps what gets read there; None if nothing is kept.
    """

    tier: RemoteTier
    reader: RemoteReader
    resumer: RemoteResumer | None = None
    uploader: Uploader | None = None
    keeper: Keeper | None = None

    def settle(self) -> None:
        """Return when what gets brought from there before is queued, as far as it is to be kept."""
        if self.keeper is not None:
            self.keeper.wait()

    @property
    def is_busy(self) -> bool:
        """Whether records are being read to be written there."""
        return self.uploader is not None and self.uploader.waiting > 0

    def flush(self) -> int:
        """Return when all is there that is due; how many prefixes still are, if that takes too long."""
        return 0 if self.uploader is None else self.uploader.flush(self.tier.config.flush_timeout_s)

    def stats(self) -> dict[str, float]:
        """Return plain numbers."""
        return {**self.tier.stats(), **(self.uploader.stats() if self.uploader is not None else {})}

    def erase_with(self, put_path: PutPath, root: Callable[[bytes], bytes]) -> None:
        """Take out from now on what is erased here."""
        if self.uploader is not None and self.tier.config.erase:
            grouped = self.reader.layout.is_grouped
            put_path.remote_erasure = RemoteErasure(put_path.residency, self.tier, root, self.uploader, grouped)

    def keep_with(self, opened: contextlib.ExitStack, put_path: PutPath, decoder: BlockDecoder) -> None:
        """Keep from now on what gets bring from there."""
        there = self.uploader.there if self.uploader is not None else lambda records, end: None
        at_once = self.tier.config.promote == "first"
        self.keeper = Keeper(put_path.residency, put_path, decoder, put_path.pool, self.reader.layout, at_once, there)
        opened.callback(self.keeper.close)
        self.reader.keep = self.keeper.keep
        put_path.arrived = self.keeper.wait


def open_remote(
    opened: contextlib.ExitStack,
    config: StoreConfig,
    identity: ModelIdentity,
    lookup: Lookup,
    fetcher: Fetcher,
    codecs: NewCodecs,
    profiles: Profiles,
    read_only: bool,
    fs: FileSystem,
) -> Remote | None:
    """Open the remote tier of the settings; None if there is none. Its servers may be down.

    Raises:
        ConfigError: its settings do not fit.
    """
    residency, layout, remote = fetcher.residency, identity.layout, config.remote
    if remote is None:
        return None
    plain = most_bytes(layout, config.block_tokens)
    most = plain + plain // _SLACK_SHARE + _SLACK_BYTES
    sealer, beliefs = _sealer(fs, remote), Beliefs(remote.belief_s, remote.miss_s)
    names, metrics = RemoteNames(lookup.digest), residency.metrics
    told = _Told(names, beliefs, metrics)
    link = RemoteLink(partial(_engine, remote, told), metrics, remote.deadline_s)
    if remote.list_s:
        told.listing = Listing(link, names, metrics, remote.list_s, remote.write_timeout_s)
    travelling = RemoteProfiles(link, names, profiles, metrics, remote.write_timeout_s, remote.ttl_s, sealer)
    profiles.ask = travelling.bring_soon
    block_bytes = config.block_tokens * layout.bytes_per_token
    tier = RemoteTier(
        remote,
        names,
        link,
        metrics,
        fetcher.pool,
        travelling,
        most,
        sealer,
        beliefs=beliefs,
        listing=told.listing,
        block_bytes=0 if layout.is_grouped else block_bytes,  # blocks with cuts or states have values of their own
    )
    opened.callback(tier.close)
    exact = identity.codec_family == "exact"
    reader = RemoteReader(tier, layout, exact, config.block_tokens, fetcher.gate, residency.metrics)
    resumer = None
    if layout.is_grouped:
        state_bytes = max(0, config.segment_bytes - plain - PAGE_BYTES)  # more of them could not be kept
        search = PlaceSearch(tier, layout, config.block_tokens, exact, state_bytes, residency.metrics)
        resumer = RemoteResumer(reader, search, lookup, fetcher)
    if read_only or remote.read_only:
        return Remote(tier, reader, resumer)
    portable = PortableRecords(residency, fetcher, fetcher.pool, layout, codecs)
    grouped = layout.is_grouped
    leaving = LeavingRecords(residency, fetcher.pool, remote.queue_bytes, keep_tails=grouped)
    uploader = Uploader(residency, tier, portable, lookup.root, block_bytes, leaving, lookup if grouped else None)
    opened.callback(uploader.close, remote.close_timeout_s)
    _listen(residency, uploader, remote)
    return Remote(tier, reader, resumer, uploader)


def _listen(residency: Residency, uploader: Uploader, remote: RemoteConfig) -> None:
    """Have the uploader told of what the settings say is to be written."""
    residency.listen(forgotten=uploader.forget)
    if remote.upload == "put":
        residency.on_written(uploader.written)
        residency.on_put_again(uploader.due)  # a server may have lost it, or its end may be no place yet
    elif remote.upload == "second use":
        residency.on_use(uploader.due)
    else:
        residency.on_evicted(uploader.evicted)


@dataclass
class _Told:
    """What is told of changes goes here: nothing old is believed of what others changed."""

    names: RemoteNames
    beliefs: Beliefs
    metrics: Metrics
    listing: Listing | None = None

    def __call__(self, changed: Sequence[str] | None) -> None:
        found = None if changed is None else map(self.names.key, changed)
        keys = None if found is None else [key for key in found if key is not None]
        if self.listing is not None:
            self.listing.add(keys)
        self.beliefs.forget(keys)
        self.metrics.add(Metric.REMOTE_TOLD, 1 if changed is None else len(changed))


def _engine(remote: RemoteConfig, told: _Told) -> RemoteEngine:
    """The engine; what its server tells of changes is believed no more."""
    engine = open_engine(remote.url, **remote.settings)
    if not remote.follow:
        return engine
    if not engine.limits.has_change_feed:
        engine.close()
        raise ConfigError(f"remote.follow: {remote.url} does not tell of changes; leave it out")
    cast(ChangingEngine, engine).changes(told.names.prefix, told)
    return engine


def _sealer(fs: FileSystem, remote: RemoteConfig) -> Sealer | None:
    """What seals values, if the settings name a fleet key."""
    if remote.key is None:
        return None
    if isinstance(remote.key, bytes):
        return Sealer(remote.key)
    try:
        return Sealer(key_from(read_file(fs, str(remote.key), _KEY_FILE_BYTES)))
    except OSError as error:
        raise ConfigError(f"remote.key: {remote.key} cannot be read: {error.strerror}") from error
