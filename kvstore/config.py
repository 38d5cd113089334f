"""Settings of a store. Sizes are bytes, times are seconds; every budget is bounded by default."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from kvstore.errors import ConfigError
from kvstore.remote_config import RemoteConfig
from kvstore.setting_checks import check_seconds, check_whole, sizes_read

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE_BYTES = 4096
MIN_SEGMENT_BYTES = 16 * PAGE_BYTES
_SESSION_SHARE = 8
_MOST_RATE = 1e12
_FLAGS = {"0": False, "false": False, "1": True, "true": True}  # in the environment
_MOST_PINNED = 0.9  # otherwise there might be no space for anything else


@dataclass(frozen=True)
class TierConfig:
    """The settings of one tier.

    Attributes:
        bytes: its budget; 0 turns the tier off.
        codec: name of the codec in which it keeps blocks; "auto": the one that suits the tier, see `StoreConfig`.

    Example:
        >>> TierConfig(2 * GIB, "splitzip").bytes
        2147483648
    """

    bytes: int
    codec: str = "auto"


@dataclass(frozen=True)
class TenantConfig:
    """What one namespace may take, and what others must leave it (docs/tenants.md).

    Attributes:
        quota_bytes: the most bytes of records that it may have on disk; beyond it, it gives up its own. None: any.
        reserved_bytes: so many bytes of its records on disk are never evicted for what other namespaces put.
        host_quota_bytes, host_reserved_bytes: the same of host memory.

    Raises:
        ConfigError: a number is out of range, or more is reserved than the quota allows.

    Example:
        >>> TenantConfig(quota_bytes=2 * GIB, reserved_bytes=1 * GIB).reserved_bytes
        1073741824
    """

    quota_bytes: int | None = None
    reserved_bytes: int = 0
    host_quota_bytes: int | None = None
    host_reserved_bytes: int = 0

    def __post_init__(self) -> None:
        for tier in ("", "host_"):
            quota, reserved = getattr(self, f"{tier}quota_bytes"), getattr(self, f"{tier}reserved_bytes")
            check_whole(f"tenants: {tier}reserved_bytes", reserved, 0, 1 << 60)
            if quota is not None:
                check_whole(f"tenants: {tier}quota_bytes", quota, 1, 1 << 60)
                if reserved > quota:
                    raise ConfigError(f"tenants: {tier}reserved_bytes: {reserved} is above {tier}quota_bytes, {quota}")


@dataclass(frozen=True)
class StoreConfig:
    """All settings of a `KVStore`; immutable, checked when made.

    Attributes:
        device: blocks kept on the device they came from, "raw" ("auto" is that) or coded there by "splitzip". Off by
            default, because on a CPU it would repeat the host tier.
        host: encoded records in host memory (pinned if CUDA is present).
        disk: everything in the folder of the store, as the file system has it allocated: segments, catalog, sessions,
            profiles, locks and folders. A store needs room for three segments beside the rest; 0 for a store in memory.
        session_bytes: what the names and tokens of all sessions may take of the disk's budget; if they take more, those
            that were used least recently are forgotten. None: an eighth of it (in memory, of the host's and device's).
        block_tokens: tokens of a block, the unit of storage and sharing; 1 to 4096. A store that exists keeps its own.
        segment_bytes: the most that one preallocated file of the disk tier takes; a multiple of 4096. A new store takes
            smaller ones where its budget is less than 128 of these, a store that exists keeps its own.
        open_segments: how many files of the disk tier stay open, but no more than a quarter of the descriptors that the
            process may have.
        group_bytes: the writing thread makes this many bytes durable with one sync.
        write_queue_bytes: raw bytes that `put` may leave unwritten before it waits. As much memory as puts, and gets,
            had in use at once stays for half a minute, each up to this.
        put_timeout_s: seconds that `put` waits for space in that queue before it drops the blocks (counted).
        exit_timeout_s: seconds that the end of the program waits for what is not written yet, where the store is still
            open then. What is not written by then is lost, and logged.
        durability: "flush": durable when flush() returns. "put": durable when put() returns.
        eviction: the policy by which device, host and disk choose what they give up when they are full. "lru": the
            least recently used. "lfu": the least often used. "s3fifo": S3-FIFO, which lets a scan of new sequences pass
            by. "arc": ARC, recency and frequency in shares that follow what comes back. "prior": what is expected to
            save least, as learnt from the uses so far: the chance that it is used again x what computing it takes /
            bytes. "adaptive": whichever of "prior", "arc" and "s3fifo" would have saved most lately. An unknown name
            raises `ConfigError` when the store is opened. In memory each tier needs, for a record it holds, about 0.1
            KB ("lru"), 0.4 KB ("lfu"), 0.7 KB ("s3fifo", "arc"), 0.6 to 4 KB ("prior", which remembers what left) or 3
            to 7 KB ("adaptive"); the disk with "lru" needs nothing. Another policy than "lru" takes 5 to 60
            microseconds for each block that is used, and for each that opening found, spread over later calls. How
            often blocks were used is known again when a store is opened; what else was learnt, and what left, is
            forgotten when it is closed.
        namespaces: if not empty, the only namespaces accepted, as bytes; text that is given becomes its UTF-8 bytes.
        tenants: quotas and reservations by namespace; text that is given becomes its UTF-8 bytes. All reservations must
            fit the disk, or the host tier: `ConfigError` when the store is opened. With tenants the disk needs about
            0.3 KB of memory more for a record (docs/tenants.md).
        threads: worker threads that read and decode.
        pinned_share: pinned sequences may take this share of what the disk can hold (of host or device, whichever is
            larger, in a store without a disk); 0 to 0.9. A pin beyond it is refused, and `PutResult.pinned` says so.
        state_every: of models with windows or states, `integrations.transformers.generate` computes a prompt in pieces
            that end at every so many tokens, and puts the cache there, too, so that prompts which begin alike can go on
            from there; best a multiple of block_tokens. Each such place takes the full size of the states, and the
            tokens of the windows. 0: a prompt without its last token, and the ends of puts, are such places.
        score_prompts: the transformers integration computes the model's log-probabilities of prompts, too, and stores
            them with the tokens, as it does with those of answers. It takes one product with the output embedding more
            for each token (docs/probabilities.md); caches and answers stay the same. False: such tokens count 16 bits.
        gate: "auto": a get leaves out what is expected to be computed sooner than loaded, as soon as it is known what
            computing takes (docs/gate.md). "off": only where `KVStore.get(gate=True)` asks for it.
        prefill_tokens_per_s: how many tokens the model computes in a second, for the gate of a program that does not
            observe it; what is observed counts instead. 0: not known.
        slow_call_s: a put, get, delete or flush that takes more seconds is counted and logged; 0 for none.
        profile: a file that `kvstore calibrate` made for the model. The store keeps a copy of what it coded with, and
            continues with the newest copy if no file is named.
        learn: "auto": fit a profile to the blocks that the store itself holds, in idle time, on one thread of the
            lowest priority; adopt it if blocks that were kept back take at least 5 % less, and write cold records anew
            with it (docs/learning.md). Has an effect if the disk's codec is "auto", no profile is named, and the caches
            are exact, of bfloat16, without windows or states. "off": only when `KVStore.learn` asks for it.
        donors: code blocks on disk as the difference from stored blocks with the same tokens, wherever those stand.
            Has an effect if the disk's codec is "predictive" or "entropy"; `get(approximate=...)` needs it.
        donor_step: code such blocks with loss, in steps of this share of the size of the values (0.5 is a good one);
            only for identities whose codec_family is not "exact". None: bit for bit.
        exact_recent_tokens: with a lossy codec of the disk, the last so many tokens of a sequence stay exact there, in
            whole blocks coded by "entropy"; when the sequence is put with so many tokens more, they are coded with
            loss. 128 is a good one (docs/choosing.md). 0: none. Goes with no `donor_step`.
        remote: a tier on other machines, shared with other stores of the same identity (docs/remote.md). None: no such
            tier.

    Codecs of host and disk: "raw", "splitzip" (the fastest), "entropy" (a seventh smaller, some milliseconds
    slower), "zstd"; with a profile also "predictive" (or a level of it, from fast to small: "predictive:1" to
    "predictive:3"), and the lossy "predictive@0.75" (bits a value) and "aqua@2" (3, 4); without one the lossy "tsc" (or
    "tsc@16": tokens from keyframe to keyframe). "auto" is splitzip for the host tier; for the disk it is predictive if
    there is a profile that has it, else entropy.

    Raises:
        ConfigError: names the setting that is out of range or has the wrong type.

    Example:
        >>> config = StoreConfig(host=TierConfig(512 * MIB), disk=TierConfig(64 * GIB), threads=4)
        >>> config.disk.codec, config.block_tokens
        ('auto', 64)
        >>> StoreConfig.from_mapping({"disk": {"codec": "zstd"}}).disk
        TierConfig(bytes=8589934592, codec='zstd')
    """

    device: TierConfig = TierConfig(0, "raw")
    host: TierConfig = TierConfig(1 * GIB, "splitzip")
    disk: TierConfig = TierConfig(8 * GIB, "auto")
    session_bytes: int | None = None
    block_tokens: int = 64
    segment_bytes: int = 64 * MIB
    open_segments: int = 256
    group_bytes: int = 64 * MIB
    write_queue_bytes: int = 512 * MIB
    put_timeout_s: float = 30.0
    exit_timeout_s: float = 30.0
    durability: Literal["flush", "put"] = "flush"
    namespaces: tuple[bytes, ...] = ()
    threads: int = 2
    profile: Path | None = None
    learn: Literal["auto", "off"] = "auto"
    donors: bool = True
    eviction: str = "lru"
    donor_step: float | None = None
    exact_recent_tokens: int = 0
    state_every: int = 0
    score_prompts: bool = False
    slow_call_s: float = 10.0
    gate: Literal["auto", "off"] = "auto"
    prefill_tokens_per_s: float = 0.0
    pinned_share: float = 0.5
    tenants: Mapping[bytes, TenantConfig] = field(default_factory=dict, hash=False)
    remote: RemoteConfig | None = None

    def __post_init__(self) -> None:
        for tier in ("device", "host", "disk"):
            value = getattr(self, tier)
            if not isinstance(value, TierConfig):
                raise ConfigError(f"{tier}: expected a TierConfig, found {type(value).__name__}")
            check_whole(f"{tier}.bytes", value.bytes, 0, 1 << 60)
            if not isinstance(value.codec, str) or not value.codec:
                raise ConfigError(f"{tier}.codec: expected a codec's name, found {value.codec!r}")
        if self.device.codec not in ("auto", "raw", "splitzip"):
            raise ConfigError(f"device.codec: expected 'auto', 'raw' or 'splitzip', found {self.device.codec!r}")
        if self.device.codec == "auto":
            object.__setattr__(self, "device", TierConfig(self.device.bytes, "raw"))
        if self.session_bytes is not None:
            check_whole("session_bytes", self.session_bytes, 0, 1 << 60)
        check_whole("block_tokens", self.block_tokens, 1, 4096)
        check_whole("state_every", self.state_every, 0, 1 << 30)
        check_whole("segment_bytes", self.segment_bytes, MIN_SEGMENT_BYTES, 1 << 32, multiple=PAGE_BYTES)
        check_whole("open_segments", self.open_segments, 1, 1 << 20)
        check_whole("group_bytes", self.group_bytes, 1, 1 << 32)
        check_whole("write_queue_bytes", self.write_queue_bytes, 1, 1 << 60)
        check_whole("threads", self.threads, 1, 256)
        check_seconds("put_timeout_s", self.put_timeout_s)
        check_seconds("slow_call_s", self.slow_call_s)
        rate = self.prefill_tokens_per_s
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= _MOST_RATE:
            raise ConfigError(f"prefill_tokens_per_s: expected 0 to {_MOST_RATE:g}, found {rate!r}")
        if self.gate not in ("auto", "off"):
            raise ConfigError(f"gate: expected 'auto' or 'off', found {self.gate!r}")
        share = self.pinned_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= _MOST_PINNED:
            raise ConfigError(f"pinned_share: expected 0 to {_MOST_PINNED}, found {share!r}")
        check_seconds("exit_timeout_s", self.exit_timeout_s)
        if self.durability not in ("flush", "put"):
            raise ConfigError(f"durability: expected 'flush' or 'put', found {self.durability!r}")
        if self.learn not in ("auto", "off"):
            raise ConfigError(f"learn: expected 'auto' or 'off', found {self.learn!r}")
        if not isinstance(self.eviction, str) or not self.eviction:
            raise ConfigError(f"eviction: expected a policy's name, found {self.eviction!r}")
        if self.profile is not None and not isinstance(self.profile, Path):
            raise ConfigError(f"profile: expected a Path, found {self.profile!r}")
        for name in ("donors", "score_prompts"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected True or False, found {getattr(self, name)!r}")
        if self.donor_step is not None:
            number = isinstance(self.donor_step, int | float) and not isinstance(self.donor_step, bool)
            if not number or not 2**-10 <= self.donor_step <= 2**10:
                raise ConfigError(f"donor_step: expected None or 2**-10 to 2**10, found {self.donor_step!r}")
        check_whole("exact_recent_tokens", self.exact_recent_tokens, 0, 1 << 30)
        if self.exact_recent_tokens and self.donor_step is not None:
            raise ConfigError(
                "exact_recent_tokens: what is coded against blocks in steps would change when these are coded with "
                "loss; leave out donor_step, or exact_recent_tokens"
            )
        if not isinstance(self.namespaces, tuple):
            raise ConfigError(f"namespaces: expected a tuple, found {self.namespaces!r}")
        object.__setattr__(self, "namespaces", tuple(_namespace("namespaces", name) for name in self.namespaces))
        object.__setattr__(self, "tenants", _checked_tenants(self))
        if self.remote is not None and not isinstance(self.remote, RemoteConfig):
            raise ConfigError(f"remote: expected a RemoteConfig, found {type(self.remote).__name__}")

    @property
    def most_session_bytes(self) -> int:
        """What sessions may take, in bytes."""
        if self.session_bytes is not None:
            return self.session_bytes
        return (self.disk.bytes or self.host.bytes + self.device.bytes) // _SESSION_SHARE

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> StoreConfig:
        """Build a config from nested settings, as read from TOML.

        Args:
            settings: names and values; a tier is a table with `bytes` and `codec`. What is missing has its default.
                Sizes are numbers of bytes, or text such as "8GiB".

        Raises:
            ConfigError: a name is unknown, or a value does not fit.
        """
        return _merge(cls(), settings)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> StoreConfig:
        """Read the table `[kvstore]` of a TOML file, or the whole file if it has no such table.

        Raises:
            ConfigError: the file cannot be read, a name is unknown, or a value does not fit.
        """
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{os.fspath(path)}: cannot be read as TOML: {error}") from error
        table = document.get("kvstore", document)
        if not isinstance(table, dict):
            raise ConfigError(f"{os.fspath(path)}: kvstore: expected a table")
        return cls.from_mapping(table)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, prefix: str = "KVSTORE_", base: StoreConfig | None = None
    ) -> StoreConfig:
        """Read `KVSTORE_HOST_BYTES`, `KVSTORE_DISK_CODEC`, `KVSTORE_THREADS`, ... from the environment.

        Args:
            environ: names and values; default is the environment of the process. `KVSTORE_NAMESPACES` is a list
                separated by commas, `KVSTORE_TENANTS` a JSON object: `{"ann": {"quota_bytes": 1000000}}`. Sizes are
                numbers of bytes, or text such as `8GiB`.
            prefix: what the names begin with.
            base: the settings of everything that is not named; default is `StoreConfig()`.

        Raises:
            ConfigError: a value does not fit, or a name with this prefix is unknown. `KVSTORE_CPU` and
                `KVSTORE_SANITIZE` are skipped; they belong to the C++ core and its build.

        Example:
            >>> StoreConfig.from_env({"KVSTORE_HOST_BYTES": "1048576", "KVSTORE_THREADS": "4"}).threads
            4
        """
        environ = os.environ if environ is None else environ
        settings: dict[str, Any] = {}
        for name, text in environ.items():
            key = name.removeprefix(prefix).lower()
            if not name.startswith(prefix) or name in ("KVSTORE_CPU", "KVSTORE_SANITIZE"):
                continue
            tier, _, rest = key.partition("_")
            if tier in ("device", "host", "disk", "remote") and rest:
                table = settings.setdefault(tier, {})
                if isinstance(table, dict):  # else the bare name of the tier was set too, which is refused below
                    is_flag = rest in ("read_only", "erase", "follow")
                    table[rest] = _FLAGS.get(text.lower(), _number(text)) if is_flag else _number(text)
            elif key == "profile":
                settings[key] = text
            elif key in ("donors", "score_prompts"):
                settings[key] = _FLAGS.get(text.lower(), text)
            elif key == "namespaces":
                settings[key] = [part for part in text.split(",") if part]
            elif key == "tenants":
                settings[key] = _json(name, text)
            elif key in _known(cls):
                settings[key] = _number(text)
            else:
                raise ConfigError(
                    f"{name}: {_unknown(key)}; what is none needs another name, or give from_env another prefix"
                )
        return _merge(base or cls(), settings)


def _known(kind: Any) -> set[str]:
    return {f.name for f in fields(kind)}


def _unknown(key: str) -> str:
    return f"{key}: unknown setting; known are {', '.join(sorted(_known(StoreConfig)))}"


def _merge(base: StoreConfig, settings: Mapping[str, Any]) -> StoreConfig:
    changes: dict[str, Any] = {}
    for key, value in sizes_read(settings).items():
        if key not in _known(StoreConfig):
            raise ConfigError(_unknown(key))
        if key in ("device", "host", "disk"):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key}: expected a table with bytes and codec, found {value!r}")
            unknown = set(value) - {"bytes", "codec"}
            if unknown:
                raise ConfigError(f"{key}.{min(unknown)}: unknown setting; known are bytes, codec")
            changes[key] = replace(getattr(base, key), **sizes_read(value, f"{key}."))
        elif key == "namespaces":
            if not isinstance(value, list | tuple):
                raise ConfigError(f"namespaces: expected a list, found {value!r}")
            changes[key] = tuple(value)
        elif key == "tenants":
            changes[key] = _tenants(value)
        elif key == "profile":
            changes[key] = Path(value) if isinstance(value, str) else value
        elif key == "remote":
            changes[key] = RemoteConfig.from_mapping(value, base.remote)
        else:
            changes[key] = value
    return replace(base, **changes)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: expected a JSON object, found {text:.100}: {error}") from error


def _tenants(value: object) -> dict[Any, Any]:
    """Tables of settings by namespace, as tenants."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"tenants: expected a table by namespace, found {value!r}")
    known, made = _known(TenantConfig), {}
    for name, table in value.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"tenants.{name}: expected a table of settings, found {table!r}")
        if unknown := set(table) - known:
            raise ConfigError(f"tenants.{name}.{min(unknown)}: unknown setting; known are {', '.join(sorted(known))}")
        made[name] = TenantConfig(**sizes_read(table, f"tenants.{name}."))
    return made


