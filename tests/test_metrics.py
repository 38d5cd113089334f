"""Counters, and that the list of their names is the one that is documented and counted."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from threadruns import run_together

from kvstore.core.record import Damage, DamagedRecord
from kvstore.metrics import Metric, Metrics, hit_tokens

ROOT = Path(__file__).parents[1]
SOURCES = [p.read_text() for p in (ROOT / "kvstore").rglob("*.py") if p.name != "metrics.py"]


def test_a_counter_that_was_never_added_to_is_zero_and_not_listed() -> None:
    metrics = Metrics()
    assert metrics[Metric.GET_MISSES] == 0
    assert metrics.snapshot() == {}


def test_counters_add_up() -> None:
    metrics = Metrics()
    metrics.add(Metric.GET_HITS)
    metrics.add(Metric.GET_HITS, 4)
    metrics.add(Metric.PUT_WAIT_S, 0.25)
    assert metrics.snapshot() == {"get_hits": 5, "put_wait_s": 0.25}


def test_a_snapshot_is_sorted_json_able_and_a_copy() -> None:
    metrics = Metrics()
    for metric in (Metric.GET_TOKENS, Metric.GET_HITS, Metric.GET_MISSES):
        metrics.add(metric)
    snapshot = metrics.snapshot()
    assert json.dumps(snapshot) == '{"get_hits": 1, "get_misses": 1, "get_tokens": 1}'
    snapshot["get_hits"] = 100
    assert metrics[Metric.GET_HITS] == 1


def _add_many(metrics: Metrics) -> None:
    for _ in range(2000):
        metrics.add(Metric.GET_HITS)


def test_no_count_is_lost_between_threads() -> None:
    metrics, switch = Metrics(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_together(*[lambda: [metrics.add(Metric.GET_HITS) for _ in range(2000)]] * 4)
    finally:
        sys.setswitchinterval(switch)
    assert metrics[Metric.GET_HITS] == 8000


def _table() -> list[tuple[str, str]]:
    """(name, meaning) of the rows of ARCHITECTURE's table of counters."""
    text = (ROOT / "ARCHITECTURE.md").read_text().split("## Counters")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| (.+?) \|$", text, flags=re.M)


def test_the_documented_counters_are_those_that_there_are() -> None:
    assert _table() == [(metric.value, metric.meaning) for metric in Metric]


@pytest.mark.parametrize("metric", list(Metric))
def test_every_counter_is_counted_somewhere(metric: Metric) -> None:
    if metric in (m for m in Metric if m.name.startswith("GET_HIT_TOKENS_")):
        assert hit_tokens(metric.value.removeprefix("get_hit_tokens_")) is metric
        return
    if metric.name.startswith("DAMAGED_") and metric.name.removeprefix("DAMAGED_") in Damage.__members__:
        assert DamagedRecord(Damage[metric.name.removeprefix("DAMAGED_")], "").metric is metric
        return
    assert any(f"Metric.{metric.name}" in source for source in SOURCES), f"{metric.value} is never counted"
