"""The counters of a connector as vLLM's stats: in its log, and in Prometheus as `vllm:kvstore_<name>_total`."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore.integrations.vllm.counters import NAMES


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]  # mypy has no vLLM
    """Sums of `counters.NAMES` since the last look."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 4) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class KVStoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same sums as counters of Prometheus."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], values: dict[int, list[object]]):
        super().__init__(vllm_config, metric_types, labelnames, values)
        self._counters = {}
        for name, text in NAMES.items():
            counter = self._counter_cls(f"vllm:kvstore_{name}", f"KVStore: {text}.", labelnames)
            for engine, labels in values.items():
                self._counters[name, engine] = counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name, engine_idx].inc(value)
