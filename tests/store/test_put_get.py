"""The main job: what was put comes back, exactly, for the longest stored prefix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcases import BLOCK, SMALL, GatedFS, config, identity, kv_of, mixed_layout, open_store, random_kv, same_kv, tokens
from transformers import DynamicCache

from kvstore import Hit, KVLayout, KVStore, StoreConfig, TierConfig
from kvstore.config import MIB
from kvstore.errors import StoreClosed


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path) as opened:
        yield opened


def put(store: KVStore, ids: Any, **settings: Any):
    return store.put(ids, kv_of(ids), **settings)


def assert_hit(hit: Hit | None, ids: Any, count: int) -> None:
    assert hit is not None
    assert hit.tokens == count
    assert same_kv(hit.layers, kv_of(ids[:count]))


# ---- exact to the token ------------------------------------------------------------------------------------------


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


# ---- only what is new is stored ----------------------------------------------------------------------------------


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


# ---- exact bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_bit_pattern_comes_back_from_every_tier(tmp_path: Path, codec: str, dtype: str) -> None:
    layout, ids = mixed_layout(dtype), tokens(21)
    kv = random_kv(21, layout)
    assert any(t.isnan().any() for pair in kv for t in pair)
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
    with open_store(tmp_path, device=TierConfig(device_bytes)) as store:
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
    one.update(torch.zeros(1, 2, 1, 16).bfloat16(), torch.zeros(1, 2, 1, 16).bfloat16(), 0)
    assert (one.get_seq_length(), other.get_seq_length(), hit.layers[0][0].shape[2]) == (21, 20, 20)
    assert same_kv([(layer.keys, layer.values) for layer in other.layers], kv_of(ids))


# ---- whose memory ------------------------------------------------------------------------------------------------


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


# ---- tiers -------------------------------------------------------------------------------------------------------


def test_a_restart_reads_from_disk_and_then_from_memory(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path) as store:
        put(store, ids)
    with open_store(tmp_path) as store:
        first, second = store.get(ids), store.get(ids)
        assert (first.tiers, second.tiers) == ({"disk": 20}, {"host": 20})
        assert_hit(first, ids, 20)
        assert_hit(second, ids, 20)


def test_a_hit_says_how_many_tokens_came_from_where(tmp_path: Path) -> None:
    ids = tokens(28)
    with open_store(tmp_path) as store:
        put(store, ids)
    with open_store(tmp_path) as store:
        store.get(ids[:10])  # promotes the first two blocks
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
    with open_store(tmp_path, device=TierConfig(1 * MIB)) as store:
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
    with open_store(tmp_path, device=TierConfig(room)) as store:
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


# ---- namespaces --------------------------------------------------------------------------------------------------


def test_namespaces_share_nothing(tmp_path: Path) -> None:
    ids = tokens(20)
    mine, theirs = random_kv(20, seed=1), random_kv(20, seed=2)
    with open_store(tmp_path) as store:
        assert store.put(ids, mine, namespace=b"mine").new_blocks == 3
        assert store.get(ids) is None
        assert store.get(ids, namespace=b"theirs") is None
        assert store.put(ids, theirs, namespace=b"theirs").new_blocks == 3
    with open_store(tmp_path) as store:
        assert same_kv(store.get(ids, namespace=b"mine").layers, mine)
        assert same_kv(store.get(ids, namespace=b"theirs").layers, theirs)
        assert store.contains(ids, namespace=b"mine") == 20
        assert store.delete(ids, namespace=b"mine") == 3
        assert store.contains(ids, namespace=b"mine") == 0
        assert store.contains(ids, namespace=b"theirs") == 20
        assert store.prefetch(ids, namespace=b"mine").result(30) == 0


def test_only_configured_namespaces_are_taken(tmp_path: Path) -> None:
    ids = tokens(3)
    with open_store(tmp_path, namespaces=(b"a", b"b")) as store:
        store.put(ids, kv_of(ids), namespace=b"a")
        assert store.get(ids, namespace=b"a").tokens == 3
        for call in (
            lambda: store.put(ids, kv_of(ids), namespace=b"c"),
            lambda: store.get(ids),
            lambda: store.contains(ids, namespace=b"c"),
            lambda: store.prefetch(ids, namespace=b"c"),
            lambda: store.delete(ids, namespace=b"c"),
            lambda: store.session("s", namespace=b"c"),
        ):
            with pytest.raises(ValueError, match=r"namespace: .* is not one of the configured namespaces"):
                call()


@pytest.mark.parametrize("configured", [(), (b"a",)])
def test_a_namespace_that_is_not_bytes_is_refused_by_name(tmp_path: Path, configured: tuple[bytes, ...]) -> None:
    with open_store(tmp_path, namespaces=configured) as store:
        for namespace in ("a", 5, None):
            with pytest.raises(ValueError, match="namespace: expected bytes"):
                store.get([1], namespace=namespace)


# ---- probabilities -----------------------------------------------------------------------------------------------


def bits_of(store: KVStore, ids: np.ndarray) -> float:
    """What the index knows about the information in a prefix."""
    from kvstore.identity import namespace_digest

    return store._residency.index.match(namespace_digest(b""), ids, touch=False).bits


def test_logprobs_reach_the_index_and_survive_a_restart(tmp_path: Path) -> None:
    ids = tokens(20)
    logprobs = -np.arange(20) * np.log(2.0)  # 0, 1, 2, ... bits
    with open_store(tmp_path) as store:
        store.put(ids, kv_of(ids), logprobs=logprobs)
        assert bits_of(store, ids) == pytest.approx(190)
    with open_store(tmp_path) as store:
        assert bits_of(store, ids) == pytest.approx(190)


def test_of_a_fork_the_beginning_and_each_end_keep_their_own_bits(tmp_path: Path) -> None:
    ids, other = tokens(16), tokens(16)
    other[8:] = tokens(8, seed=5)
    with open_store(tmp_path) as store:
        for sequence, end in ((ids, 1.0), (other, 3.0)):
            put(store, sequence, logprobs=np.repeat([-0.5, -end], 8) * np.log(2.0))
    with open_store(tmp_path) as store:
        assert [bits_of(store, x) for x in (ids[:8], ids, other)] == pytest.approx([4, 12, 28])


def test_logprobs_may_be_a_tensor_with_a_gradient(store: KVStore) -> None:
    ids = tokens(4)
    store.put(ids, kv_of(ids), logprobs=torch.full((4,), -np.log(2.0), dtype=torch.float32, requires_grad=True))
    assert bits_of(store, ids) == pytest.approx(4)


def test_without_logprobs_every_token_has_sixteen_bits(store: KVStore) -> None:
    put(store, tokens(20))
    assert bits_of(store, tokens(20)) == 320


@pytest.mark.parametrize("bad", [[0.0] * 19, [[0.0] * 20], [1.0] * 20, [float("nan")] * 20, "x"])
def test_logprobs_that_do_not_fit_are_refused_and_nothing_is_stored(store: KVStore, bad: Any) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        put(store, tokens(20), logprobs=bad)
    assert store.contains(tokens(20)) == 0


# ---- delete, close -----------------------------------------------------------------------------------------------


def test_a_deleted_sequence_is_gone_also_after_a_restart(tmp_path: Path) -> None:
    ids, other = tokens(20), tokens(20, seed=1)
    with open_store(tmp_path) as store:
        put(store, ids)
        put(store, other)
        store.flush()
        assert store.delete(ids) == 3
        assert store.get(ids) is None
        assert store.stats()["disk"]["records"] == 3
    with open_store(tmp_path) as store:
        assert store.get(ids) is None
        assert_hit(store.get(other), other, 20)


def test_a_sequence_deleted_before_it_was_written_is_never_written(tmp_path: Path) -> None:
    ids, fs = tokens(20), GatedFS()
    with open_store(tmp_path, fs=fs) as store:
        put(store, tokens(9, seed=3))
        store.flush()
        fs.shut()
        put(store, tokens(9, seed=4))  # holds up the writing thread
        assert fs.waiting.wait(30)
        put(store, ids)
        with ThreadPoolExecutor(1) as executor:
            deleted = executor.submit(store.delete, ids)  # durable on return: waits for the write under way
            while store.contains(ids):
                time.sleep(0.001)
            fs.gate.set()
            assert deleted.result(30) == 3
        store.flush()
        assert store.stats()["disk"]["records"] == 4
    with open_store(tmp_path) as store:
        assert store.get(ids) is None


def test_deleting_keeps_what_others_share(store: KVStore) -> None:
    ids, other = tokens(24), tokens(24)
    other[16:] = tokens(8, seed=5)
    put(store, ids)
    put(store, other)
    store.flush()
    assert store.delete(ids) == 1
    assert_hit(store.get(other), other, 24)
    assert_hit(store.get(ids), ids, 16)


def test_deleting_a_sequence_that_is_not_stored_in_full_removes_nothing(store: KVStore) -> None:
    put(store, tokens(20)[:12])
    assert store.delete(tokens(20)) == 0
    assert store.contains(tokens(20)) == 12


def test_deleted_tokens_can_be_put_again(store: KVStore) -> None:
    put(store, tokens(20))
    store.delete(tokens(20))
    assert put(store, tokens(20)).new_blocks == 3
    store.flush()
    assert_hit(store.get(tokens(20)), tokens(20), 20)


def test_a_closed_store_refuses_everything_and_closes_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    session = store.session("s")
    put(store, tokens(3))
    store.close()
    store.close()
    for call in (
        lambda: put(store, tokens(3)),
        lambda: store.get([1]),
        lambda: store.contains([1]),
        lambda: store.prefetch([1]),
        lambda: store.delete([1]),
        store.flush,
        store.stats,
        store.sessions,
        lambda: store.session("s"),
        session.resume,
        session.delete,
        lambda: session.save(tokens(3), kv_of(tokens(3))),
        lambda: session.tokens,
    ):
        with pytest.raises(StoreClosed):
            call()


def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    ids = tokens(20)
    store = open_store(tmp_path)
    put(store, ids)
    store.close()
    with open_store(tmp_path) as again:
        assert_hit(again.get(ids), ids, 20)


# ---- settings ----------------------------------------------------------------------------------------------------


def test_a_store_opens_with_settings_from_toml_and_environment(tmp_path: Path) -> None:
    (tmp_path / "store.toml").write_text(
        "[kvstore]\nblock_tokens = 8\nsegment_bytes = 65536\n[kvstore.disk]\nbytes = 1048576\ncodec = 'raw'\n"
    )
    settings = StoreConfig.from_env(
        {"KVSTORE_HOST_BYTES": "65536"}, base=StoreConfig.from_toml(tmp_path / "store.toml")
    )
    with KVStore(tmp_path / "store", identity(), settings) as store:
        put(store, tokens(20))
        store.flush()
        stats = store.stats()
        assert (stats["disk"]["budget"], stats["host"]["budget"], stats["disk"]["records"]) == (1048576, 65536, 3)


@pytest.mark.parametrize("count", [1, 3, 64])
def test_any_block_size_is_exact(tmp_path: Path, count: int) -> None:
    ids = tokens(20)
    with open_store(tmp_path, block_tokens=count) as store:
        put(store, ids)
        store.flush()
        for length in (1, 2, 3, 19, 20):
            assert_hit(store.get(ids[:length]), ids, length)


def test_a_codec_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gzip' is unknown"):
        open_store(tmp_path, disk=TierConfig(1 * MIB, "gzip"))


def test_a_block_that_does_not_fit_a_segment_is_refused_at_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="segment_bytes: a block of 8 tokens can take"):
        open_store(tmp_path, KVLayout.uniform(32, 8, 128))


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
