"""Metrics of a store for Prometheus. Needs the extra `kvstore-lm[prometheus]`; nothing else imports this module.

Every member of `Metric` is a counter `kvstore_NAME_total`, every `Timing` a histogram `kvstore_NAME_seconds` (by tier
and codec, but for puts), and sizes are gauges (`GAUGES`); docs/metrics.md has the list, docs/grafana.json a dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
except ModuleNotFoundError as error:
    what = "kvstore.exporter needs prometheus_client; pip install 'kvstore-lm[prometheus]'"
    raise ModuleNotFoundError(what, name=error.name) from None

from kvstore.core.given_store import check_store
from kvstore.errors import KVStoreError
from kvstore.metrics import Metric, hit_tokens
from kvstore.store import KVStore
from kvstore.timing import BUCKETS, NOWHERE, Timing

GAUGES = {
    "up": "1 while the store is open",
    "tier_bytes": "bytes of the records in a tier",
    "tier_budget_bytes": "budget of a tier",
    "tier_records": "records in a tier",
    "disk_tokens": "tokens of the records on disk",
    "disk_raw_bytes": "bytes of the same before coding",
    "disk_used_bytes": "bytes of everything in the folder of the store",
    "disk_capacity_bytes": "the most bytes of records that the budget leaves room for",
    "saved_bytes": "bytes not written since the store was opened, by mechanism: prefix, codec, donors",
    "queue_bytes": "raw bytes that wait to be written",
    "queue_records": "blocks that wait to be written",
    "sessions": "saved sessions",
    "session_bytes": "bytes that they take",
    "pinned_bytes": "bytes that pins keep",
    "index_bytes": "memory of the index",
}
_NAMESPACE = {
    "namespace_bytes": "bytes of the records of a namespace",
    "namespace_records": "records of a namespace",
    "namespace_tokens": "tokens of those records",
    "namespace_sessions": "sessions of a namespace",
}
GAUGES |= _NAMESPACE
LABELLED = {"hit_tokens": "tokens that gets returned, by the tier that they came from"}
_TIERS = ("device", "host", "disk")
_PLACE, _PLACED = ("tier", "codec"), frozenset({Timing.GET, Timing.READ, Timing.DECODE})
_SOURCES = {
    "disk_tokens": ("disk", "tokens"),
    "disk_raw_bytes": ("disk", "raw_bytes"),
    "disk_used_bytes": ("disk", "used_bytes"),
    "disk_capacity_bytes": ("disk", "capacity"),
    "queue_bytes": ("queue", "bytes"),
    "queue_records": ("queue", "records"),
    "sessions": ("sessions", "sessions"),
    "session_bytes": ("sessions", "bytes"),
    "pinned_bytes": ("pins", "bytes"),
    "index_bytes": ("index", "bytes"),
}


class StoreCollector:
    """Gives Prometheus the numbers of one store whenever it asks; made by `export`. Thread-safe.

    Args:
        store: an open store. After it is closed, `kvstore_up` is 0 and the counters stay.
        name: the label `store` of every sample.
    """

    def __init__(self, store: KVStore, name: str) -> None:
        self._store = store
        self._name = name

    def describe(self) -> list[Any]:
        """Nothing: the names are the same for all stores, and stores are told apart by their label."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield every family."""
        label, metrics = [self._name], self._store.metrics
        try:
            stats = self._store.stats()
        except KVStoreError:
            stats = {}
        up = GaugeMetricFamily("kvstore_up", GAUGES["up"], labels=["store"])
        up.add_metric(label, float(bool(stats)))
        yield up
        for metric in Metric:
            counter = CounterMetricFamily(f"kvstore_{metric.value}", metric.meaning, labels=["store"])
            counter.add_metric(label, float(metrics[metric]))
            yield counter
        yield from self._histograms()
        yield from self._by_mechanism()
        yield from self._sizes(stats)

    def _histograms(self) -> Iterator[Any]:
        timings, bounds = self._store.metrics.timings, [*map(str, BUCKETS), "+Inf"]
        for timing in Timing:
            name, found = f"kvstore_{timing.value}_seconds", timings.by_place(timing)
            labels = ["store", *_PLACE] if timing in _PLACED else ["store"]
            family = HistogramMetricFamily(name, timing.meaning, labels=labels)
            if timing not in _PLACED:
                found = {NOWHERE: timings.snapshot()[timing]}
            for where, histogram in found.items():
                buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
                values = [self._name, where.tier, where.codec][: len(labels)]
                family.add_metric(values, buckets, histogram.seconds)
            yield family

    def _by_mechanism(self) -> Iterator[Any]:
        metrics, per_token = self._store.metrics, self._store.identity.layout.bytes_per_token
        tokens = CounterMetricFamily("kvstore_hit_tokens", LABELLED["hit_tokens"], labels=["store", "tier"])
        for tier in ("device", "queue", "host", "disk", "donors", "other"):
            tokens.add_metric([self._name, tier], float(metrics[hit_tokens(tier)]))
        yield tokens
        member_raw, member = metrics[Metric.DISK_WRITTEN_MEMBER_RAW_BYTES], metrics[Metric.DISK_WRITTEN_MEMBER_BYTES]
        saved = {
            "prefix": (metrics[Metric.PUT_TOKENS] - metrics[Metric.PUT_NEW_TOKENS]) * per_token,
            "codec": metrics[Metric.DISK_WRITTEN_RAW_BYTES] - member_raw - metrics[Metric.DISK_WRITTEN_BYTES] + member,
            "donors": member_raw - member,
        }
        gauge = GaugeMetricFamily("kvstore_saved_bytes", GAUGES["saved_bytes"], labels=["store", "mechanism"])
        for mechanism, nbytes in saved.items():
            gauge.add_metric([self._name, mechanism], float(nbytes))
        yield gauge

    def _sizes(self, stats: dict[str, Any]) -> Iterator[Any]:
        for name in ("tier_bytes", "tier_budget_bytes", "tier_records") if stats else ():
            gauge = GaugeMetricFamily(f"kvstore_{name}", GAUGES[name], labels=["store", "tier"])
            field = name.removeprefix("tier_").replace("budget_bytes", "budget")
            for tier in _TIERS:
                if field in stats.get(tier, {}):
                    gauge.add_metric([self._name, tier], float(stats[tier][field]))
            yield gauge
        for name in _NAMESPACE if stats else ():
            gauge = GaugeMetricFamily(f"kvstore_{name}", GAUGES[name], labels=["store", "namespace"])
            for namespace, row in stats["namespaces"].items():
                gauge.add_metric([self._name, namespace], float(row[name.removeprefix("namespace_")]))
            yield gauge
        for name, (part, field) in _SOURCES.items():
            if field in stats.get(part, {}):
                gauge = GaugeMetricFamily(f"kvstore_{name}", GAUGES[name], labels=["store"])
                gauge.add_metric([self._name], float(stats[part][field]))
                yield gauge


