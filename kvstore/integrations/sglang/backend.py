"""`KVStoreHiCache`: the pages of SGLang's host cache in stores.

A page is a part of a sequence under an opaque key, the chained hash of its tokens, so it is kept by `ChunkStores`:
coded without loss, checked when it is read, within a budget, and there after a restart. Both interfaces of HiCache are
served: that of one pool (`batch_get_v1`, `batch_set_v1`) and that of pools beside it (`batch_*_v2`); what one wrote the
other reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
except ModuleNotFoundError as error:
    what = "kvstore.integrations.sglang needs SGLang; pip install sglang==0.5.23"
    raise ModuleNotFoundError(what, name=error.name) from None

from kvstore.errors import UnsupportedModel
from kvstore.integrations.chunks.settings import ChunkSettings
from kvstore.integrations.chunks.shape import ChunkShape
from kvstore.integrations.chunks.stores import ChunkStores

_LOG = logging.getLogger("kvstore")
_OWN = ("backend_name", "module_path", "class_name")  # of SGLang, in the same object as our settings


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang's types are not installed
    """A storage backend of HiCache. Thread-safe. Each rank has a folder and is the one process that writes there.

    Whatever a store does not have, or has damaged, is a miss; no call raises because of that. A page is found as soon
    as it was set, and durable within moments and after `close`.

    Args:
        storage_config: a `HiCacheStorageConfig`; its `extra_config` has `ChunkSettings` beside SGLang's own fields.
        options: not used.

    Raises:
        ConfigError: names the setting that does not fit.
        UnsupportedModel: MLA on several ranks, which share pages.
        StoreLocked, DiskError, ...: as `KVStore`.
    """

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise UnsupportedModel(
                "MLA with tp_size > 1: ranks read what another wrote, and each has stores of its own"
            )
        given = storage_config.extra_config
        params = {k: v for k, v in given.items() if k not in _OWN} if isinstance(given, dict) else given
        settings = ChunkSettings.of(params, "extra_config")
        self.registered_pools: dict[Any, Any] = {}
        self.mem_pool_host: Any = None
        self._rank = _rank(storage_config)
        self._chunks = ChunkStores(os.path.join(settings.path, self._rank), "sglang", settings.config())
        self._workers = ThreadPoolExecutor(settings.threads, "kvstore-sglang")
        self._namespace = str(storage_config.model_name or "")

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Return the page of a key, in `target_location`; None if it is not there, or has another size."""
        if target_location is None or not target_location.is_contiguous():
            return None
        found = self._get(key, target_location, self._shape(self.mem_pool_host, target_location))
        return target_location if found else None

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return list(self._workers.map(self.get, keys, target_locations or [None] * len(keys)))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        page = target_location if value is None else value
        return self._set(key, page, self._shape(self.mem_pool_host, page))

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(list(self._workers.map(self.set, keys, target_locations if values is None else values)))

    def exists(self, key: str) -> bool:
        return self._chunks.contains(key.encode(), namespace=self._namespace)

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._each(self._read, PoolName.KV, self.mem_pool_host, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._each(self._write, PoolName.KV, self.mem_pool_host, keys, host_indices)

    def batch_get_v2(self, transfers: Iterable[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {x.name: self._each(self._read, x.name, self._pool(x.name), x.keys, x.host_indices) for x in transfers}

    def batch_set_v2(self, transfers: Iterable[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {x.name: self._each(self._write, x.name, self._pool(x.name), x.keys, x.host_indices) for x in transfers}

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return how long a prefix is in all pools, as their policies want it, and which prefixes could be restored."""
        pages = self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or []:
            there = [self.exists(_key(key, transfer.name)) for key in keys[:pages]]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                window = pages
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
            else:
                raise ValueError(f"hit policy {transfer.hit_policy} of pool {transfer.name} is not supported")
            fits = {n for n in range(1, pages + 1) if all(there[max(0, n - window) : n])}
            if fits:
                hits[transfer.name] = max(fits)
            restorable &= fits
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def clear(self) -> None:
        """Remove all pages of this rank and model."""
        self._chunks.delete_namespace(self._namespace)

    def get_stats(self) -> None:
        """SGLang's own counters are not kept; `KVStore.stats` of each store has ours."""

    def close(self) -> None:
        """Close the stores; what was set is written."""
        self._workers.shutdown()
        self._chunks.close()

    def _pool(self, name: Any) -> Any:
        known = self.registered_pools.get(name)
        return self.mem_pool_host if known is None and name == PoolName.KV else known

    def _each(
        self, work: Callable[..., bool], name: Any, pool: Any, keys: Sequence[str] | None, host_indices: Any
    ) -> list[bool]:
        """`work` of every page; nothing if the pool is not known or the indices are not those of these pages."""
        names = list(keys or ())
        size = getattr(pool, "page_size", 1) or 1
        if pool is None or host_indices is None or len(host_indices) != len(names) * size:
            _LOG.warning("SGLang: pool %s is not registered, or %d keys have other indices", name, len(names))
            return [False] * len(names)
        places = [int(host_indices[number * size]) for number in range(len(names))]
        return list(self._workers.map(lambda key, place: work(_key(key, name), pool, place), names, places))

    def _read(self, key: str, pool: Any, place: int) -> bool:
        page = pool.get_dummy_flat_data_page()
        if not self._get(key, page, self._shape(pool, page)):
            return False
        pool.set_from_flat_data_page(place, page)
        return True

    def _write(self, key: str, pool: Any, place: int) -> bool:
        page = pool.get_data_page(place, flat=True)
        return self._set(key, page, self._shape(pool, page))

    def _get(self, key: str, page: torch.Tensor, shape: ChunkShape) -> bool:
        try:
            return self._chunks.get_into(key.encode(), _bytes(page), shape, namespace=self._namespace)
        except Exception as error:  # a miss, whatever it is: SGLang computes
            _LOG.warning("SGLang: page %s was not read: %s", key, error)
            return False

    def _set(self, key: str, page: torch.Tensor, shape: ChunkShape) -> bool:
        try:
            if self.exists(key):
                return True
            return self._chunks.put(key.encode(), _bytes(page.contiguous()), shape, namespace=self._namespace)
        except Exception as error:
            _LOG.warning("SGLang: page %s was not stored: %s", key, error)
            return False

    def _shape(self, pool: Any, page: torch.Tensor) -> ChunkShape:
        """How a flat page of a pool is laid out, as far as the pool says it."""
        dtype = str(page.dtype).removeprefix("torch.")
        names = ("layout", "layer_num", "page_size", "head_num", "head_dim")
        layout, layers, tokens, heads, dim = (getattr(pool, name, None) for name in names)
        if isinstance(layers, int) and isinstance(tokens, int) and isinstance(heads, int) and isinstance(dim, int):
            dims = (2, 1, tokens, layers * heads * dim) if layout == "page_first" else (2, layers, tokens, heads * dim)
            shape = ChunkShape.of(dims, dtype)
            if shape.nbytes == page.numel() * page.element_size() and layout != "page_head":
                return shape
        return ChunkShape.of((page.numel(),), dtype)


def _bytes(page: torch.Tensor) -> Any:
    return page.view(-1).view(torch.uint8).numpy()


def _key(key: str, pool: Any) -> str:
    name = getattr(pool, "value", pool)
    return key if name == PoolName.KV.value else f"{key}.{name}"


def _rank(config: Any) -> str:
    """The folder of a rank: all that makes its pages others than those of another rank, or another process."""
    parts = {name: getattr(config, f"{name}_rank", 0) for name in ("tp", "pp", "attn_cp", "dp", "dcp")}
    sizes = {name: getattr(config, f"{name}_size", 1) for name in ("tp", "pp", "attn_cp", "dcp")}
    return "-".join(
        f"{name}{rank}of{sizes[name]}" if name in sizes else f"{name}{rank}" for name, rank in parts.items()
    )
