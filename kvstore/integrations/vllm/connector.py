"""The connector that vLLM 0.32 loads with `kv_connector_module_path` (docs/vllm.md).

vLLM makes one for its scheduler and one for its worker, in one process or two. This module only hands over.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.integrations.vllm.counters import Counters
from kvstore.integrations.vllm.identity import check_supported, identity_of, layer_names
from kvstore.integrations.vllm.paged import PageOrder, order_of, paged_cache
from kvstore.integrations.vllm.scheduler import SchedulerSide
from kvstore.integrations.vllm.settings import Settings
from kvstore.integrations.vllm.stats import KVStoreMetrics, KVStoreStats
from kvstore.integrations.vllm.stores import close_written, open_index, open_written
from kvstore.integrations.vllm.worker import WorkerSide


class KVStoreConnector(KVConnectorBase_V1):  # type: ignore[misc]  # mypy has no vLLM
    """Keeps the prefix caches of a vLLM server in a `KVStore`, and takes them from there.

    Raises:
        ConfigError: a setting is unknown, or vLLM is set to what is not supported.
        UnsupportedModel: the model keeps what cannot be stored.
        IdentityMismatch: the store is another model's, or of another version of vLLM.
        StoreLocked: another server writes this store.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config)
        groups = kv_cache_config.kv_cache_groups
        check_supported(vllm_config, groups)
        self._group = groups[0]
        self._block_tokens = self._group.kv_cache_spec.block_size
        self._counters = Counters()
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._step: Any = None
        self._index: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self._index, self._owns_index = open_index(self._settings.path, self._settings.config)
            least = max(self._settings.least_tokens, self._block_tokens)
            unit = self._index.config.block_tokens
            self._scheduler = SchedulerSide(self._index, self._block_tokens, unit, least, self._counters)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is stored: a cache that is not is computed again."""
        return False

    # ---- in the worker -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Look at vLLM's memory, and open the store for the model that was loaded."""
        names = layer_names(self._group)
        layer = self._vllm_config.compilation_config.static_forward_context[names[0]]
        backend = layer.attn_backend.get_name()
        orders = _orders(kv_caches[names[0]]) if backend == "CPU_ATTN" else None
        cache = paged_cache(kv_caches, names, self._block_tokens, orders)
        identity = identity_of(self._vllm_config, self._group, vllm.__version__, backend)
        store = open_written(self._settings.path, identity, self._settings.config)
        queue_bytes = store.config.write_queue_bytes
        self._worker = WorkerSide(store, cache, queue_bytes, self._settings.load_threads, self._counters)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._the_worker.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are copied at the end of the step."""

    def wait_for_save(self) -> None:
        self._the_worker.save(self._connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._the_worker.take_loaded(idle=self._connector_metadata.idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._the_worker.take_failed()

    @property
    def _the_worker(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("vLLM did not register its caches with the connector")
        return self._worker

    # ---- beside the scheduler ------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        more = self._the_scheduler.match(request, num_computed_tokens)
        return more, more > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._the_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._the_scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        done = connector_output.finished_recving or ()
        self._the_scheduler.loaded(done, set(connector_output.invalid_block_ids or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._the_scheduler.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        """Refused: what a store has outlives the server. Stop it and delete the folder."""
        return False

    @property
    def _the_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("a call for the scheduler's connector reached that of a worker")
        return self._scheduler

    # ---- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        sums = self._counters.take()
        return KVStoreStats(sums) if sums else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        return KVStoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVStoreMetrics:
        return KVStoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the threads and close the store; what was saved is durable on return."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()
            close_written(worker.store)
        if self._index is not None:
            if self._owns_index:
                self._index.close()
            self._index = None


def _orders(cache: torch.Tensor) -> tuple[PageOrder, PageOrder]:
    """In which orders vLLM's operation for CPUs writes keys and values into a page."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    _, heads, rows, content = cache.shape
    isa = _get_attn_isa(cache.dtype, rows, content // 2)
    return order_of(partial(_write, ops, isa), (2, heads, rows, content), cache.dtype)


def _write(ops: Any, isa: str, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
    rows = cache.shape[2]
    parts = cache.view(*cache.shape[:2], 2 * rows, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *parts, torch.arange(rows), isa)