def _checked_tenants(config: StoreConfig) -> dict[bytes, TenantConfig]:
    """The tenants by the bytes of their namespaces. Raises `ConfigError` where they do not fit the other settings."""
    given: object = config.tenants
    if not isinstance(given, Mapping) or not all(isinstance(tenant, TenantConfig) for tenant in given.values()):
        raise ConfigError(f"tenants: expected a mapping of namespaces to TenantConfig, found {given!r}")
    tenants = {_namespace("tenants", name): tenant for name, tenant in given.items()}
    if strangers := set(tenants) - set(config.namespaces or tenants):
        raise ConfigError(f"tenants: {min(strangers)!r} is not one of the configured namespaces")
    for tier, prefix, budget in (("disk", "", config.disk.bytes), ("host", "host_", config.host.bytes)):
        reserved = sum(getattr(tenant, f"{prefix}reserved_bytes") for tenant in tenants.values())
        quotas = any(getattr(tenant, f"{prefix}quota_bytes") is not None for tenant in tenants.values())
        if not budget and (reserved or quotas):
            raise ConfigError(f"tenants: {prefix}quota_bytes and {prefix}reserved_bytes need {tier}.bytes above 0")
        if reserved > budget:
            raise ConfigError(f"tenants: {prefix}reserved_bytes: {reserved} in all, above {tier}.bytes, {budget}")
    return tenants


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _namespace(setting: str, name: object) -> bytes:
    try:
        encoded = name.encode() if isinstance(name, str) else name
    except UnicodeEncodeError as error:
        raise ConfigError(f"{setting}: expected text that UTF-8 can hold, found {name!r}") from error
    if not isinstance(encoded, bytes):
        raise ConfigError(f"{setting}: expected namespaces as text or bytes, found {name!r}")
    return encoded


def as_config(given: Any) -> StoreConfig:
    """Return the settings that a store is opened with; the default ones for None.

    Raises:
        ConfigError: they are something else; the message says how to make them.
    """
    if given is not None and not isinstance(given, StoreConfig):
        raise ConfigError(
            f"config: expected a StoreConfig, found a {type(given).__name__}; write "
            "StoreConfig(disk=TierConfig(bytes)), or StoreConfig.from_mapping(settings) for nested dicts"
        )
    return given or StoreConfig()
