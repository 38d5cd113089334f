"""Layers of records whose layers need each other: predicted ones, and those that are coded against donors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_stores
import numpy as np
import pytest
import torch
from family_stores import LAYOUT as ALIKE
from family_stores import behind, config, members, passage
from kvcases import same_kv
from lazyhits import interrupts_lose_nothing, lazily
from predicted_stores import COUNT, LAYOUT, SECTIONS, TOKENS, contents, predicted_store
from profilecases import identity_of

from kvstore import Hit, KVStore, StoreConfig, TierConfig
from kvstore.codecs.predictive.levels.mode import LevelMode
from kvstore.config import MIB
from kvstore.core.lazy_layers import LazyLayers
from kvstore.errors import LayerLost
from kvstore.metrics import Metric
from kvstore.read import get
from kvstore.read.layerwise import steps_of


@pytest.fixture(autouse=True)
def one_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model leaves a processor, whatever machine this is."""
    monkeypatch.setattr(get, "free_processors", lambda: 1)


def waiting(store: KVStore, ids: Any) -> Hit:
    hit = lazily(store, ids)
    assert isinstance(hit.layers, LazyLayers)
    return hit


@pytest.mark.parametrize("codec", SECTIONS)
@pytest.mark.parametrize("count", [COUNT, 48, 13])
def test_predicted_layers_come_one_after_the_other(tmp_path: Path, codec: str, count: int) -> None:
    with predicted_store(tmp_path, codec) as store:
        hit = waiting(store, TOKENS[:count])
        assert hit.tokens == count
        assert same_kv(tuple(hit.layers), contents(codec), count)
        assert store.check().problems == ()


@pytest.mark.parametrize("order", [range(9), range(8, -1, -1), [4, 0, 8, 4]])
def test_predicted_layers_may_be_taken_in_any_order(tmp_path: Path, order: Any) -> None:
    expected = contents("predictive:3")
    with predicted_store(tmp_path, "predictive:3") as store:
        layers = waiting(store, TOKENS).layers
        for number in order:
            assert same_kv([layers[number]], [expected[number]])


def test_predicted_layers_come_after_the_store_is_closed(tmp_path: Path) -> None:
    store = predicted_store(tmp_path, "predictive:1")
    hit = waiting(store, TOKENS)
    store.close()
    assert same_kv(tuple(hit.layers), contents("predictive:1"))


def test_an_interrupt_of_a_wait_loses_nothing(tmp_path: Path) -> None:
    expected = contents("predictive:1")
    with predicted_store(tmp_path, "predictive:1") as store:
        interrupts_lose_nothing(store, lambda: waiting(store, TOKENS), expected)


def test_a_damaged_layer_is_lost_and_those_before_it_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block that was damaged before it was sealed, whose checksums are right."""
    expected, encode = contents("predictive:1"), LevelMode._encode_on_cpu

    def spoilt(mode: Any, info: Any, view: Any, out: memoryview, limit: int) -> Any:
        sizes = encode(mode, info, view, out, limit)
        if isinstance(sizes, tuple) and info.start == 16:
            end = sum(sizes)
            out[end - sizes[-1] + 40 : end] = b"\xff" * (sizes[-1] - 40)
        return sizes

    with monkeypatch.context() as spoiling:
        spoiling.setattr(LevelMode, "_encode_on_cpu", spoilt)
        store = predicted_store(tmp_path, "predictive:1")
    with store:
        layers, last = waiting(store, TOKENS).layers, steps_of(9)[-1].start
        assert same_kv([layers[number] for number in range(last)], expected[:last])
        for _ in range(2):
            with pytest.raises(LayerLost, match=f"layer {last} cannot be decoded"):
                layers[last]
        again = store.get(TOKENS)
        assert again is not None
        assert again.tokens == 16
        assert same_kv(again.layers, expected, 16)
        assert store.stats()["counters"]["damaged_codec"] == 1
        assert store.check().problems == ()


def test_predicted_blocks_and_others_come_together(tmp_path: Path) -> None:
    expected, more = contents("predictive:1"), np.concatenate([TOKENS[:48], TOKENS[:40]])
    kv = [tuple(torch.cat([t[:, :48], t[:, :40]], 1) for t in pair) for pair in expected]
    predicted_store(tmp_path, "predictive:1").close()
    made = StoreConfig(host=TierConfig(0), disk=TierConfig(16 * MIB, "entropy"), block_tokens=16)
    with KVStore(tmp_path / "store", identity_of(LAYOUT), made) as store:
        assert store.put(more, kv).new_tokens == 40
        store.flush()
        assert same_kv(tuple(waiting(store, more).layers), kv)


def test_a_missing_profile_is_counted_as_often_as_by_a_get_of_all_layers(tmp_path: Path) -> None:
    predicted_store(tmp_path, "predictive:1").close()
    shutil.rmtree(tmp_path / "store" / "profiles")
    made = StoreConfig(host=TierConfig(0), disk=TierConfig(16 * MIB, "entropy"), block_tokens=16)
    counted = []
    for lazy in (False, True):
        with KVStore(tmp_path / "store", identity_of(LAYOUT), made) as store:
            assert store.get(TOKENS, lazy=lazy) is None
            counted.append(store.stats()["counters"][Metric.UNKNOWN_PROFILE.value])
    assert counted[0] == counted[1] > 0


# ---- donors --------------------------------------------------------------------------------------------------------


@pytest.fixture
def family(tmp_path: Path) -> Iterator[KVStore]:
    """A store that holds a text, and the same text behind another beginning, coded against it."""
    text = passage(1)
    with KVStore(tmp_path, family_stores.IDENTITY, config()) as store:
        family_stores.put(store, text)
        family_stores.put(store, behind(10, text))
        store.flush()
        assert members(store) >= 3
        store._engine.assembler.reader.clear()
        yield store


def test_layers_of_members_come_one_after_the_other(family: KVStore) -> None:
    ids = behind(10, passage(1))
    hit = waiting(family, ids)
    assert hit.tokens == len(ids)
    assert family_stores.is_exact(hit, ids)
    family_stores.families_hold(family)


def test_members_come_after_their_donors_are_deleted_and_the_store_is_closed(family: KVStore) -> None:
    ids = behind(10, passage(1))
    hit = waiting(family, ids)
    family.delete(passage(1))
    family.close()
    assert family_stores.is_exact(hit, ids)


def test_the_first_layers_of_a_member_are_there_before_the_last(family: KVStore) -> None:
    ids = behind(10, passage(1))
    layers, expected = waiting(family, ids).layers, family_stores.kv_of(ids)
    for number in range(len(ALIKE.layers)):
        assert same_kv([layers[number]], [expected[number]])
