"""The settings of a connector, `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.config import StoreConfig
from kvstore.core.arguments import as_folder, check_integer
from kvstore.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """What `kv_connector_extra_config` says.

    Attributes:
        path: the folder of the store.
        config: its settings; those of one that exists are kept where they are part of it.
        load_threads: requests that are loaded at a time.
        least_tokens: nothing shorter is loaded; 0: whole blocks of vLLM are.

    Example:
        >>> Settings.of({"path": "/var/kv", "config": {"disk": {"bytes": 1 << 30}}}).config.disk.bytes
        1073741824
    """

    path: str
    config: StoreConfig
    load_threads: int = 2
    least_tokens: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Check what was given.

        Raises:
            ConfigError: names the setting that is missing, unknown or out of range.
        """
        names = ("path", "config", "load_threads", "least_tokens")
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config: {unknown[0]!r} is not a setting; known are {', '.join(names)}"
            )
        if "path" not in given:
            raise ConfigError("kv_connector_extra_config: path is missing; name the folder of the store")
        store = given.get("config", {})
        if not isinstance(store, Mapping):
            raise ConfigError(f"kv_connector_extra_config: config: expected settings by name, found {store!r}")
        config = StoreConfig.from_mapping(store)
        if not config.disk.bytes:
            raise ConfigError("kv_connector_extra_config: config: disk.bytes is 0, and vLLM's scheduler reads the disk")
        try:
            threads = check_integer("load_threads", given.get("load_threads", cls.load_threads), 1, 64)
            least = check_integer("least_tokens", given.get("least_tokens", cls.least_tokens), 0, 1 << 30)
        except ValueError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from None
        return cls(as_folder(given["path"]), config, threads or 1, least or 0)
