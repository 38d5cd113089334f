"""Counters."""

from __future__ import annotations

import json
import sys
import threading

from kvstore.metrics import Metrics


def test_a_counter_that_was_never_added_to_is_zero_and_not_listed() -> None:
    metrics = Metrics()
    assert metrics["misses"] == 0
    assert metrics.snapshot() == {}


def test_counters_add_up() -> None:
    metrics = Metrics()
    metrics.add("hits")
    metrics.add("hits", 4)
    metrics.add("wait_s", 0.25)
    assert metrics.snapshot() == {"hits": 5, "wait_s": 0.25}


def test_a_snapshot_is_sorted_json_able_and_a_copy() -> None:
    metrics = Metrics()
    for name in ("b", "a", "c"):
        metrics.add(name)
    snapshot = metrics.snapshot()
    assert json.dumps(snapshot) == '{"a": 1, "b": 1, "c": 1}'
    snapshot["a"] = 100
    assert metrics["a"] == 1


def test_no_count_is_lost_between_threads() -> None:
    metrics, switch = Metrics(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [metrics.add("n") for _ in range(2000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert metrics["n"] == 8000
