"""Other ways to keep values by key on the same disk, for many threads at once: `python -m benchmarks.mixed`.

Each keeps a crash from damaging what it has, and is not asked to make a put durable before it returns, as ours is not.
"""

from __future__ import annotations

import os
import select
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Keyed(Protocol):
    """Thread-safe."""

    def put(self, key: str, value: memoryview) -> None:
        """Keep `value` under `key`."""

    def get(self, key: str, out: memoryview) -> bool:
        """Copy the value into `out`, which has its size; False if there is none."""

    def delete(self, key: str) -> None:
        """Drop the value, if there is one."""

    def close(self) -> None: ...


class Files:
    """One file a value: a temporary name, then a rename."""

    def __init__(self, folder: Path, record: int, capacity: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder

    def put(self, key: str, value: memoryview) -> None:
        temporary = self._folder / f"{key}.{threading.get_ident()}"
        with open(temporary, "wb", buffering=0) as file:
            if file.write(value) != len(value):
                raise OSError(f"short write: {temporary}")
        temporary.rename(self._folder / key)

    def get(self, key: str, out: memoryview) -> bool:
        try:
            with open(self._folder / key, "rb", buffering=0) as file:
                return file.readinto(out) == len(out)
        except FileNotFoundError:
            return False

    def delete(self, key: str) -> None:
        (self._folder / key).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""


class Lmdb:
    """Values inside LMDB; its default flags, which alone survive a power cut."""

    def __init__(self, folder: Path, record: int, capacity: int) -> None:
        import lmdb

        folder.mkdir(parents=True)
        self._env = lmdb.open(str(folder), map_size=4 * record * capacity, lib_version=0, max_readers=512)

    def put(self, key: str, value: memoryview) -> None:
        with self._env.begin(write=True) as txn:
            txn.put(key.encode(), value)

    def get(self, key: str, out: memoryview) -> bool:
        with self._env.begin(buffers=True) as txn:
            found = txn.get(key.encode())
            if found is None:
                return False
            out[:] = found
            return True

    def delete(self, key: str) -> None:
        with self._env.begin(write=True) as txn:
            txn.delete(key.encode())

    def close(self) -> None:
        self._env.close()


class RocksDb:
    """RocksDB with BlobDB: values in blob files, whose garbage is collected."""

    def __init__(self, folder: Path, record: int, capacity: int) -> None:
        from rocksdict import Options, Rdict

        options = Options(raw_mode=True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        options.set_blob_file_size(64 << 20)
        options.set_enable_blob_gc(True)
        options.set_blob_gc_age_cutoff(0.5)
        options.set_blob_gc_force_threshold(0.5)
        options.increase_parallelism(2)
        folder.mkdir(parents=True)
        self._db = Rdict(str(folder), options)

    def put(self, key: str, value: memoryview) -> None:
        self._db[key.encode()] = bytes(value)

    def get(self, key: str, out: memoryview) -> bool:
        found = self._db.get(key.encode())
        if found is None:
            return False
        out[:] = found
        return True

    def delete(self, key: str) -> None:
        self._db.delete(key.encode())

    def close(self) -> None:
        self._db.close()


class Sqlite:
    """Blobs in a table, a write-ahead log, a connection for each thread."""

    def __init__(self, folder: Path, record: int, capacity: int) -> None:
        folder.mkdir(parents=True)
        self._path = folder / "values.db"
        self._here = threading.local()
        self._writer = threading.Lock()
        self._all: list[sqlite3.Connection] = []
        self._connection.execute("CREATE TABLE kept (name TEXT PRIMARY KEY, value BLOB)")

    @property
    def _connection(self) -> sqlite3.Connection:
        made: sqlite3.Connection | None = getattr(self._here, "connection", None)
        if made is None:
            made = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=60)
            made.execute("PRAGMA journal_mode=WAL")
            made.execute("PRAGMA synchronous=NORMAL")
            self._here.connection = made
            self._all.append(made)
        return made

    def put(self, key: str, value: memoryview) -> None:
        with self._writer:
            self._connection.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, value))

    def get(self, key: str, out: memoryview) -> bool:
        row = self._connection.execute("SELECT value FROM kept WHERE name = ?", (key,)).fetchone()
        if row is None:
            return False
        out[:] = row[0]
        return True

    def delete(self, key: str) -> None:
        with self._writer:
            self._connection.execute("DELETE FROM kept WHERE name = ?", (key,))

    def close(self) -> None:
        for connection in self._all:
            connection.close()


