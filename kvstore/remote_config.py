"""Settings of the remote tier. Sizes are bytes, times are seconds; everything is bounded by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from kvstore.errors import ConfigError
from kvstore.setting_checks import check_seconds, check_whole, sizes_read

UPLOADS = ("second use", "eviction", "put")
PROMOTIONS = ("first", "second")


@dataclass(frozen=True)
class RemoteConfig:
    """A tier on other machines, which stores of the same identity share (docs/remote.md). Immutable.

    Attributes:
        url: which server, and how to reach it: "valkey://host:6379", "s3://bucket", "folder:///path".
        deadline_s: a get waits no longer for what the remote tier has; what is not there by then is a miss. Where the
            gate knows that computing the rest takes less, it waits no longer than that.
        ttl_s: values may be removed by the server so long after their last use; 0: when it likes.
        upload: what is written there. "second use": blocks that are used again after they were put. "eviction":
            blocks that the disk gives up. "put": every block, once it is on disk.
        promote: blocks that came from there are kept in this store at their "first" read, or at their "second".
        read_only: write nothing there.
        erase: what is erased here (`delete(..., erase=True)`) is removed there, too. False: it stays there until its
            time is over.
        queue_bytes: bytes of records that may wait to be written there; what is more is dropped, and counted.
        in_flight: how many values are read at once.
        write_timeout_s: one value may take so long to be written.
        flush_timeout_s: `flush(remote=True)` waits no longer.
        close_timeout_s: closing the store waits no longer for values that are due.
        belief_s: what was there is taken to be there for so long without asking.
        miss_s: what was not there is taken not to be there for so long.
        list_s: list the names of all values every so many seconds; what was not there is not asked for. A value that
            another store wrote since is at worst a miss for twice as long. 0: never list; each get asks. At least 1.
        follow: let the server tell of every value that others write, remove or evict, so that nothing old is believed
            (one server of Valkey or Redis; each store then hears of all writes).
        key: a fleet key: 32 bytes, or the path of a file that holds them or their 64 hex digits. Values are sealed with
            it, and what is not is a miss. None: records as they are, which whoever may write to the server may forge.
        settings: of the engine, by name; see docs/remote.md.

    Raises:
        ConfigError: a setting is out of range or has the wrong type.

    Example:
        >>> RemoteConfig("folder:///mnt/shared", deadline_s=0.5).upload
        'second use'
    """

    url: str
    deadline_s: float = 1.0
    ttl_s: float = 7 * 86400.0
    upload: Literal["second use", "eviction", "put"] = "second use"
    promote: Literal["first", "second"] = "first"
    read_only: bool = False
    erase: bool = True
    queue_bytes: int = 256 << 20
    in_flight: int = 8
    write_timeout_s: float = 5.0
    flush_timeout_s: float = 30.0
    close_timeout_s: float = 2.0
    belief_s: float = 30.0
    miss_s: float = 2.0
    list_s: float = 0.0
    follow: bool = False
    key: bytes | Path | None = field(default=None, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or ":" not in self.url:
            raise ConfigError(f"remote.url: expected a URL such as 'valkey://host:6379', found {self.url!r}")
        for name in ("deadline_s", "write_timeout_s"):
            check_seconds(f"remote.{name}", getattr(self, name), above=True)
        for name in ("ttl_s", "flush_timeout_s", "close_timeout_s", "belief_s", "miss_s", "list_s"):
            check_seconds(f"remote.{name}", getattr(self, name))
        if 0 < self.list_s < 1:
            raise ConfigError(f"remote.list_s: expected 0 or at least 1 second, found {self.list_s!r}")
        if self.upload not in UPLOADS:
            raise ConfigError(f"remote.upload: expected one of {', '.join(UPLOADS)}, found {self.upload!r}")
        if self.promote not in PROMOTIONS:
            raise ConfigError(f"remote.promote: expected one of {', '.join(PROMOTIONS)}, found {self.promote!r}")
        for name in ("read_only", "erase", "follow"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"remote.{name}: expected True or False, found {getattr(self, name)!r}")
        check_whole("remote.queue_bytes", self.queue_bytes, 1, 1 << 60)
        check_whole("remote.in_flight", self.in_flight, 1, 256)
        given: object = self.key
        if isinstance(given, str):
            given = Path(given)
            object.__setattr__(self, "key", given)
        if not isinstance(given, bytes | Path | None):
            raise ConfigError(f"remote.key: expected bytes or the path of a file, found {type(given).__name__}")
        if not isinstance(self.settings, Mapping):
            raise ConfigError(f"remote.settings: expected a table, found {self.settings!r}")

    @classmethod
    def from_mapping(cls, table: object, base: RemoteConfig | None = None) -> RemoteConfig | None:
        """Build the settings from a table, as read from TOML; what is missing is as in `base`.

        Raises:
            ConfigError: a name is unknown, or a value does not fit.
        """
        if table is None or isinstance(table, RemoteConfig):
            return table
        if not isinstance(table, Mapping):
            raise ConfigError(f"remote: expected a table with a url, found {table!r}")
        known = {f.name for f in fields(cls)}
        if unknown := set(table) - known:
            raise ConfigError(f"remote.{min(unknown)}: unknown setting; known are {', '.join(sorted(known))}")
        if base is None and "url" not in table:
            raise ConfigError("remote.url: missing; it says which server, such as 'valkey://host:6379'")
        read = sizes_read(table, "remote.")
        return cls(**read) if base is None else replace(base, **read)