def export(store: KVStore, *, name: str | None = None, registry: CollectorRegistry = REGISTRY) -> StoreCollector:
    """Let a Prometheus registry ask a store for its numbers from now on.

    Args:
        store: an open store; of an `AsyncKVStore` its `store`.
        name: the label `store`; default is its path. Two stores of one process need two names.
        registry: default is that of the process.

    Returns:
        What was registered; `registry.unregister` takes it out again.

    Raises:
        ConfigError: `store` is something else; nothing is registered.
    """
    check_store(store, "open one with KVStore(path, identity)")
    collector = StoreCollector(store, store.path if name is None else name)
    asked: Any = collector  # any object with `collect` will do
    registry.register(asked)
    return collector


def serve(port: int, address: str = "127.0.0.1", registry: CollectorRegistry = REGISTRY) -> tuple[Any, Any]:
    """Answer Prometheus on a port, from a thread of its own; for programs without an HTTP server.

    Returns:
        The server and its thread; `shutdown()` of the server ends it.
    """
    started: tuple[Any, Any] = start_http_server(port, address, registry)
    return started


def sample_names() -> set[str]:
    """Return the names of all samples that there may be."""
    names = {f"kvstore_{metric.value}_total" for metric in Metric} | {f"kvstore_{name}" for name in GAUGES}
    names |= {f"kvstore_{name}_total" for name in LABELLED}
    endings = ("bucket", "count", "sum")
    return names | {f"kvstore_{timing.value}_seconds_{ending}" for timing in Timing for ending in endings}
