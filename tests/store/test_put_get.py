"""The main job: what was put comes back, exactly, for the longest stored prefix."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcases import (
    BLOCK,
    SMALL,
    GatedFS,
    assert_hit,
    config,
    kv_of,
    mixed_layout,
    open_store,
    put,
    random_kv,
    same_kv,
    tokens,
)
from transformers import DynamicCache

from kvstore import KVStore, TierConfig
from kvstore.config import MIB

# ---- exact to the token --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 37])
def test_what_was_put_comes_back(store: KVStore, count: int) -> None:
    ids = tokens(count)
    put(store, ids)
    assert_hit(store.get(ids), ids, count)
    store.flush()
    assert_hit(store.get(ids), ids, count)


@pytest.mark.parametrize("count", [1, 5, 8, 9, 15, 16, 20, 36])
def test_a_shorter_query_gets_exactly_its_tokens(store: KVStore, count: int) -> None:
    ids = tokens(37)
    put(store, ids)
    store.flush()
    assert_hit(store.get(ids[:count]), ids, count)


@pytest.mark.parametrize("count", [3, 8, 20])
def test_a_longer_query_gets_what_is_stored(store: KVStore, count: int) -> None:
    ids = tokens(40)
    put(store, ids[:count])
    assert_hit(store.get(ids), ids, count)


@pytest.mark.parametrize("same", [1, 7, 8, 12, 15, 16, 19])
def test_a_query_that_diverges_gets_its_tokens_up_to_there(store: KVStore, same: int) -> None:
    ids = tokens(20)
    put(store, ids)
    store.flush()
    other = ids.copy()
    other[same:] += 1
    assert_hit(store.get(other), ids, same)
    assert store.contains(other) == same


def test_a_query_that_shares_nothing_is_a_miss(store: KVStore) -> None:
    put(store, tokens(20))
    assert store.get(tokens(20, seed=1)) is None
    assert store.contains(tokens(20, seed=1)) == 0


def test_an_empty_store_misses(store: KVStore) -> None:
    assert store.get([1, 2, 3]) is None
    assert store.contains([1, 2, 3]) == 0
    assert store.delete([1, 2, 3]) == 0


def test_max_tokens_cuts_the_result(store: KVStore) -> None:
    ids = tokens(20)
    put(store, ids)
    for count in (1, 8, 11):
        assert_hit(store.get(ids, max_tokens=count), ids, count)
    assert_hit(store.get(ids, max_tokens=99), ids, 20)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "3"])
def test_max_tokens_that_is_no_positive_integer_is_refused(store: KVStore, bad: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        store.get([1], max_tokens=bad)


@pytest.mark.parametrize(
    "as_given", [list, tuple, torch.from_numpy, lambda a: a.astype(np.int64)], ids=["list", "tuple", "torch", "int64"]
)
def test_tokens_of_any_kind_name_the_same_sequence(store: KVStore, as_given: Any) -> None:
    ids = tokens(20)
    given = as_given(ids.astype(np.int64)) if as_given is torch.from_numpy else as_given(ids)
    store.put(given, kv_of(ids))
    assert_hit(store.get(ids), ids, 20)
    assert_hit(store.get(given), ids, 20)


def test_the_largest_token_id_is_a_token(store: KVStore) -> None:
    ids = np.array([0, (1 << 32) - 1, 5], np.uint32)
    put(store, ids)
    assert_hit(store.get(ids), ids, 3)
    assert store.contains([0, (1 << 32) - 2]) == 1


# ---- only what is new is stored ------------------------------------------------------------------------------------


def test_a_put_says_what_it_stored(store: KVStore) -> None:
    result = put(store, tokens(20))
    assert (result.tokens, result.new_tokens, result.new_blocks, result.dropped_blocks) == (20, 20, 3, 0)


def test_the_same_put_again_stores_nothing(store: KVStore) -> None:
    put(store, tokens(20))
    again = put(store, tokens(20))
    assert (again.tokens, again.new_tokens, again.new_blocks) == (20, 0, 0)
    store.flush()
    assert store.stats()["disk"]["records"] == 3


def test_a_shorter_put_stores_nothing(store: KVStore) -> None:
    put(store, tokens(20))
    assert put(store, tokens(20)[:18]).new_blocks == 0
    assert put(store, tokens(20)[:5]).new_blocks == 0


def test_growth_stores_only_the_new_blocks_and_replaces_the_tail(store: KVStore) -> None:
    ids = tokens(29)
    put(store, ids[:12])
    store.flush()
    result = put(store, ids)
    assert (result.new_blocks, result.new_tokens) == (3, 21)  # from 8 on: the tail of 4 is stored anew as a block
    store.flush()
    assert store.stats()["disk"]["records"] == store.stats()["index"]["records"] == 4
    assert_hit(store.get(ids), ids, 29)
    assert_hit(store.get(ids[:11]), ids, 11)


def test_growth_token_by_token_keeps_one_tail(store: KVStore) -> None:
    ids = tokens(20)
    for count in range(1, 21):
        put(store, ids[:count])
    store.flush()
    assert store.stats()["disk"]["records"] == 3
    assert_hit(store.get(ids), ids, 20)


def test_forks_share_their_beginning(store: KVStore) -> None:
    ids, other = tokens(24), tokens(24)
    other[16:] = tokens(8, seed=5)
    assert put(store, ids).new_blocks == 3
    assert put(store, other).new_blocks == 1
    store.flush()
    assert store.stats()["disk"]["records"] == 4
    assert_hit(store.get(ids), ids, 24)
    assert_hit(store.get(other), other, 24)


@pytest.mark.parametrize("same", [1, 7, 9, 12])
def test_forks_inside_a_block_are_both_exact(store: KVStore, same: int) -> None:
    ids, other = tokens(20), tokens(20)
    other[same:] = tokens(20 - same, seed=5)
    put(store, ids)
    put(store, other)
    store.flush()
    assert_hit(store.get(ids), ids, 20)
    assert_hit(store.get(other), other, 20)
    third = other.copy()
    third[18:] += 1
    assert_hit(store.get(third), other, 18)


def test_many_sequences_come_back(store: KVStore) -> None:
    prompts = [tokens(16, seed=n) for n in range(3)]
    sequences = [np.concatenate([prompts[n % 3], tokens(1 + n % 19, seed=100 + n)]) for n in range(30)]
    for ids in sequences:
        put(store, ids)
    for ids in sequences:
        assert_hit(store.get(ids), ids, len(ids))


# ---- exact bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "splitzip", "entropy", "zstd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e5m2", "float8_e4m3fn"])
def test_every_bit_pattern_comes_back_from_every_tier(tmp_path: Path, codec: str, dtype: str) -> None:
    layout, ids = mixed_layout(dtype), tokens(21)
    kv = random_kv(21, layout)
    assert any(t.float().isnan().any() for pair in kv for t in pair)
    settings = {"host": TierConfig(1 * MIB, codec), "disk": TierConfig(1 * MIB, codec)}
    fs = GatedFS()
    with open_store(tmp_path, layout, fs=fs, **settings) as store:
        fs.shut()
        store.put(ids, kv)
        queued = store.get(ids)
        fs.gate.set()
        store.flush()
        hosted = store.get(ids)
    with open_store(tmp_path, layout, **settings) as store:
        read = store.get(ids)
    for hit, tier in ((queued, "queue"), (hosted, "host"), (read, "disk")):
        assert hit.tiers == {tier: 21}
        assert same_kv(hit.layers, kv)


def test_the_layers_of_a_hit_have_a_batch_dimension_and_the_layouts_dtype(store: KVStore) -> None:
    put(store, tokens(20))
    hit = store.get(tokens(20))
    assert len(hit.layers) == 3
    assert all(t.shape == (1, 2, 20, 16) and t.dtype == torch.bfloat16 for pair in hit.layers for t in pair)
    assert hit.nbytes == 20 * SMALL.bytes_per_token


@pytest.mark.parametrize("device_bytes", [0, 1 * MIB])
def test_the_caller_owns_what_it_got(tmp_path: Path, device_bytes: int) -> None:
    ids = tokens(20)
    with open_store(tmp_path, device=TierConfig(device_bytes, "raw")) as store:
        put(store, ids)
        for flushed in (False, True):
            if flushed:
                store.flush()
            for pair in store.get(ids).layers:
                for tensor in pair:
                    tensor.zero_()
            assert_hit(store.get(ids), ids, 20)


def test_a_hit_becomes_a_fresh_transformers_cache_each_time(store: KVStore) -> None:
    ids = tokens(20)
    put(store, ids)
    hit = store.get(ids)
    one, other = hit.cache(), hit.cache()
    assert isinstance(one, DynamicCache)
    assert one.get_seq_length() == 20
    more = torch.zeros(1, 2, 1, 16).bfloat16()
    for cache, fill in ((one, 1), (other, 2)):
        cache.update(more + fill, more + fill, 0)
    assert (one.get_seq_length(), other.get_seq_length(), hit.layers[0][0].shape[2]) == (21, 21, 20)
    for cache, fill in ((one, 1), (other, 2)):
        assert (cache.layers[0].keys[..., 20, :] == fill).all()
        assert same_kv([(layer.keys[..., :20, :], layer.values[..., :20, :]) for layer in cache.layers], kv_of(ids))
    assert same_kv(hit.layers, kv_of(ids))


@torch.no_grad()
def test_a_copy_of_a_hit_has_tensors_and_caches_of_its_own(store: KVStore) -> None:
    ids = tokens(20)
    put(store, ids)
    hit = store.get(ids)
    other, before = copy.deepcopy(hit), hit.cache()
    after, more = other.cache(), torch.ones(1, 2, 1, 16).bfloat16()
    for cache in (before, after):
        cache.update(more, more, 0)
        cache.layers[0].keys[..., :20, :].fill_(7)
    assert_hit(store.get(ids), ids, 20)
    assert after.layers[0].keys.data_ptr() != other.layers[0][0].data_ptr()  # nothing is reserved behind a copy
    assert same_kv(other.layers, kv_of(ids))


@torch.no_grad()
def test_reserve_is_room_behind_the_tensors(store: KVStore) -> None:
    ids = tokens(20)
    put(store, ids)
    more = np.concatenate([ids, tokens(9, seed=1)])
    for asked, reserve, room in ((ids, None, 64), (more, None, 64 + 9), (more, 0, 0), (ids, 3, 3)):
        hit = store.get(asked, reserve=reserve)
        assert_hit(hit, ids, 20)
        keys, values = hit.layers[0]
        assert keys.stride(1) == values.stride(1) == (20 + room) * 16
        assert keys.is_contiguous() == (room == 0)
        cache = hit.cache()
        before = cache.layers[0].keys.data_ptr()
        cache.update(*(torch.ones(1, 2, max(room, 1), 16).bfloat16(),) * 2, 0)
        assert (cache.layers[0].keys.data_ptr() == before) == (room > 0)
        assert_hit(hit, ids, 20)
    with pytest.raises(ValueError, match="reserve: expected an integer of at least 0, found -1"):
        store.get(ids, reserve=-1)
    with pytest.raises(ValueError, match="reserve: expected at most"):
        store.get(ids, reserve=1 << 62)
    with pytest.raises(ValueError, match="device: 'nosuch' is not a torch device"):
        store.get(ids, device="nosuch")


def test_a_get_that_cannot_be_allocated_holds_no_segment(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(20)
    put(store, ids)
    store.flush()
    store._residency.host.clear()
    monkeypatch.setattr("kvstore.read.get.allocate", _no_memory)
    with pytest.raises(MemoryError):
        store.get(ids)
    assert [segment.reads for segment in store._residency.disk.segments.by_number.values()] == [0]


def _no_memory(*_: object, **__: object) -> None:
    raise MemoryError


def test_the_helpers_tell_caches_apart() -> None:
    """The positive control of every comparison in this file."""
    ids = tokens(20)
    other = ids.copy()
    other[3] += 1
    assert same_kv(kv_of(ids), kv_of(ids))
    assert same_kv(kv_of(ids[:3]), kv_of(other), 3)
    assert not any(
        torch.equal(a[:, n].view(torch.int16), b[:, n].view(torch.int16))
        for one, two in zip(kv_of(ids), kv_of(other), strict=True)
        for a, b in zip(one, two, strict=True)
        for n in range(3, 20)
    )
    assert config().block_tokens == BLOCK
