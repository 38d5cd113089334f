"""Whose memory a cache is in, and which tier answers."""

from __future__ import annotations

from pathlib import Path

import torch
from kvcases import SMALL, GatedFS, assert_hit, kv_of, open_store, put, tokens
from transformers import DynamicCache

from kvstore import KVStore, TierConfig
from kvstore.config import MIB

# ---- whose memory --------------------------------------------------------------------------------------------------


def test_plain_tensors_may_be_written_to_after_put(tmp_path: Path) -> None:
    ids, fs = tokens(20), GatedFS()
    with open_store(tmp_path, fs=fs) as store:
        fs.shut()
        kv = kv_of(ids)
        store.put(ids, kv)
        for pair in kv:
            for tensor in pair:
                tensor.zero_()
        assert_hit(store.get(ids), ids, 20)
        fs.gate.set()
        store.flush()
        assert_hit(store.get(ids), ids, 20)
    with open_store(tmp_path) as store:
        assert_hit(store.get(ids), ids, 20)


def test_the_token_array_may_be_written_to_after_put(tmp_path: Path) -> None:
    given, ids = tokens(20), tokens(20)
    with open_store(tmp_path) as store:
        store.put(given, kv_of(ids))
        given[:] = 0
        store.flush()
    with open_store(tmp_path) as store:
        assert_hit(store.get(ids), ids, 20)


def test_a_transformers_cache_is_put_without_a_copy(tmp_path: Path) -> None:
    """Its layers replace their tensors and never write into them. A tensor written to all the same shows through
    while the block waits in the queue: so there is no copy."""
    ids, fs = tokens(20), GatedFS()
    with open_store(tmp_path, fs=fs, host=TierConfig(0)) as store:
        fs.shut()
        cache = DynamicCache([(k[None], v[None]) for k, v in kv_of(ids)])
        store.put(ids, cache)
        for layer in cache.layers:
            layer.keys.zero_()
        shown = store.get(ids)
        fs.gate.set()
        assert shown.tiers == {"queue": 20}
        assert not shown.layers[0][0].any()
        assert shown.layers[0][1].any()


def test_a_transformers_cache_may_grow_after_put(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path) as store:
        cache = DynamicCache([(k[None], v[None]) for k, v in kv_of(ids)])
        store.put(ids, cache)
        for number in range(3):
            cache.update(torch.ones(1, 2, 5, 16).bfloat16(), torch.ones(1, 2, 5, 16).bfloat16(), number)
        store.flush()
        assert_hit(store.get(ids), ids, 20)


def test_strided_tensors_are_stored_exactly(store: KVStore) -> None:
    ids = tokens(20)
    kv = [tuple(t.transpose(0, 1).contiguous().transpose(0, 1)[None] for t in pair) for pair in kv_of(ids)]
    store.put(ids, kv)
    store.flush()
    assert_hit(store.get(ids), ids, 20)


# ---- tiers ---------------------------------------------------------------------------------------------------------


def test_what_is_read_from_disk_a_second_time_stays_in_memory(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path) as store:
        put(store, ids)
    with open_store(tmp_path) as store:
        hits = [store.get(ids) for _ in range(3)]
        assert [hit.tiers for hit in hits] == [{"disk": 20}, {"disk": 20}, {"host": 20}]
        for hit in hits:
            assert_hit(hit, ids, 20)


def test_a_hit_says_how_many_tokens_came_from_where(tmp_path: Path) -> None:
    ids = tokens(28)
    with open_store(tmp_path) as store:
        put(store, ids)
    with open_store(tmp_path) as store:
        store.prefetch(ids[:10]).result()  # the first two blocks
        hit = store.get(ids)
        assert hit.tiers == {"host": 16, "disk": 12}
        assert_hit(hit, ids, 28)
        assert hit.seconds > 0


def test_without_a_host_tier_every_get_reads_the_disk(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path, host=TierConfig(0)) as store:
        put(store, ids)
        store.flush()
        for _ in range(2):
            hit = store.get(ids)
            assert hit.tiers == {"disk": 20}
            assert_hit(hit, ids, 20)


def test_the_device_tier_is_nearest(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path, device=TierConfig(1 * MIB, "raw")) as store:
        put(store, ids)
        store.flush()
        hit = store.get(ids)
        assert hit.tiers == {"device": 20}
        assert_hit(hit, ids, 20)
        assert_hit(store.get(ids[:13]), ids, 13)
        assert store.stats()["device"]["bytes"] == 20 * SMALL.bytes_per_token


def test_a_full_device_tier_gives_way_to_the_host(tmp_path: Path) -> None:
    first, second = tokens(16), tokens(16, seed=1)
    room = 16 * SMALL.bytes_per_token
    with open_store(tmp_path, device=TierConfig(room, "raw")) as store:
        put(store, first)
        store.flush()
        put(store, second)
        store.flush()
        assert store.get(first).tiers == {"host": 16}
        assert store.get(second).tiers == {"device": 16}
        assert_hit(store.get(first), first, 16)


def test_a_store_in_memory_alone_needs_no_directory(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path / "none", disk=TierConfig(0)) as store:
        put(store, ids)
        assert store.flush().durable_blocks == 0
        hit = store.get(ids)
        assert hit.tiers == {"host": 20}
        assert_hit(hit, ids, 20)
        assert store.delete(ids) == 3
        assert store.get(ids) is None
    assert not (tmp_path / "none").exists()


def test_the_device_argument_names_where_the_tensors_go(store: KVStore) -> None:
    put(store, tokens(9))
    assert store.get(tokens(9), device="cpu").layers[0][0].device.type == "cpu"
    assert store.get(tokens(9), device=torch.device("cpu")).tokens == 9
