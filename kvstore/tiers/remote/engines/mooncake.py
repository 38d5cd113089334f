"""Values in the memory of a Mooncake store, through its library."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from mooncake.store import MooncakeDistributedStore

from kvstore.config import MIB
from kvstore.errors import ConfigError, RemoteError, RemoteFull, RemoteRefused, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engine import RemoteLimits
from kvstore.tiers.remote.engines.counts import Counts
from kvstore.tiers.remote.engines.threads import Threads
from kvstore.tiers.remote.engines.url import parse_engine_url
from kvstore.tiers.remote.engines.writing import counted_put
from kvstore.tiers.remote.keys import check_keys, check_prefix, is_key
from kvstore.tiers.remote.values import too_large

T = TypeVar("T")
_MISSING, _NO_ROOM, _TOO_SMALL = -704, -200, -600  # codes of the library: a key, memory on nodes, our own memory
_MARK = b"\x01"  # before each value: the library keeps none of no bytes
_TRIAL_S = 10.0
_TRIAL = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
local, metadata, segment, _, *how = json.loads(sys.argv[1])
os._exit(1 if MooncakeDistributedStore().setup(local, metadata, segment, 1 << 20, *how) else 0)
"""
_NULL = subprocess.DEVNULL
_MOST_LISTED = 1 << 30  # bytes of a list of keys
_NOW = True  # though a lease lasts: that is for readers of addresses, and ours are given copies


