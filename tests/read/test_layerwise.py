"""Layers that come one after the other: the same bits as all at once, whatever happens before the last one."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcases import kv_of, open_store, same_kv, tokens
from lazyhits import interrupts_lose_nothing, lazily
from threadruns import run_together
from windowcases import WINDOWED, is_kept, kept

from kvstore import Hit, KVLayout, KVStore, TierConfig
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.config import MIB
from kvstore.core.lazy_layers import LazyLayers
from kvstore.errors import LayerLost
from kvstore.integrations.transformers.cache import cache_layers
from kvstore.integrations.transformers.growing_layer import GrowingLayer
from kvstore.integrations.transformers.lazy_layer import LazyLayer
from kvstore.read import get, layerwise
from kvstore.read.layerwise import LayerDecode, first_share, steps_of

DEEP = KVLayout.uniform(9, 2, 16, "bfloat16")


@pytest.fixture(autouse=True)
def one_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model leaves a processor, whatever machine this is."""
    monkeypatch.setattr(get, "free_processors", lambda: 1)


def waiting(hit: Hit) -> LazyLayers:
    assert isinstance(hit.layers, LazyLayers)
    return hit.layers


def reopened(path: Path, codec: str, count: int = 50, layout: KVLayout = DEEP, **settings: Any) -> KVStore:
    """A store whose records are all on disk."""
    ids, disk = tokens(count), TierConfig(16 * MIB, codec)
    with open_store(path, layout, disk=disk) as store:
        store.put(ids, kv_of(ids, layout))
    return open_store(path, layout, disk=disk, **settings)


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes stores with a block of which a layer was damaged before it was sealed: its checksums are right."""
    encode = EntropyCodec.encode

    def broken(path: Path, layer: int = 8, layout: KVLayout = DEEP) -> KVStore:
        def spoilt(codec: Any, info: Any, view: Any, out: memoryview) -> Any:
            sizes = encode(codec, info, view, out)
            if sizes is not None and info.start == 16:
                begin = sum(sizes[:layer])
                out[begin : begin + sizes[layer]] = b"\xff" * sizes[layer]
            return sizes

        with monkeypatch.context() as spoiling:
            spoiling.setattr(EntropyCodec, "encode", spoilt)
            return reopened(path, "entropy", layout=layout)

    return broken


@pytest.mark.parametrize("codec", ["raw", "splitzip", "entropy", "zstd"])
@pytest.mark.parametrize("count", [50, 48, 13, 3])
def test_the_bits_are_those_of_all_at_once(tmp_path: Path, codec: str, count: int) -> None:
    with reopened(tmp_path, codec) as store:
        hit = lazily(store, tokens(count))
        assert isinstance(hit.layers, LazyLayers)
        assert hit.tokens == count
        assert same_kv(tuple(hit.layers), kv_of(tokens(count), DEEP))
        assert store.check().problems == ()


@pytest.mark.parametrize("order", [range(9), range(8, -1, -1), [4, 0, 8, 4]])
def test_layers_may_be_taken_in_any_order(tmp_path: Path, order: Any) -> None:
    expected = kv_of(tokens(50), DEEP)
    with reopened(tmp_path, "entropy") as store:
        layers = waiting(lazily(store, tokens(50)))
        for number in order:
            assert same_kv([layers[number]], [expected[number]])
        assert same_kv(layers[2:5], expected[2:5])
        assert same_kv([layers[-1]], expected[-1:])
        assert len(layers) == 9


@pytest.mark.parametrize("place", ["queue", "host"])
def test_blocks_in_memory_come_so_too(tmp_path: Path, place: str) -> None:
    ids = tokens(50)
    with open_store(tmp_path, DEEP, host=TierConfig(16 * MIB, "splitzip")) as store:
        store.put(ids, kv_of(ids, DEEP))
        if place == "host":
            store.flush()
        assert same_kv(tuple(lazily(store, ids).layers), kv_of(ids, DEEP))


def test_a_cache_waits_layer_by_layer_and_grows(tmp_path: Path) -> None:
    expected = kv_of(tokens(50), DEEP)
    with reopened(tmp_path, "entropy") as store, torch.no_grad():
        cache = lazily(store, tokens(50)).cache()
        assert all(type(layer) is LazyLayer for layer in cache.layers)
        assert cache.get_seq_length() == 50
        more = torch.ones(1, 2, 1, 16, dtype=torch.bfloat16)
        for number, (keys, values) in enumerate(expected):
            k, v = cache.update(more, -more, number)
            assert same_kv([(k[:, :, :50], v[:, :, :50])], [(keys, values)])
            assert type(cache.layers[number]) is GrowingLayer
        cache.crop(-1)
        assert same_kv(cache_layers(cache), expected)


@pytest.mark.parametrize("change", [lambda c: c.crop(-10), lambda c: c.reset(), copy.deepcopy])
def test_a_waiting_cache_takes_every_change(tmp_path: Path, change: Any) -> None:
    with reopened(tmp_path, "entropy") as store:
        cache = lazily(store, tokens(50)).cache()
        cache = change(cache) or cache
        left = cache.get_seq_length()
        assert left in (40, 0, 50)
        assert not left or same_kv(cache_layers(cache), kv_of(tokens(50), DEEP), left)


def test_each_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    """So that a copy of one that is there does not take along, and share, what is not decoded yet of the others."""
    with reopened(tmp_path, "entropy") as store:
        tensors = [tensor for pair in waiting(lazily(store, tokens(50))).tensors for tensor in pair]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 18


def test_a_waiting_layer_can_be_taken_apart_as_pickle_does(tmp_path: Path) -> None:
    with reopened(tmp_path, "entropy") as store:
        layer = lazily(store, tokens(50)).cache().layers[8]
        assert same_kv([(layer.keys, layer.values)], kv_of(tokens(50), DEEP)[8:])
        make, parts, state = lazily(store, tokens(50)).cache().layers[8].__reduce_ex__(4)[:3]
        again = make(*parts)
        again.__dict__.update(state)
        assert torch.equal(again.keys.view(torch.int16), layer.keys.view(torch.int16))


def as_pickle_does(layers: LazyLayers) -> Any:
    make, parts = layers.__reduce_ex__(4)  # type: ignore[misc]
    return make(*parts)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, as_pickle_does])
def test_layers_that_wait_are_copied_as_what_they_become(tmp_path: Path, copied: Any) -> None:
    with reopened(tmp_path, "entropy") as store:
        again = copied(waiting(lazily(store, tokens(50))))
        assert type(again) is tuple
        assert same_kv(again, kv_of(tokens(50), DEEP))


def test_what_waits_can_be_put_again(tmp_path: Path) -> None:
    ids = tokens(50)
    with reopened(tmp_path, "entropy") as store:
        for number, kv in enumerate((lazily(store, ids).cache(), lazily(store, ids).layers)):
            assert store.put(ids, kv, namespace=str(number)).new_tokens == 50
            found = store.get(ids, namespace=str(number))
            assert found is not None
            assert same_kv(found.layers, kv_of(ids, DEEP))


def test_a_hit_can_be_shown_before_its_layers_are_there(tmp_path: Path) -> None:
    with reopened(tmp_path, "entropy") as store:
        hit = lazily(store, tokens(50))
        assert "9 layers" in repr(hit)
        assert hit.nbytes == 50 * DEEP.bytes_per_token


def test_a_session_resumes_so(tmp_path: Path) -> None:
    ids = tokens(50)
    with open_store(tmp_path, DEEP) as store:
        store.session("alice").save(ids, kv_of(ids, DEEP))
        store.flush()
        hit = store.session("alice").resume(lazy=True)
        assert hit is not None
        assert same_kv(tuple(hit.layers), kv_of(ids, DEEP))


# ---- what cannot come so -------------------------------------------------------------------------------------------


def test_windows_come_at_once_and_are_counted(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path, WINDOWED) as store:
        store.put(ids, kept(ids))
        hit = lazily(store, ids)
        assert isinstance(hit.layers, tuple)
        assert is_kept(hit, ids)
        assert store.stats()["counters"]["fallback_not_lazy"] == 1


def test_a_get_that_does_not_ask_gets_a_tuple(tmp_path: Path) -> None:
    with reopened(tmp_path, "entropy") as store:
        hit = store.get(tokens(50))
        assert hit is not None
        assert isinstance(hit.layers, tuple)


# ---- losses --------------------------------------------------------------------------------------------------------


def test_a_damaged_layer_is_lost_and_those_before_it_are_not(tmp_path: Path, damaged: Any) -> None:
    expected = kv_of(tokens(50), DEEP)
    with damaged(tmp_path) as store:
        hit = lazily(store, tokens(50))
        layers, last = waiting(hit), steps_of(9)[-1].start
        for number in range(last):
            assert same_kv([layers[number]], [expected[number]])
        for _ in range(2):
            with pytest.raises(LayerLost, match=f"layer {last} cannot be decoded"):
                layers[last]
        assert store.stats()["counters"]["fallback_layer_lost"] == 2
        assert_hit_of_rest(store)
        assert store.stats()["counters"]["damaged_codec"] == 1
        assert store.check().problems == ()


def assert_hit_of_rest(store: KVStore) -> None:
    again = store.get(tokens(50))
    assert again is not None
    assert again.tokens == 16
    assert same_kv(again.layers, kv_of(tokens(50), DEEP), 16)


def test_a_damaged_layer_within_a_step_is_found_with_the_step(tmp_path: Path, damaged: Any) -> None:
    """Layers that are decoded together are lost together, with all behind them; those before are not."""
    deep = KVLayout.uniform(30, 2, 16, "bfloat16")
    step = next(step for step in steps_of(30)[1:] if len(step) > 2)
    expected = kv_of(tokens(50), deep)
    with damaged(tmp_path, layer=step.start + 1, layout=deep) as store:
        layers = waiting(lazily(store, tokens(50)))
        assert same_kv(layers[: step.start], expected[: step.start])
        for number in step:
            with pytest.raises(LayerLost, match=f"layer {number} cannot be decoded"):
                layers[number]


def test_blocks_of_several_codecs_come_so(tmp_path: Path) -> None:
    ids = tokens(50)
    for count, codec in ((16, "entropy"), (32, "splitzip"), (48, "raw"), (50, "entropy")):
        with open_store(tmp_path, DEEP, disk=TierConfig(16 * MIB, codec)) as store:
            store.put(ids[:count], [tuple(t[:, :count] for t in pair) for pair in kv_of(ids, DEEP)])
    with open_store(tmp_path, DEEP) as store:
        assert same_kv(tuple(waiting(lazily(store, ids))), kv_of(ids, DEEP))


@pytest.mark.parametrize("unit_bytes", [1, 5_000, MIB])
def test_units_of_every_size_hold_all_layers_of_all_blocks(
    tmp_path: Path, unit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerwise, "_UNIT_BYTES", unit_bytes)
    with reopened(tmp_path, "entropy") as store:
        assert same_kv(tuple(waiting(lazily(store, tokens(50)))), kv_of(tokens(50), DEEP))


def test_a_block_of_which_the_first_layers_are_damaged_makes_the_prefix_shorter(tmp_path: Path, damaged: Any) -> None:
    with damaged(tmp_path, layer=0) as store:
        hit = lazily(store, tokens(50))
        assert hit.tokens == 16
        assert same_kv(tuple(hit.layers), kv_of(tokens(50), DEEP), 16)


def test_a_repair_fills_what_is_lost(tmp_path: Path, damaged: Any) -> None:
    expected, asked = kv_of(tokens(50), DEEP), []

    with damaged(tmp_path) as store:
        layers = waiting(lazily(store, tokens(50)))

        def repair(number: int) -> bool:
            asked.append(number)
            for pair, other in zip(layers.tensors[number:], expected[number:], strict=True):
                for tensor, value in zip(pair, other, strict=True):
                    tensor[0].copy_(value)
            return True

        layers.repair = repair
        assert same_kv(tuple(layers), expected)
        assert asked == [steps_of(9)[-1].start]


def test_a_repair_that_fails_loses_the_layer(tmp_path: Path, damaged: Any) -> None:
    with damaged(tmp_path) as store:
        layers = waiting(lazily(store, tokens(50)))
        layers.repair = lambda number: False
        with pytest.raises(LayerLost):
            tuple(layers)


# ---- ends in between -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["splitzip", "entropy"])
def test_layers_come_after_the_store_is_closed(tmp_path: Path, codec: str) -> None:
    store = reopened(tmp_path, codec)
    hit = lazily(store, tokens(50))
    cache = hit.cache()
    store.close()
    assert same_kv(tuple(hit.layers), kv_of(tokens(50), DEEP))
    assert same_kv(cache_layers(cache), kv_of(tokens(50), DEEP))


def test_a_layer_may_be_lost_after_the_store_is_closed(tmp_path: Path, damaged: Any) -> None:
    store = damaged(tmp_path)
    hit = lazily(store, tokens(50))
    store.close()
    with pytest.raises(LayerLost):
        tuple(hit.layers)


def test_a_hit_that_nobody_reads_is_freed(tmp_path: Path) -> None:
    with reopened(tmp_path, "entropy") as store:
        hit = lazily(store, tokens(50))
        tensors, cache = weakref.ref(hit.layers.tensors[0][0]), hit.cache()  # type: ignore[attr-defined]
        assert cache.get_seq_length() == 50
        del hit, cache
        assert store.check().problems == ()
    gc.collect()
    assert tensors() is None


def test_an_interrupt_of_a_wait_loses_nothing(tmp_path: Path) -> None:
    expected = kv_of(tokens(50), DEEP)
    with reopened(tmp_path, "entropy", threads=1) as store:
        interrupts_lose_nothing(store, lambda: lazily(store, tokens(50)), expected)


def test_threads_may_wait_for_the_same_layers(tmp_path: Path) -> None:
    expected = kv_of(tokens(50), DEEP)
    with reopened(tmp_path, "entropy", threads=2) as store:
        layers = waiting(lazily(store, tokens(50)))
        found: list[bool] = []
        run_together(*[lambda: found.append(same_kv(tuple(layers), expected))] * 4)
        assert found == [True] * 4


def test_many_gets_at_once(tmp_path: Path) -> None:
    expected = kv_of(tokens(50), DEEP)
    with reopened(tmp_path, "entropy", threads=2) as store:
        found: list[bool] = []

        def work() -> None:
            for _ in range(5):
                found.append(same_kv(tuple(lazily(store, tokens(50)).layers), expected))

        run_together(*[work] * 4)
        assert found == [True] * 20
        assert store.check().problems == ()


def test_a_thread_of_the_store_takes_no_layers_that_are_decoded_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for them, and so would it for the next ones that the same thread begins."""
    begun: list[LayerDecode] = []
    begin = LayerDecode.begin

    def noted(later: LayerDecode, *arguments: Any) -> bool:
        begun.append(later)
        return begin(later, *arguments)

    monkeypatch.setattr(LayerDecode, "begin", noted)
    monkeypatch.setattr(LayerDecode, "_line_up", lambda later: None)  # threads do nothing of their own
    with reopened(tmp_path, "entropy") as store:
        layers = waiting(lazily(store, tokens(50)))
        later, units = begun[0], begun[0]._units
        with units[0].lock:
            later.step()
            assert [unit.done for unit in units[:3]] == [False, True, False]
        later._finish(units[2])
        later.step()
        assert [unit.done for unit in units[:4]] == [False, True, True, True]
        assert same_kv(tuple(layers), kv_of(tokens(50), DEEP))


