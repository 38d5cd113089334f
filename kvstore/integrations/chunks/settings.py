"""What a plug-in may be told in the settings of its engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kvstore.config import GIB, StoreConfig, TierConfig
from kvstore.errors import ConfigError


@dataclass(frozen=True)
class ChunkSettings:
    """Settings of a plug-in that keeps chunks.

    Attributes:
        path: a folder; stores are made in it.
        disk_gb, host_gb: budgets in GiB, of the chunks of one shape (a model has one, rarely two). Engines have chunks
            in memory themselves, so the default keeps none there.
        codec: of the disk.
        threads: that store and load at a time.

    Raises:
        ConfigError: names the setting that does not fit.

    Example:
        >>> ChunkSettings.of({"path": "/data/kv", "disk_gb": 100}, "params").config().disk.bytes >> 30
        100
    """

    path: str
    disk_gb: float = 64.0
    host_gb: float = 0.0
    codec: str = "auto"
    threads: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f"path: expected the name of a folder, found {self.path!r}")
        for name in ("disk_gb", "host_gb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
                raise ConfigError(f"{name}: expected a number of GiB, found {value!r}")
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or not 1 <= self.threads <= 256:
            raise ConfigError(f"threads: expected an integer from 1 to 256, found {self.threads!r}")

    @classmethod
    def of(cls, params: Any, what: str) -> ChunkSettings:
        """Read an object of settings, which the engine calls `what`."""
        if not isinstance(params, dict) or "path" not in params:
            raise ConfigError(f'{what}: expected an object with "path", the folder of the stores')
        names = [field.name for field in fields(cls)]
        for name in params:
            if name not in names:
                raise ConfigError(f"{what}: {name!r} is not known; expected {', '.join(names)}")
        return cls(**params)

    def config(self) -> StoreConfig:
        """The settings of the stores."""
        host = TierConfig(int(self.host_gb * GIB), "splitzip")
        return StoreConfig(host=host, disk=TierConfig(int(self.disk_gb * GIB), self.codec))
