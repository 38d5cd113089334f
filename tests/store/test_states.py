"""Layouts with states: which prefixes can be used, and that their states come back bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcases import BLOCK, open_store, random_kv, tokens
from sessionturns import put_one_by_one, six_turns
from statecases import ALTERNATING, HYBRID, LAYOUTS, cache_of, is_state_of

from kvstore import KVLayout, KVStore, TierConfig
from kvstore.config import KIB, MIB
from kvstore.core.explanation import Reason
from kvstore.core.states import State, pack, unpack
from kvstore.errors import UnsupportedCache


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return LAYOUTS[request.param]


def put(store: KVStore, ids: Any, layout: KVLayout) -> None:
    store.put(ids, cache_of(ids, layout))


@pytest.mark.parametrize("codec", ["raw", "splitzip", "entropy", "zstd"])
def test_states_put_closed_and_opened_come_back(tmp_path: Path, layout: KVLayout, codec: str) -> None:
    for count in (1, 7, 8, 9, 40, 45):
        ids = tokens(count, seed=count)
        with open_store(tmp_path / "s", layout, disk=TierConfig(16 * MIB, codec)) as store:
            put(store, ids, layout)
            queued = store.get(ids)
            assert queued is not None
            assert is_state_of(queued, ids, layout)
        with open_store(tmp_path / "s", layout, disk=TierConfig(16 * MIB, codec)) as store:
            for _ in range(2):  # from disk, and from the host tier
                hit = store.get([*ids.tolist(), 1, 2, 3])
                assert hit is not None
                assert hit.tokens == count
                assert is_state_of(hit, ids, layout)
            assert store.check(deep=True).problems == ()


def test_only_the_end_of_a_put_can_be_used(tmp_path: Path, layout: KVLayout) -> None:
    ids = tokens(45)
    with open_store(tmp_path / "s", layout) as store:
        put(store, ids, layout)
        assert [store.contains(ids[:count]) for count in range(1, 46)] == [0] * 44 + [45]
        why = store.explain(ids[:44])
        want = Reason.NO_WINDOW if any(layer.window for layer in layout.layers) else Reason.NO_STATE
        assert (why.tokens, why.reason) == (0, want)
        assert store.get(ids[:44]) is None
        assert want.metric is not None
        assert store.stats()["counters"][want.metric.value] == 1


SEQUENCES = [tokens(60, seed=1), np.concatenate([tokens(21, seed=1), tokens(39, seed=2)])]
STEPS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 60), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.sampled_from(list(LAYOUTS.values())))
def test_the_end_of_every_put_stays_a_place_to_resume(steps: list[tuple[int, int, bool]], layout: KVLayout) -> None:
    with put_one_by_one(layout, put, SEQUENCES, steps) as (store, ends):
        ends |= {(1 - which, count) for which, count in ends if count <= 21}
        for which in (0, 1):
            for count in range(1, 61):
                want = max((end for at, end in ends if at == which and end <= count), default=0)
                assert store.contains(SEQUENCES[which][:count]) == want
                hit = store.get(SEQUENCES[which][:count])
                assert (hit.tokens if hit else 0) == want
                assert hit is None or is_state_of(hit, SEQUENCES[which], layout)


def test_a_session_of_six_turns_is_resumed_after_each_restart(tmp_path: Path, layout: KVLayout) -> None:
    six_turns(tmp_path / "s", layout, cache_of, is_state_of)


def test_the_caller_may_go_on_with_the_cache_at_once(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path / "s", ALTERNATING) as store:
        cache = cache_of(ids, ALTERNATING)
        store.put(ids, cache)
        for layer in (cache.layers[0], cache.layers[1]):
            layer.conv_states[0].zero_()
            layer.recurrent_states[0].zero_()
        hit = store.get(ids)
        assert hit is not None
        assert is_state_of(hit, ids, ALTERNATING)
        hit.cache().layers[0].conv_states[0].zero_()  # a cache of a hit owns its states
        assert is_state_of(hit, ids, ALTERNATING)


def test_a_rebuilt_catalog_knows_where_states_are(tmp_path: Path) -> None:
    ids = tokens(100)
    with open_store(tmp_path / "s", HYBRID) as store:
        for count in (20, 24, 100):
            put(store, ids[:count], HYBRID)
    data = tmp_path / "s" / "catalog" / "data.mdb"
    data.write_bytes(b"\xff" * data.stat().st_size)
    with open_store(tmp_path / "s", HYBRID) as store:
        assert store.stats()["counters"]["catalog_rebuilt"] == 1
        for count, want in ((19, 0), (23, 20), (99, 24), (100, 100)):
            assert store.contains(ids[:count]) == want
            hit = store.get(ids[:count])
            assert (hit.tokens if hit else 0) == want
            assert hit is None or is_state_of(hit, ids, HYBRID)


def test_eviction_leaves_places_that_can_be_used(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", ALTERNATING, disk=TierConfig(1 * MIB, "raw"), host=TierConfig(0)) as store:
        sequences = [tokens(120, seed=seed) for seed in range(60)]
        for ids in sequences:
            put(store, ids[:60], ALTERNATING)
            put(store, ids, ALTERNATING)
        store.flush()
        hits = [(store.get(ids), ids) for ids in sequences]
        assert any(hit for hit, _ in hits)
        assert all(hit is None or is_state_of(hit, ids, ALTERNATING) for hit, ids in hits)
        assert store.stats()["counters"]["disk_evicted_records"] > 0
        assert store.check(deep=True).ok


def test_places_in_a_sequence_are_whole_as_long_as_eviction_leaves_them(tmp_path: Path, layout: KVLayout) -> None:
    """Every place that the index still offers can be gone on from, with all blocks before it and its own states."""
    kept, lost = 0, 0
    with open_store(tmp_path / "s", layout, disk=TierConfig(1 * MIB, "raw"), host=TierConfig(0)) as store:
        sequences = [tokens(96, seed=seed) for seed in range(40)]
        for ids in sequences:
            for end in (32, 64, 96):
                put(store, ids[:end], layout)
            store.flush()
        assert store.stats()["counters"]["disk_evicted_records"] > 0
        for ids in sequences:
            ends = [store.contains(ids[:end]) for end in (32, 64, 96)]
            assert ends == sorted(ends)
            for end in filter(None, ends):
                hit = store.get(ids[:end])
                assert hit is not None
                assert hit.tokens == end
                assert is_state_of(hit, ids, layout)
            kept, lost = kept + sum(map(bool, ends)), lost + ends.count(0)
        assert store.check(deep=True).ok
    assert kept
    assert lost


def test_a_cache_without_the_states_is_refused(tmp_path: Path) -> None:
    ids = tokens(9)
    with open_store(tmp_path / "s", ALTERNATING) as store:
        plain = KVLayout(ALTERNATING.layers, "bfloat16")
        with pytest.raises(UnsupportedCache, match="expected one with states"):
            store.put(ids, random_kv(9, plain))
        cache = cache_of(ids, ALTERNATING)
        cache.layers[1].conv_states[0] = cache.layers[1].recurrent_states[0] = None
        with pytest.raises(UnsupportedCache, match="layer 1 of the cache has no states yet"):
            store.put(ids, cache)
        assert store.contains(ids) == 0


def test_states_that_fit_no_segment_are_refused(tmp_path: Path) -> None:
    ids = tokens(9)
    with open_store(tmp_path / "s", ALTERNATING, segment_bytes=64 * KIB) as store:
        cache = cache_of(ids, ALTERNATING)
        cache.layers[0].recurrent_states[0] = cache.layers[0].recurrent_states[0].repeat(1, 200, 1, 1)
        with pytest.raises(UnsupportedCache, match="larger segment_bytes"):
            store.put(ids, cache)
        assert store.contains(ids) == 0


@pytest.mark.parametrize("where", range(60))
def test_bytes_that_are_no_states_raise_one_error(where: int) -> None:
    cache = cache_of(tokens(9), ALTERNATING)
    data = bytearray(pack(ALTERNATING.states_of(cache)))
    assert [state.place for state in unpack(memoryview(data))] == [0, 1]
    data[where] ^= 0xFF
    with contextlib.suppress(ValueError):
        unpack(memoryview(data))
    with pytest.raises(ValueError, match="states"):
        unpack(memoryview(data)[:where])


def test_a_state_without_tensors_is_one() -> None:
    assert unpack(memoryview(pack([State(7, 2, False)]))) == (State(7, 2, False),)
    assert BLOCK == 8