class MooncakeEngine:
    """A `RemoteEngine` in a Mooncake store: `mooncake://MASTER:PORT`.

    Values lie in the memory of the nodes of that store; this engine adds none to it. The library blocks for seconds
    where a node or the master is gone; so its calls run in threads, 16 of which can hang before all calls are late.
    At first use it is tried in a process of its own, which takes a second. It does not say whether a value was there
    already: a write looks first, and of two writers at once both may say that they wrote, while the first value
    stays. Nothing expires: the master evicts. Needs the extra `mooncake`.

    Args:
        master: "host:port" of `mooncake_master`.
        metadata: where nodes find each other: "P2PHANDSHAKE", or a URL as nodes have it.
        local: the name or address by which nodes reach this machine; default: that of its way to the master.
        admin: URL of the master's HTTP port, for `list`, which the library lacks.
        protocol, devices: "tcp", or "rdma" and the names of its devices.
        buffer_bytes: memory for values on their way.
        max_value_bytes: see `RemoteLimits`.
    """

    def __init__(
        self,
        master: str,
        *,
        metadata: str = "P2PHANDSHAKE",
        local: str | None = None,
        admin: str | None = None,
        protocol: str = "tcp",
        devices: str = "",
        buffer_bytes: int = 256 * MIB,
        max_value_bytes: int = 64 * MIB,
    ) -> None:
        if max_value_bytes + len(_MARK) > buffer_bytes:
            raise ConfigError(f"buffer_bytes: expected more than max_value_bytes ({max_value_bytes})")
        self._master, self._admin, self._local = master, admin, local
        self._how = (metadata, 0, buffer_bytes, protocol, devices, master)
        self._name = f"mooncake:{master}"
        self._counts = Counts()
        self._threads = Threads(f"kvstore-{self._name}", most=16)
        self._limits = RemoteLimits(max_value_bytes, exist_batch=512, has_put_if_absent=False)
        self._client: Any = None
        self._closed = False
        self._opening = threading.Lock()

    @property
    def limits(self) -> RemoteLimits:
        return self._limits

    def endpoint(self, key: str) -> str:
        return self._name

    def get_into(self, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        check_keys(key)
        with self._counts.call():
            value = self._threads.run(lambda: self._get(key), Deadline(timeout_s))
            if value is None:
                return None
            size = value.nbytes
            if size > buffer.nbytes:
                raise too_large(size, buffer.nbytes)
            buffer.cast("B")[:size] = value
            self._counts.add(bytes_read=size)
            return size

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        timeout_s: float,
        ttl_s: float | None = None,
        over: bool = False,
    ) -> bool:
        def write(views: list[memoryview], deadline: Deadline) -> bool:
            # A copy: after the deadline the library may still read, and the parts are the caller's again.
            value = b"".join([_MARK, *views])
            return self._threads.run(lambda: self._put(key, value, over), deadline)

        return counted_put(self._counts, key, parts, self._limits.max_value_bytes, timeout_s, write)

    def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        check_keys(*keys)
        with self._counts.call():
            found = self._threads.run(lambda: self._exist(list(keys)), Deadline(timeout_s))
            unknown = sum(code < 0 for code in found)
            if unknown and unknown == len(keys):
                raise self._failed("exist", min(found))
            self._counts.add(exist_unknown=unknown)
            return [code == 1 for code in found]

    def touch(self, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None:
        check_keys(*keys)

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        check_keys(*keys)
        with self._counts.call():
            return self._threads.run(lambda: self._delete(list(keys)), Deadline(timeout_s))

    def list(self, prefix: str, timeout_s: float) -> Iterator[str]:
        check_prefix(prefix)
        with self._counts.call():
            deadline = Deadline(timeout_s)
            names = self._threads.run(lambda: self._names(deadline.left_s()), deadline)
        yield from (name for name in names if name.startswith(prefix) and is_key(name))

    def stats(self) -> Mapping[str, float]:
        return self._counts.values()

    def close(self) -> None:
        self._closed = True
        self._threads.close()
        client, self._client = self._client, None
        if client is not None:
            # It may hang where the master is gone, and nobody waits for it then.
            threading.Thread(target=client.close, name=f"{self._name}-close", daemon=True).start()

    # ---- in threads ----------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        """The client; opened at first use, and again at the next if the master was not there."""
        with self._opening:
            self._check_open()
            if self._client is None:
                local = self._local or _way_to(self._master)
                self._try(local)
                client = MooncakeDistributedStore()
                code = client.setup(local, *self._how)
                if code:
                    raise self._failed("setup", code)
                self._check_open(client)  # this can take a minute
                self._client = client
            return self._client

    def _check_open(self, client: Any = None) -> None:
        """Raises `RemoteUnavailable` after `close`; a client that was opened meanwhile ends."""
        if self._closed:
            if client is not None:
                client.close()
            raise RemoteUnavailable(f"{self._name} was closed")

    def _try(self, local: str) -> None:
        """Opens a client in a process of its own: without an answer of the master the library would hold Python's lock,
        and with it all threads, for minutes."""
        command = [sys.executable, "-c", _TRIAL, json.dumps([local, *self._how])]
        try:
            done = subprocess.run(command, timeout=_TRIAL_S, stdin=_NULL, stdout=_NULL, stderr=_NULL, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RemoteUnavailable(f"{self._name}: {error}") from error
        if done.returncode:
            raise self._failed("setup", -done.returncode)

    def _get(self, key: str) -> memoryview | None:
        client = self._open()
        found = client.get_buffer(key)
        if found is None:
            code = client.is_exist(key)
            if code:  # a node that is gone takes its values along, and the master may not know it yet
                raise self._failed("get", code) if code < 0 else self._lost(key)
            return None
        value = memoryview(found).cast("B")
        if value[: len(_MARK)] != _MARK:
            raise RemoteRefused(f"{self._name}: {key} was not written by this engine")
        return value[len(_MARK) :]

    def _put(self, key: str, value: bytes, over: bool) -> bool:
        if over:
            self._delete([key])  # it has no call that does both
        client = self._open()
        there = client.is_exist(key)
        if there:
            if there < 0:
                raise self._failed("exist", there)
            return False
        code = client.put(key, value)
        if code:
            raise self._failed("put", code)
        return True

    def _exist(self, keys: Sequence[str]) -> Sequence[int]:
        found: Sequence[int] = self._open().batch_is_exist(keys) if keys else []
        return found

    def _delete(self, keys: Sequence[str]) -> int:
        codes = self._open().batch_remove(keys, _NOW) if keys else []
        worst = min((code for code in codes if code != _MISSING), default=0)
        if worst < 0:
            raise self._failed("remove", worst)
        return sum(code == 0 for code in codes)

    def _names(self, timeout_s: float) -> Sequence[str]:
        if self._admin is None:
            raise RemoteRefused(f"{self._name}: to list keys needs ?admin=URL, the HTTP port of the master")
        try:
            with urllib.request.urlopen(f"{self._admin}/get_all_keys", timeout=timeout_s) as reply:
                text: bytes = reply.read(_MOST_LISTED)
        except OSError as error:
            raise RemoteUnavailable(f"{self._admin}: {error}") from error
        return text.decode("utf-8", "replace").split()

    # ---- errors --------------------------------------------------------------------------------------------------

    def _failed(self, doing: str, code: int) -> RemoteError:
        kind: type[RemoteError] = RemoteFull if code in (_NO_ROOM, _TOO_SMALL) else RemoteUnavailable
        return kind(f"{self._name}: {doing} failed with code {code}")

    def _lost(self, key: str) -> RemoteError:
        return RemoteUnavailable(f"{self._name}: the master knows {key}, and no node gives it")


def open_mooncake(url: str, **settings: Any) -> MooncakeEngine:
    """Open the engine of a `mooncake://` URL.

    Args:
        settings: see `MooncakeEngine`.

    Raises:
        ConfigError: something in the URL or the settings is not as it should be.
    """
    form = "mooncake://MASTER[:PORT][?metadata=URL&local=HOST&admin=URL&protocol=tcp]"
    place = parse_engine_url(url, {"metadata", "local", "admin", "protocol", "devices"}, form)
    if place.path:
        raise ConfigError(f"expected {form}")
    return MooncakeEngine(f"{place.host}:{place.port or 50051}", **{**place.settings, **settings})


def _way_to(master: str) -> str:
    """The address of this machine on its way to the master."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, int(port)))  # sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        raise RemoteUnavailable(f"mooncake:{master}: {error}") from error
