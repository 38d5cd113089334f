"""The codecs of a store's tiers: from the names in its settings to objects that fit its identity and its disk."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.block import max_record_bytes
from kvstore.codecs import Codec
from kvstore.codecs.profile import NO_PROFILE
from kvstore.config import PAGE_BYTES, StoreConfig
from kvstore.errors import ConfigError, UnknownCodec
from kvstore.identity import ModelIdentity
from kvstore.metrics import Metrics
from kvstore.profiles import Profiles

# Codecs that need no profile: what the host tier is coded with, and what stands in for one whose profile is not kept.
_FAST, _PLAIN = "splitzip", "entropy"


@dataclass(frozen=True)
class TierCodecs:
    """What the host and disk tiers keep blocks in."""

    host: Codec
    disk: Codec

    @classmethod
    def of(cls, config: StoreConfig, identity: ModelIdentity, profiles: Profiles) -> TierCodecs:
        """Those that the settings name. Raises `ConfigError` for one that is unknown, lossy where caches are exact, or
        whose records may not fit a segment; `ProfileError` where a profile is needed that is not there."""
        host = _FAST if config.host.codec == "auto" else config.host.codec
        return cls(
            *(_checked(config, identity, profiles, *name) for name in (("host", host), ("disk", config.disk.codec)))
        )

    def kept(self, profiles: Profiles, metrics: Metrics) -> TierCodecs:
        """The codecs, once the store has its own copy of the profile that they need; where the disk has no room for
        it, codecs that need none, which is counted: no record may name a profile that is not there."""
        if all(codec.profile == NO_PROFILE for codec in (self.host, self.disk)) or profiles.keep():
            return self
        metrics.add("fallback_profile")
        plain = profiles.encoder(_PLAIN)
        return TierCodecs(*(codec if codec.profile == NO_PROFILE else plain for codec in (self.host, self.disk)))


def _checked(config: StoreConfig, identity: ModelIdentity, profiles: Profiles, tier: str, name: str) -> Codec:
    try:
        codec = profiles.encoder(name)
    except UnknownCodec as error:
        raise ConfigError(f"{tier}.codec: {error}") from error
    if not codec.exact and identity.codec_family == "exact":
        raise ConfigError(
            f"{tier}.codec: {name!r} is lossy, and the identity says that its caches are exact, with which others must "
            'not mix; open another store with dataclasses.replace(identity, codec_family="lossy")'
        )
    possible = [codec] if codec.profile == NO_PROFILE else [codec, profiles.encoder(_PLAIN)]
    largest = max(max_record_bytes(identity.layout, config.block_tokens, each) for each in possible)
    if config.disk.bytes and largest > config.segment_bytes - PAGE_BYTES:
        raise ConfigError(
            f"segment_bytes: a block of {config.block_tokens} tokens can take {largest} bytes, more than "
            f"a segment of {config.segment_bytes}; raise segment_bytes or lower block_tokens"
        )
    return codec
