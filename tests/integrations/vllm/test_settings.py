"""`kv_connector_extra_config`, and who opens which store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvcases import config, identity, kv_of, tokens

from kvstore import ConfigError, ReadOnlyStore, StoreNotFound
from kvstore.integrations.vllm.counters import NAMES, Counters
from kvstore.integrations.vllm.settings import Settings
from kvstore.integrations.vllm.stores import close_written, open_index, open_written


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "path is missing"),
        ({"path": ""}, "path: expected the name of a folder"),
        ({"path": "/kv", "pathh": 1}, "'pathh' is not a setting"),
        ({"path": "/kv", "config": 3}, "config: expected settings by name"),
        ({"path": "/kv", "config": {"thread": 3}}, "thread"),
        ({"path": "/kv", "config": {"disk": {"bytes": 0}}}, "disk.bytes is 0"),
        ({"path": "/kv", "load_threads": 0}, "load_threads: expected an integer of at least 1"),
        ({"path": "/kv", "least_tokens": "many"}, "least_tokens: expected an integer"),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.of(given)


def test_good_settings() -> None:
    given = Settings.of({"path": "/kv", "config": {"block_tokens": 32}, "load_threads": 4, "least_tokens": 256})
    assert (given.config.block_tokens, given.load_threads, given.least_tokens) == (32, 4, 256)


def test_a_scheduler_in_the_same_process_shares_the_store(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    written = open_written(path, identity(), config())
    assert open_index(path, config()) == (written, False)
    close_written(written)
    index, owned = open_index(path, config())
    assert owned
    assert index.read_only
    index.close()


def test_a_scheduler_elsewhere_reads_what_is_on_disk(tmp_path: Path) -> None:
    path, ids = str(tmp_path / "store"), tokens(16)
    with pytest.raises(StoreNotFound):
        open_index(path, config())
    store = open_written(path, identity(), config())
    store.put(ids, kv_of(ids))
    close_written(store)
    index, _ = open_index(path, config())
    assert index.contains(ids) == 16
    with pytest.raises(ReadOnlyStore):
        index.put(ids, kv_of(ids))
    index.close()


def test_only_counters_with_a_meaning_are_counted() -> None:
    counters = Counters()
    with pytest.raises(KeyError):
        counters.add("typo")
    for name in NAMES:
        counters.add(name, 2)
    assert counters.take() == dict.fromkeys(NAMES, 2)
