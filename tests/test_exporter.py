"""What Prometheus is told: every counter, sizes, histograms; and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from small_stores import config, identity, put, stored, tokens_of

from kvstore import AsyncKVStore, KVStore
from kvstore.errors import ConfigError
from kvstore.exporter import GAUGES, LABELLED, export, sample_names
from kvstore.metrics import Metric
from kvstore.timing import BUCKETS, Timing, Timings

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana.json"


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Values by name and by the labels other than the store's."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "store"}
            found[sample.name, "".join(labels.values())] = sample.value
    return found


def test_every_number_of_a_store_is_told(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with KVStore(tmp_path, identity(), config(host=0)) as store:
        export(store, name="one", registry=registry)
        put(store, tokens_of(1, 20))
        store.flush()
        assert stored(store, tokens_of(1, 20)) == 20
        store.get(tokens_of(2, 4))
        found = samples(registry)
        stats = store.stats()
        assert found["kvstore_up", ""] == 1
        assert found["kvstore_get_hits_total", ""] == found["kvstore_get_misses_total", ""] == 1
        assert found["kvstore_get_hit_tokens_disk_total", ""] == 20
        assert found["kvstore_tier_bytes", "disk"] == stats["disk"]["bytes"] > 0
        assert found["kvstore_tier_records", "disk"] == found["kvstore_namespace_records", ""] == 5
        assert found["kvstore_namespace_bytes", ""] == stats["disk"]["bytes"]
        assert found["kvstore_get_seconds_count", "rawdisk"] == found["kvstore_get_seconds_count", "nonenone"] == 1
        assert found["kvstore_put_seconds_bucket", "+Inf"] == found["kvstore_put_seconds_count", ""] == 1
        assert found["kvstore_decode_seconds_count", "rawdisk"] == 5
        assert found["kvstore_read_seconds_count", "rawdisk"] >= 1
        assert {name for name, _ in found} == sample_names()
    closed = samples(registry)
    assert closed["kvstore_up", ""] == 0
    assert closed["kvstore_get_hits_total", ""] == 1


def test_two_stores_are_told_apart_and_one_can_be_taken_out(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with KVStore(tmp_path / "a", identity(), config()) as a, KVStore(tmp_path / "b", identity(), config()) as b:
        export(a, name="a", registry=registry)
        second = export(b, registry=registry)
        text = generate_latest(registry).decode()
        assert 'kvstore_up{store="a"} 1.0' in text
        assert f'kvstore_up{{store="{b.path}"}} 1.0' in text
        registry.unregister(second)
        assert b.path not in generate_latest(registry).decode()


def test_what_is_no_store_is_not_registered(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with KVStore(tmp_path, identity(), config()) as store:
        for given, advice in (
            (AsyncKVStore(store), "AsyncKVStore; give its `store`$"),
            ("a/path", "'a/path'; open one"),
        ):
            with pytest.raises(ConfigError, match=f"expected an open KVStore or SharedKVStore, found {advice}"):
                export(given, name="x", registry=registry)  # type: ignore[arg-type]
        assert not list(registry.collect())


def test_the_dashboard_asks_for_what_there_is() -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [each["query"] for each in board["templating"]["list"]]
    names = {name for text in asked for name in re.findall(r"kvstore_[a-z0-9_]+", text)}
    assert names <= sample_names(), names - sample_names()
    assert {f"kvstore_{timing.value}_seconds_bucket" for timing in Timing} <= names
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_page_names_every_gauge_and_histogram() -> None:
    page = (DASHBOARD.parent / "metrics.md").read_text()
    wanted = {f"kvstore_{name}" for name in GAUGES} | {f"kvstore_{name}_total" for name in LABELLED}
    wanted |= {f"kvstore_{timing.value}_seconds" for timing in Timing}
    assert not [name for name in wanted if f"`{name}`" not in page]


def test_names_do_not_meet() -> None:
    assert len(sample_names()) == len(Metric) + len(GAUGES) + len(LABELLED) + 3 * len(Timing)


@pytest.mark.parametrize("seconds", [0.0, BUCKETS[0], 0.003, BUCKETS[-1], 1e9])
def test_each_observation_is_in_one_bucket(seconds: float) -> None:
    timings = Timings()
    timings.observe(Timing.READ, seconds)
    found = timings.snapshot()[Timing.READ]
    assert sum(found.counts) == 1
    bucket = found.counts.index(1)
    assert bucket == len(BUCKETS) or seconds <= BUCKETS[bucket]
    assert not bucket or seconds > BUCKETS[bucket - 1]