class DiskCache:
    """The diskcache library: SQLite, with large values as files beside it."""

    def __init__(self, folder: Path, record: int, capacity: int) -> None:
        import diskcache

        self._cache: Any = diskcache.Cache(str(folder), size_limit=2 * record * capacity, eviction_policy="none")

    def put(self, key: str, value: memoryview) -> None:
        self._cache.set(key, bytes(value), retry=True)

    def get(self, key: str, out: memoryview) -> bool:
        found = self._cache.get(key, retry=True)
        if found is None:
            return False
        out[:] = found
        return True

    def delete(self, key: str) -> None:
        self._cache.delete(key, retry=True)

    def close(self) -> None:
        self._cache.close()


class LmcacheFs:
    """LMCache's disk backend `fs_native`, each thread with an adapter of its own, as LMCache drives it: tasks and an
    event. It needs the environment of `make test-lmcache`."""

    def __init__(self, folder: Path, record: int, capacity: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._here = threading.local()
        self._all: list[Any] = []

    def _adapter(self) -> tuple[Any, Any, Any]:
        made: tuple[Any, Any, Any] | None = getattr(self._here, "adapter", None)
        if made is None:
            from lmcache.v1.distributed.l2_adapters import create_l2_adapter
            from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

            spec = {"type": "fs_native", "base_path": str(self._folder)}
            adapter: Any = create_l2_adapter(get_l2_adapter_config_class("fs_native").from_dict(spec))
            polls = []
            for what in ("store", "load"):
                poll = select.poll()
                poll.register(getattr(adapter, f"get_{what}_event_fd")(), select.POLLIN)
                polls.append(poll)
            made = self._here.adapter = (adapter, *polls)
            self._all.append(adapter)
        return made

    def _object(self, key: str, value: memoryview) -> tuple[Any, Any]:
        import torch
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

        tensor: Any = torch.frombuffer(value, dtype=torch.uint8)
        metadata = MemoryObjMetadata(tensor.shape, tensor.dtype, tensor.data_ptr(), len(value), 1)
        name = ObjectKey(key.encode().ljust(32, b"\0"), "model", 0)
        return name, TensorMemoryObj(raw_data=tensor, metadata=metadata, parent_allocator=None)

    def put(self, key: str, value: memoryview) -> None:
        from lmcache.v1.platform import consume_fd

        adapter, poll, _ = self._adapter()
        name, thing = self._object(key, value)
        task = adapter.submit_store_task([name], [thing])
        while True:
            poll.poll(10_000)
            consume_fd(adapter.get_store_event_fd())
            if task in adapter.pop_completed_store_tasks():
                return

    def get(self, key: str, out: memoryview) -> bool:
        from lmcache.v1.platform import consume_fd

        adapter, _, poll = self._adapter()
        name, thing = self._object(key, out)
        task = adapter.submit_load_task([name], [thing])
        while True:
            poll.poll(10_000)
            consume_fd(adapter.get_load_event_fd())
            result = adapter.query_load_result(task)
            if result is not None:
                return bool(result.popcount() == 1)

    def delete(self, key: str) -> None:
        """Remove its file: it has no call that deletes one value."""
        (self._folder / f"model@0x00000000@0@{key.encode().ljust(32, bytes(1)).hex()}.data").unlink(missing_ok=True)

    def close(self) -> None:
        for adapter in self._all:
            adapter.close()


KEYED: dict[str, tuple[str, Callable[[Path, int, int], Keyed]]] = {
    "file": ("os", Files),
    "lmdb": ("lmdb", Lmdb),
    "rocksdb": ("rocksdict", RocksDb),
    "sqlite": ("sqlite3", Sqlite),
    "diskcache": ("diskcache", DiskCache),
    "fs_native": ("lmcache", LmcacheFs),
}
"""By name: the module it needs, and its constructor (folder, bytes of a value, capacity in values)."""


def file_bytes(folder: Path) -> int:
    """Bytes that the files under `folder` occupy, whatever is removed meanwhile."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
