"""An engine from a URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from kvstore.errors import ConfigError
from kvstore.tiers.remote.engine import RemoteEngine


def open_engine(url: str, **settings: Any) -> RemoteEngine:
    """Open an engine.

    Args:
        url: `memory:NAME`, `folder:///path`, `valkey://host:port` and more; docs/remote.md tells of each.
        settings: of that engine's class, see its docstring.

    Raises:
        ConfigError: no engine takes that URL or one of the settings.
        RemoteError: the engine could not be opened.

    Example:
        >>> open_engine("memory:example").limits.has_put_if_absent
        True
    """
    parts = urlsplit(url)
    try:
        if parts.scheme == "memory" and parts.path and not parts.netloc:
            from kvstore.tiers.remote.engines.memory import MemoryEngine

            return MemoryEngine(parts.path, **settings)
        if parts.scheme == "folder" and parts.path.startswith("/") and not parts.netloc:
            from kvstore.tiers.remote.engines.folder import FolderEngine

            return FolderEngine(unquote(parts.path), **settings)
        if parts.scheme in ("valkey", "redis", "valkeys", "rediss"):
            from kvstore.tiers.remote.engines.resp.url import open_resp

            return open_resp(url, **settings)
    except TypeError as error:
        raise ConfigError(f"{parts.scheme}: {error}") from error
    raise ConfigError(f"{url!r} names no engine: expected memory:NAME, folder:///path or valkey://host:port")
