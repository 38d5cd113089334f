"""The codecs of a store's tiers: from the names in its settings to objects that fit its identity and its disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol

from kvstore.codecs import Codec, auto_name, codec_names
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.predictive.codec import EXACT_MODES
from kvstore.codecs.profile import NO_PROFILE, Profile
from kvstore.codecs.registry import codes_groups
from kvstore.config import PAGE_BYTES, StoreConfig
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.record import padded, payload_offset
from kvstore.errors import ConfigError, ProfileError, UnknownCodec
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.profiles import Profiles

# Codecs that need no profile: what the host tier is coded with, and what stands in for one whose profile is not kept.
_FAST, _PLAIN = "splitzip", "entropy"
_PREDICTED, _SECTION = "predictive", "lossless"  # a codec whose settings nothing but a profile's header decides


class NewCodecs(Protocol):
    """The codecs of new records."""

    @property
    def host(self) -> Codec:
        """Of the host tier."""

    @property
    def disk(self) -> Codec:
        """Of the disk tier."""

    @property
    def donor(self) -> DonorCodec | None:
        """For blocks on disk that are coded against other blocks; None if none are."""


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
        if identity.layout.is_grouped and config.device.bytes:
            raise ConfigError("device.bytes: the device tier does not hold layouts with windows or states; set it to 0")
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


class LateCodecs:
    """The codecs of new records, made when the first block is coded if they need a profile. Thread-safe.

    A profile has tens of megabytes, and a program that only resumes sessions may never code with it. So opening checks
    the settings against the profile's header. What is damaged behind it is found when the first block is coded: the
    blocks are then coded without a profile, which is counted. Codecs whose settings only the profile's numbers can
    check (the lossy ones) are made at once.

    Attributes:
        has_donors: whether blocks are coded against other blocks.
    """

    def __init__(self, config: StoreConfig, identity: ModelIdentity, profiles: Profiles, metrics: Metrics) -> None:
        """Check the settings. Raises as `TierCodecs.of`."""
        self._config, self._identity, self._profiles, self._metrics = config, identity, profiles, metrics
        self._lock = Lock()  # guards _made and _writes
        self._writes = False
        plain = _without_profile(config, identity, profiles)
        made = TierCodecs.of(plain or config, identity, profiles)
        self._plain = made
        self._made = made if plain is None else None
        self.has_donors = made.donor is not None

    def keep(self) -> None:
        """Have the profile copied into the store before anything is coded with it: now if the store has no such copy,
        else when the first block is coded. Only the store's writer may call this."""
        with self._lock:
            self._writes = True
            if self._made is not None:
                self._made = self._made.kept(self._profiles, self._metrics)
            elif not self._profiles.is_kept:
                self._made = self._make()

    def adopt(self, profile: Profile) -> bool:
        """Code with this profile from now on, one of the store's own; it is durable on return.

        Only the store's writer may call this, and only if the settings leave the choice of the disk's codec to us and
        name no profile.

        Returns:
            False if the disk does not keep it, or it does not suit the settings; nothing is changed then.
        """
        with self._lock:
            if not self._profiles.adopt(profile):
                return False
            self._made = TierCodecs.of(self._config, self._identity, self._profiles)
            return True

    @property
    def disk_name(self) -> str:
        """The name of the disk's codec, for which no profile is read."""
        with self._lock:
            return _PREDICTED if self._made is None else self._made.disk.name

    @property
    def host(self) -> Codec:
        return self._all().host

    @property
    def disk(self) -> Codec:
        return self._all().disk

    @property
    def donor(self) -> DonorCodec | None:
        return self._all().donor

    def _all(self) -> TierCodecs:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> TierCodecs:
        if self._profiles.current is None:  # damaged, and counted: its header was good
            self._metrics.add(Metric.FALLBACK_PROFILE)
            return self._plain
        try:
            made = TierCodecs.of(self._config, self._identity, self._profiles)
        except ProfileError as error:
            self._metrics.add(Metric.FALLBACK_PROFILE, because=error)
            return self._plain
        return made.kept(self._profiles, self._metrics) if self._writes else made


def _without_profile(config: StoreConfig, identity: ModelIdentity, profiles: Profiles) -> StoreConfig | None:
    """The settings with `_PLAIN`, which takes as much at most and has donors, too, in place of codecs that a profile's
    header suffices to check; None if there are none, or not they alone."""
    late = False
    found = {}
    for name in ("host", "disk"):
        tier = getattr(config, name)
        codec = tier.codec
        if codec == "auto":
            codec = _FAST if name == "host" else auto_name(profiles.described)
        if codec == _PREDICTED:
            codec, late = _PLAIN, True
        elif codec not in codec_names():
            return None
        found[name] = replace(tier, codec=codec)
    if not late or identity.layout.dtype not in EXACT_MODES:
        return None
    described = profiles.described
    return replace(config, **found) if described is not None and _SECTION in described.sections else None


def _donor(config: StoreConfig, identity: ModelIdentity, profiles: Profiles, plain: Codec) -> DonorCodec | None:
    """None also where the tier's codec was chosen for its speed: a member is read at the pace of its donors."""
    if not plain.exact and config.donor_step is None:
        return None  # what is bit for bit like a donor cannot stand on values that another machine rounds otherwise
    small = plain.takes_donors and identity.layout.dtype == "bfloat16"
    if identity.layout.is_grouped and config.donor_step is not None:
        raise ConfigError("donor_step: layouts with windows or states are not coded against others; leave it out")
    if not (config.donors and config.disk.bytes and small) or identity.layout.is_grouped:
        return None
    if config.donor_step is not None and identity.codec_family == "exact":
        raise ConfigError(
            "donor_step: codes with loss, but the identity says that its caches are exact, and the two must not mix; "
            'open another store with dataclasses.replace(identity, codec_family="lossy")'
        )
    return profiles.donor_encoder(plain, config.donor_step)


def _checked(config: StoreConfig, identity: ModelIdentity, profiles: Profiles, tier: str, name: str) -> Codec:
    layout = identity.layout
    if layout.is_grouped and not codes_groups(name, bool(layout.states)):
        kinds, also = ("states", "") if layout.states else ("windows", "predictive, ")
        raise ConfigError(
            f"{tier}.codec: {name!r} does not code layouts with {kinds}; use {also}entropy, splitzip, zstd or raw"
        )
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
    return padded(payload_offset(layout.sections, block_tokens, has_sums=True) + codec.bound(info))
