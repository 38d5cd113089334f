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


@dataclass(frozen=True)
class TierCodecs:
    """The codecs that the host and disk tiers keep blocks in. Immutable.

    Attributes:
        host, disk: of these tiers.
        donor: for blocks on disk that are coded against other blocks; None if none are.

    Example:
        >>> from kvstore.codecs import codec_by_name
        >>> TierCodecs(host=codec_by_name("splitzip"), disk=codec_by_name("entropy")).disk.name
        'entropy'
    """

    host: Codec
    disk: Codec
    donor: DonorCodec | None = None

    @classmethod
    def of(cls, config: StoreConfig, identity: ModelIdentity, profiles: Profiles) -> TierCodecs:
        """Return the codecs that the settings name.

        Raises:
            ConfigError: a codec is unknown, or lossy although the identity's caches are exact, or its records may not
                fit a segment.
            ProfileError: a codec needs a profile, and there is none.
        """
        host = _FAST if config.host.codec == "auto" else config.host.codec
        disk = _checked(config, identity, profiles, "disk", config.disk.codec)
        donor = _donor(config, identity, profiles, disk)
        return cls(_checked(config, identity, profiles, "host", host), disk, donor)

    def kept(self, profiles: Profiles, metrics: Metrics) -> TierCodecs:
        """Copy the profile that the codecs need into the store, durably, and return the codecs.

        If the disk has no room for it, return codecs that need none, and count that: no record may name a profile that
        is not there.
        """
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
    small = plain.takes_donors and identity.layout.dtype == "bfloat16"
    if not (config.donors and config.disk.bytes and small):
        return None
    if config.donor_step is not None and identity.codec_family == "exact":
        raise ConfigError(
            "donor_step: codes with loss, but the identity says that its caches are exact, and the two must not mix; "
            'open another store with dataclasses.replace(identity, codec_family="lossy")'
        )
    return profiles.donor_encoder(plain, config.donor_step)


def _checked(config: StoreConfig, identity: ModelIdentity, profiles: Profiles, tier: str, name: str) -> Codec:
    try:
        codec = profiles.encoder(name)
    except UnknownCodec as error:
        raise ConfigError(f"{tier}.codec: {error}") from error
    if not codec.exact and identity.codec_family == "exact":
        raise ConfigError(
            f"{tier}.codec: {name!r} is lossy, but the identity says that its caches are exact, and the two must not "
            'mix; open another store with dataclasses.replace(identity, codec_family="lossy")'
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
    """Return the bytes on disk, whole pages, of the largest record of a full block."""
    import numpy as np

    info = BlockInfo(layout, np.zeros(block_tokens, np.uint32), 0)
    return padded(payload_offset(len(layout.layers), block_tokens) + codec.bound(info))
