"""What the store says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvcases import SMALL, kv_of, open_store, tokens

from kvstore import TierConfig
from kvstore.config import KIB, MIB


def numbers_in(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and numbers_in(item) for key, item in value.items())
    return isinstance(value, int | float) and not isinstance(value, bool)


@pytest.mark.parametrize(
    "settings", [{}, {"disk": TierConfig(0)}, {"host": TierConfig(0)}, {"device": TierConfig(1 * MIB, "raw")}], ids=str
)
def test_stats_are_nested_plain_numbers_that_json_takes(tmp_path: Path, settings: dict[str, Any]) -> None:
    with open_store(tmp_path, **settings) as store:
        for stats in (store.stats(), *_after_use(store)):
            assert numbers_in(stats)
            assert json.loads(json.dumps(stats)) == stats


def _after_use(store) -> list[dict[str, Any]]:
    store.session("chat").save(tokens(20), kv_of(tokens(20)))
    store.flush()
    store.get(tokens(20))
    store.get(tokens(5, seed=1))
    return [store.stats()]


def test_a_new_store_is_empty(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        stats = store.stats()
        assert stats["counters"] == {} or set(stats["counters"].values()) <= {0, 1}
        assert (stats["index"]["records"], stats["host"]["bytes"], stats["disk"]["records"]) == (0, 0, 0)
        assert stats["queue"] == {"bytes": 0, "records": 0}


def test_sizes_by_tier(tmp_path: Path) -> None:
    with open_store(tmp_path, device=TierConfig(1 * MIB, "raw")) as store:
        store.put(tokens(20), kv_of(tokens(20)))
        store.flush()
        stats = store.stats()
        assert stats["device"] == {"bytes": 20 * SMALL.bytes_per_token, "budget": 1 * MIB, "records": 3}
        assert stats["host"]["records"] == stats["disk"]["records"] == stats["index"]["records"] == 3
        assert stats["host"]["budget"] == 16 * MIB
        assert stats["disk"]["raw_bytes"] == 20 * SMALL.bytes_per_token
        assert stats["disk"]["tokens"] == stats["index"]["tokens"] == 20
        assert stats["disk"]["file_bytes"] == stats["disk"]["segments"] * 64 * KIB
        assert 0 < stats["disk"]["catalog_bytes"] <= 16 * MIB


def test_the_file_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for seed in range(30):
            store.put(tokens(40, seed), kv_of(tokens(40, seed)))
        store.flush()
        stats = store.stats()["disk"]
        assert stats["file_bytes"] == sum(p.stat().st_size for p in (tmp_path / "segments").iterdir())
        assert stats["catalog_bytes"] == (tmp_path / "catalog" / "data.mdb").stat().st_size
        assert stats["segments"] == len(list((tmp_path / "segments").iterdir())) > 1


def test_hits_and_misses_are_counted_in_tokens_and_by_tier(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put(tokens(20), kv_of(tokens(20)))
    with open_store(tmp_path) as store:
        for _ in range(2):
            store.get(tokens(20)[:8])
        store.get(tokens(20))
        store.get(tokens(7, seed=1))
        counters = store.stats()["counters"]
        assert (counters["get_hits"], counters["get_misses"]) == (3, 1)
        assert counters["get_tokens"] == 2 * 8 + 20 + 7
        assert (counters["get_hit_tokens_disk"], counters["get_hit_tokens_host"]) == (2 * 8 + 12, 8)
        assert counters["promoted_records"] == 1


def test_puts_are_counted_in_tokens_and_new_tokens(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put(tokens(20), kv_of(tokens(20)))
        store.put(tokens(20), kv_of(tokens(20)))
        store.flush()
        counters = store.stats()["counters"]
        assert (counters["put_tokens"], counters["put_new_tokens"]) == (40, 20)
        assert counters["disk_written_records"] == 3
        assert counters["disk_written_bytes"] == store.stats()["disk"]["bytes"]


def test_contains_is_not_counted(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.contains(tokens(20))
        assert "get_misses" not in store.stats()["counters"]


def test_deletions_are_counted(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put(tokens(20), kv_of(tokens(20)))
        store.delete(tokens(20))
        assert store.stats()["counters"]["deleted_records"] == 3
