"""`KVStoreL2Adapter`: the objects of LMCache in stores.

An object is a chunk of a model's cache under an opaque key, so it is kept by `ChunkStores`: coded without loss, checked
when it is read, within a budget, and there after a restart.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier
except ModuleNotFoundError as error:
    what = "kvstore.integrations.lmcache needs LMCache; pip install lmcache==0.5.6"
    raise ModuleNotFoundError(what, name=error.name) from None

from kvstore.integrations.chunks.settings import ChunkSettings
from kvstore.integrations.chunks.shape import ChunkShape
from kvstore.integrations.chunks.stores import ChunkStores

_LOG = logging.getLogger("kvstore")


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache has no types
    """L2 storage in kvstore. Thread-safe. One process writes to a folder.

    A store task has succeeded when all its objects are queued for writing; they are durable within moments, and after
    `close`. Locks hold nothing: an object that is evicted between lookup and load is not loaded, which the load says.

    Args:
        params: `adapter_params` of the plugin; see `ChunkSettings`.
        l1_memory_desc: not used.

    Raises:
        ConfigError: names the setting that does not fit.
        StoreLocked, DiskError, ...: as `KVStore`.
    """

    def __init__(self, params: Any, l1_memory_desc: Any = None) -> None:
        super().__init__(max_capacity_bytes=0)  # stores keep their own budgets
        settings = ChunkSettings.of(params, "adapter_params")
        self._chunks = ChunkStores(settings.path, "lmcache", settings.config())
        self._workers = ThreadPoolExecutor(settings.threads, "kvstore-lmcache")
        self._events = {name: create_event_notifier() for name in ("store", "lookup", "load")}
        self._lock = threading.Lock()
        self._last = 0  # guarded by _lock, and so is what is below
        self._done: dict[str, dict[int, Any]] = {name: {} for name in self._events}

    def get_store_event_fd(self) -> int:
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events["load"].fileno())

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        return self._submit("store", self._put, self._stored, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return done

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any = None) -> int:
        return self._submit("lookup", self._find, self._found, keys, [None] * len(keys), at_once=True)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._done["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Nothing is locked."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        return self._submit("load", self._load, self._loaded, keys, objects)

    def query_load_result(self, task_id: int) -> Any:
        with self._lock:
            return self._done["load"].pop(task_id, None)

    def delete(self, keys: Sequence[Any]) -> None:
        removed = [(key, self._chunks.delete(_name(key), namespace=key.cache_salt)) for key in keys]
        gone = [(key, size) for key, size in removed if size]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])

    def get_usage(self) -> Any:
        """Bytes on disk, of objects of all models; a capacity of 0, for the stores evict by themselves."""
        return AdapterUsage(sum(stats["disk"]["bytes"] for stats in self._chunks.stats().values()), 0)

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": "KVStoreL2Adapter", "stores": self._chunks.stats()}

    def close(self) -> None:
        self._workers.shutdown()
        self._chunks.close()
        for event in self._events.values():
            event.close()

    def _submit(
        self,
        kind: str,
        work: Callable[[Any, Any], Any],
        gather: Callable[[list[Any], list[Any]], Any],
        keys: Sequence[Any],
        objects: Sequence[Any],
        at_once: bool = False,
    ) -> int:
        """Begin a task: `work` of each object, by several threads unless `at_once`; then `gather` of what came back,
        None where one failed."""
        pairs = list(zip(keys, objects, strict=True))
        results: list[Any] = [None] * len(pairs)
        parts = [range(len(pairs))] if at_once or not pairs else [range(at, at + 1) for at in range(len(pairs))]
        with self._lock:
            self._last += 1
            task, left = self._last, [len(parts)]

        def run(part: range) -> None:
            for at in part:
                try:
                    results[at] = work(*pairs[at])
                except Exception as error:  # whatever it is: LMCache waits for an answer
                    _LOG.warning("LMCache: a %s task failed: %s", kind, error)
            with self._lock:
                left[0] -= 1
                if left[0]:
                    return
            result = gather([key for key, _ in pairs], results)
            with self._lock:
                self._done[kind][task] = result
            self._events[kind].notify()

        for part in parts:
            self._workers.submit(run, part)
        return task

    def _put(self, key: Any, thing: Any) -> int | None:
        """Return the bytes that were taken; 0 if they were there, None if there was no room."""
        name, memory = _name(key), thing.byte_array
        if self._chunks.contains(name, namespace=key.cache_salt):
            return 0
        taken = self._chunks.put(name, memory, _shape(thing, len(memory)), namespace=key.cache_salt)
        return len(memory) if taken else None

    def _stored(self, keys: list[Any], sizes: list[int | None]) -> Any:
        new = [(key, size) for key, size in zip(keys, sizes, strict=True) if size]
        if new:
            self._tell(self._notify_keys_stored, [key for key, _ in new], [size for _, size in new])
        return L2StoreResult(None not in sizes, sum(size for _, size in new))

    def _find(self, key: Any, _: None) -> bool:
        return self._chunks.contains(_name(key), namespace=key.cache_salt)

    def _found(self, keys: list[Any], there: list[bool | None]) -> Any:
        found = Bitmap(len(keys))
        for number, one in enumerate(there):
            if one:
                found.set(number)
        return found

    def _load(self, key: Any, thing: Any) -> bool:
        memory = thing.byte_array
        return self._chunks.get_into(_name(key), memory, _shape(thing, len(memory)), namespace=key.cache_salt)

    def _loaded(self, keys: list[Any], there: list[bool | None]) -> Any:
        if any(there):
            self._tell(self._notify_keys_accessed, [key for key, one in zip(keys, there, strict=True) if one])
        return self._found(keys, there)

    def _tell(self, listeners: Callable[..., None], *what: Any) -> None:
        try:
            listeners(*what)
        except Exception as error:  # a listener of LMCache; the task itself is done
            _LOG.warning("LMCache: a listener failed: %s", error)


def _name(key: Any) -> bytes:
    """An `ObjectKey` as bytes, each field behind its length; the salt is the namespace."""
    fields = (key.chunk_hash, key.model_name.encode(), str(key.kv_rank).encode(), str(key.object_group_id).encode())
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def _shape(thing: Any, size: int) -> ChunkShape:
    """The shape of an object, if it says one that has as many bytes; else that of its bytes."""
    dims, dtype = thing.get_shape(), thing.get_dtype()
    if dims is not None and dtype is not None:
        shape = ChunkShape.of(dims, str(dtype).removeprefix("torch."))
        if shape.nbytes == size:
            return shape
    return ChunkShape.of((size,), "uint8")
