"""Prefetch: from disk into the host tier, in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvcases import kv_of, open_store, same_kv, tokens

from kvstore import TierConfig
from kvstore.config import MIB


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with open_store(tmp_path) as store:
        store.put(tokens(36), kv_of(tokens(36)))
    return tmp_path


def test_after_a_prefetch_the_prefix_comes_from_the_host(stored: Path) -> None:
    with open_store(stored) as store:
        assert store.prefetch(tokens(36)).result() == 36
        hit = store.get(tokens(36))
        assert hit.tiers == {"host": 36}
        assert same_kv(hit.layers, kv_of(tokens(36)))


def test_a_part_is_prefetched_in_whole_blocks_and_counted_in_tokens(stored: Path) -> None:
    with open_store(stored) as store:
        assert store.prefetch(tokens(36)[:19]).result() == 19
        assert store.get(tokens(36)).tiers == {"host": 24, "disk": 12}


def test_what_is_not_stored_is_not_counted(stored: Path) -> None:
    with open_store(stored) as store:
        assert store.prefetch(tokens(36, seed=1)).result() == 0
        longer = [*tokens(36).tolist(), 1, 2, 3]
        assert store.prefetch(longer).result() == 36


def test_what_is_in_memory_already_is_not_read_again(stored: Path) -> None:
    with open_store(stored) as store:
        store.prefetch(tokens(36)).result()
        (stored / "segments" / "00000001.seg").write_bytes(b"")  # nothing can be read any more
        assert store.prefetch(tokens(36)).result() == 36
        assert same_kv(store.get(tokens(36)).layers, kv_of(tokens(36)))


def test_a_host_tier_that_is_too_small_is_reported_by_the_count(stored: Path) -> None:
    with open_store(stored, host=TierConfig(2 * 4096, "raw")) as store:
        assert store.prefetch(tokens(36)).result() < 36
        hit = store.get(tokens(36))
        assert same_kv(hit.layers, kv_of(tokens(36)))


def test_without_a_host_tier_nothing_is_prefetched(stored: Path) -> None:
    with open_store(stored, host=TierConfig(0)) as store:
        assert store.prefetch(tokens(36)).result() == 0
        assert store.get(tokens(36)).tokens == 36


def test_the_callers_array_may_change_while_the_prefetch_waits(stored: Path) -> None:
    with open_store(stored) as store:
        ids = tokens(36)
        futures = [store.prefetch(ids) for _ in range(20)]
        ids[:] = 0
        assert {future.result() for future in futures} == {36}


def test_bad_tokens_are_refused_at_the_call(stored: Path) -> None:
    with open_store(stored) as store:
        with pytest.raises(ValueError, match="tokens"):
            store.prefetch([-1])


def test_closing_does_not_wait_for_prefetches_that_did_not_begin(stored: Path) -> None:
    store = open_store(stored, host=TierConfig(1 * MIB, "raw"))
    futures = [store.prefetch(tokens(36)) for _ in range(50)]
    store.close()
    assert all(future.cancelled() or future.result() == 36 for future in futures)
