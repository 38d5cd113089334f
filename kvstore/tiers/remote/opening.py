"""An engine from a URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from kvstore.errors import ConfigError
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.engines.faulty import FaultPlan, FaultyEngine


def open_engine(url: str, *, faults: FaultPlan | None = None, make: bool = True, **settings: Any) -> RemoteEngine:
    """Open an engine.

    Args:
        url: `memory:NAME`, `folder:///path`, `valkey://host:port` and more; docs/remote.md tells of each.
        faults: what shall go wrong, for tests and drills.
        make: whether a folder that is missing is made; it is refused otherwise.
        settings: of that engine's class, see its docstring.

    Raises:
        ConfigError: no engine takes that URL or one of the settings, or there is no such folder.
        RemoteError: the engine could not be opened.

    Example:
        >>> open_engine("memory:example").limits.has_put_if_absent
        True
    """
    try:
        engine = _open(url, make, settings)
    except TypeError as error:
        raise ConfigError(f"{url.partition(':')[0]}: {error}") from error
    return engine if faults is None else FaultyEngine(engine, faults)


def _open(url: str, make: bool, settings: dict[str, Any]) -> RemoteEngine:
    parts = urlsplit(url)
    if parts.scheme == "memory" and parts.path and not parts.netloc:
        from kvstore.tiers.remote.engines.memory import MemoryEngine

        return MemoryEngine(parts.path, **settings)
    if parts.scheme == "folder":
        if not url.partition(":")[2].startswith("///"):
            raise ConfigError(
                f"{url!r}: the path must be absolute, behind three slashes, such as folder:///mnt/shared/kv"
            )
        from kvstore.tiers.remote.engines.folder import FolderEngine

        return FolderEngine(unquote(parts.path), make=make, **settings)
    if parts.scheme.removesuffix("+cluster") in ("valkey", "redis", "valkeys", "rediss"):
        from kvstore.tiers.remote.engines.resp.url import open_resp

        return open_resp(url, **settings)
    if parts.scheme == "s3":
        try:
            from kvstore.tiers.remote.engines.s3 import open_s3
        except ImportError as error:
            raise ConfigError(f"s3:// needs the extra `remote`, pip install kvstore-lm[remote]: {error}") from error
        return open_s3(url, **settings)
    if parts.scheme == "mooncake":
        try:
            from kvstore.tiers.remote.engines.mooncake import open_mooncake
        except ImportError as error:
            raise ConfigError(
                "mooncake:// needs the extra `mooncake`, pip install kvstore-lm[mooncake], and libibverbs of the "
                f"system: {error}"
            ) from error
        return open_mooncake(url, **settings)
    raise ConfigError(
        f"{parts.scheme!r} names no engine: expected memory:NAME, folder:///path, valkey://host:port, s3://bucket, "
        "mooncake://host:port"
    )
