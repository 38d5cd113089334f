"""The codecs of a store's tiers: from the names in its settings to objects that fit its identity and its disk."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.codecs import Codec
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.profile import NO_PROFILE
from kvstore.config import PAGE_BYTES, StoreConfig
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.record import padded, payload_offset
from kvstore.errors import ConfigError, UnknownCodec
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.profiles import Profiles

# Codecs that need no profile: what the host tier is coded with, and what stands in for one whose profile is not kept.
_FAST, _PLAIN = "splitzip", "entropy"
# Codecs that were chosen for the size of what they write.
_SMALL = ("predictive", "entropy")


@dataclass(frozen=True)
class TierCodecs:
    """What the host and disk tiers keep blocks in. donor: for blocks on disk that are coded against others, None where
    none are."""

    host: Codec
    disk: Codec
    donor: DonorCodec | None = None

    @classmethod
    def of(cls, config: StoreConfig, identity: ModelIdentity, profiles: Profiles) -> TierCodecs:
        """Those that the settings name. Raises `ConfigError` for one that is unknown, lossy where caches are exact, or
        whose records may not fit a segment; `ProfileError` where a profile is needed that is not there."""
        host = _FAST if config.host.codec == "auto" else config.host.codec
        disk = _checked(config, identity, profiles, "disk", config.disk.codec)
        donor = _donor(config, identity, profiles, disk)
        return cls(_checked(config, identity, profiles, "host", host), disk, donor)

    def kept(self, profiles: Profiles, metrics: Metrics) -> TierCodecs:
        """The codecs, once the store has its own copy of the profile that they need; where the disk has no room for
        it, codecs that need none, which is counted: no record may name a profile that is not there."""
        used = [codec for codec in (self.host, self.disk, self.donor) if codec is not None]
        if all(codec.profile == NO_PROFILE for codec in used) or profiles.keep():
            return self
        metrics.add(Metric.FALLBACK_PROFILE)
        plain = profiles.encoder(_PLAIN)
        host, disk = (codec if codec.profile == NO_PROFILE else plain for codec in (self.host, self.disk))
        return TierCodecs(host, disk, DonorCodec(plain, None, self.donor.step) if self.donor is not None else None)


def _donor(config: StoreConfig, identity: ModelIdentity, profiles: Profiles, plain: Codec) -> DonorCodec | None:
    """None also where the tier's codec was chosen for its speed: a member is read at the pace of its donors."""
    if not plain.exact and config.donor_step is None:
        return None  # what is bit for bit like a donor cannot stand on values that another machine rounds otherwise
    small = plain.name in _SMALL and identity.layout.dtype == "bfloat16"
    if not (config.donors and config.disk.bytes and small):
        return None
    if config.donor_step is not None and identity.codec_family == "exact":
        raise ConfigError(
            "donor_step: codes with loss, and the identity says that its caches are exact, with which others must not "
            'mix; open another store with dataclasses.replace(identity, codec_family="lossy")'
        )
    return profiles.donor_encoder(plain, config.donor_step)


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


def max_record_bytes(layout: KVLayout, block_tokens: int, codec: Codec) -> int:
    """Pages that the largest record of a full block takes."""
    import numpy as np

    info = BlockInfo(layout, np.zeros(block_tokens, np.uint32), 0)
    return padded(payload_offset(len(layout.layers), block_tokens) + codec.bound(info))
