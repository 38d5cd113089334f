"""A vLLM server with a store, killed and started again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllmruns import server

from kvstore import KVStore, stored_identity

pytestmark = pytest.mark.slow


def wait_until_stored(path: Path, ids: list[int], tokens: int) -> None:
    """The server writes it in its own time; another process sees what is on disk."""
    end = time.monotonic() + 60
    with KVStore(path, stored_identity(path), read_only=True) as store:
        while store.contains(ids) < tokens:
            assert time.monotonic() < end, store.stats()
            time.sleep(0.05)


def test_a_killed_server_goes_on_where_it_was(
    tmp_path: Path, prompt: list[int], hundred: list[list[int]], plain: Any
) -> None:
    path = tmp_path / "store"
    settings = {"path": str(path), "config": {"disk": {"bytes": 1 << 28}, "learn": "off"}}
    with server(tmp_path, settings) as first:
        text, cached = first.complete(prompt, 60)
        assert (text, cached) == (plain[0][0], 0)
        wait_until_stored(path, prompt, 576)
        first.kill()
    with server(tmp_path, settings) as second:
        text, cached = second.complete(prompt, 60)
        assert text == plain[0][0]
        assert cached >= 512
        with ThreadPoolExecutor(100) as threads:
            answers = list(threads.map(lambda ids: second.complete(ids, 4), hundred))
        counted = second.metrics()
    assert [text for text, _ in answers] == plain[1]
    assert min(cached for _, cached in answers) >= 384
    assert counted["kvstore_loaded_tokens_total"] >= 512
    assert counted["kvstore_failed_blocks_total"] == counted["kvstore_lookup_errors_total"] == 0