def test_the_gate_learns_what_decoding_takes(tmp_path: Path) -> None:
    with reopened(tmp_path, "entropy", threads=1) as store:
        tuple(lazily(store, tokens(50)).layers)
        assert store.stats()["gate"]["entropy_decode_s_per_MB"] > 0


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7, 30, 61])
def test_steps_are_all_layers_in_order(layers: int) -> None:
    steps = steps_of(layers)
    assert [number for step in steps for number in step] == list(range(layers))
    assert all(steps)


@pytest.mark.parametrize("layers", [1, 2, 9, 30, 61])
@pytest.mark.parametrize("share", [0.1, 0.37, 0.5, 0.99, 1.0])
def test_the_get_itself_decodes_no_less_than_its_share(layers: int, share: float) -> None:
    steps = steps_of(layers, share)
    assert [number for step in steps for number in step] == list(range(layers))
    assert all(steps)
    assert share * layers <= len(steps[0]) < share * layers + 1


def test_the_share_follows_from_the_time_that_reading_leaves() -> None:
    assert first_share(1.0, 0.04, 2, 1) == 0.1  # all of it can be done beside the model
    assert first_share(0.0, 10.0, 2, 1) == 0.1  # nothing is waited for
    assert first_share(100.0, 10.0, 2, 1) == 0.99  # but what the model's pass has time for
    assert first_share(1.0, 10.0, 2, 1) < first_share(2.0, 10.0, 2, 1) < first_share(2.0, 10.0, 4, 1)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_layers_that_the_get_decodes_are_there_at_once(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get, "first_share", lambda *_: share)
    with reopened(tmp_path, "entropy") as store:
        hit = lazily(store, tokens(50))
        assert isinstance(hit.layers, LazyLayers) is (share < 1)
        assert same_kv(tuple(hit.layers), kv_of(tokens(50), DEEP))


def test_without_a_free_processor_all_layers_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get, "free_processors", lambda: 0)
    with reopened(tmp_path, "entropy") as store:
        hit = lazily(store, tokens(50))
        assert not isinstance(hit.layers, LazyLayers)
        assert same_kv(hit.layers, kv_of(tokens(50), DEEP))
        assert store.stats()["counters"]["fallback_not_lazy"] == 1


def test_a_layout_of_one_layer_has_nothing_to_wait_for(tmp_path: Path) -> None:
    layout, ids = KVLayout.uniform(1, 2, 16, "bfloat16"), tokens(20)
    with open_store(tmp_path, layout) as store:
        store.put(ids, kv_of(ids, layout))
        store.flush()
        assert same_kv(tuple(lazily(store, ids).layers), kv_of(ids, layout))
