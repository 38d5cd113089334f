"""The device tier, raw and coded, without a device: on the CPU the same logic runs with the CPU's codec."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcases import SMALL, Layers, mixed_layout, open_store, random_kv, same_kv, tokens
from threadruns import HANGS_S

from kvstore import KVLayout, KVStore, TierConfig
from kvstore.codecs import BlockInfo, KVView, codec_by_name
from kvstore.codecs.device import codes_on_device
from kvstore.codecs.splitzip.codec import SplitZipCodec
from kvstore.config import MIB
from kvstore.errors import CodecError
from kvstore.tiers.device import DeviceBlock
from kvstore.write import plan as planner

LAYOUTS = {"uniform": SMALL, "mixed": mixed_layout("bfloat16"), "float32": KVLayout.uniform(2, 3, 10, "float32")}
NO_DISK: dict[str, Any] = {"disk": TierConfig(0), "host": TierConfig(0)}


def smooth(count: int, layout: KVLayout = SMALL, seed: int = 0) -> Layers:
    """Normal values, as caches have them: splitzip makes them smaller."""
    generator = torch.Generator().manual_seed(1000 * seed + count)
    dtype = getattr(torch, layout.dtype)
    return [
        tuple(torch.randn(x.heads, count, dim, generator=generator).to(dtype) for dim in (x.key_dim, x.value_dim))
        for x in layout.layers
    ]  # type: ignore[misc]


def info_of(layout: KVLayout, count: int) -> BlockInfo:
    return BlockInfo(layout, np.arange(count, dtype=np.uint32), 0)


def back(block: DeviceBlock, count: int) -> Layers:
    out = random_kv(count, block.info.layout, seed=99)
    block.copy_to(KVView.of_layers(block.info.layout, out))
    return out


def coded_bytes(layout: KVLayout, kv: Layers) -> int:
    info = info_of(layout, kv[0][0].shape[1])
    codec = codec_by_name("splitzip")
    sizes = codec.encode(info, KVView.of_layers(layout, kv), memoryview(bytearray(codec.bound(info))))
    assert sizes is not None
    return sum(sizes)


def coded_blocks(kv: Layers, block: int = 8) -> int:
    """What the blocks of a sequence take, coded."""
    count = kv[0][0].shape[1]
    starts = range(0, count, block)
    return sum(coded_bytes(SMALL, [(k[:, s : s + block], v[:, s : s + block]) for k, v in kv]) for s in starts)


def without_rows(layout: KVLayout, kv: Any, *, checked: bool = False) -> KVView:
    """As tensors of a device: only torch can copy them."""
    tensors = [tensor for pair in kv for tensor in pair]
    return KVView(layout, tensors[0].shape[1], None, tensors, tensors)


# ---- one block -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("make", [DeviceBlock.raw, DeviceBlock.coded], ids=["raw", "coded"])
@pytest.mark.parametrize("kind", [smooth, random_kv], ids=["smooth", "random"])
def test_a_block_and_each_of_its_prefixes_comes_back(
    layout: KVLayout, make: Callable[..., DeviceBlock], kind: Callable[..., Layers]
) -> None:
    kv = kind(13, layout)
    block = make(info_of(layout, 13), KVView.of_layers(layout, kv))
    for count in (1, 5, 13):
        assert same_kv(back(block, count), kv, count)


@pytest.mark.parametrize("make", [DeviceBlock.raw, DeviceBlock.coded], ids=["raw", "coded"])
def test_a_block_is_a_copy(make: Callable[..., DeviceBlock]) -> None:
    kv = smooth(9)
    block, before = make(info_of(SMALL, 9), KVView.of_layers(SMALL, kv)), smooth(9)
    for pair in kv:
        for tensor in pair:
            tensor.zero_()
    assert same_kv(back(block, 9), before)


def test_a_coded_block_costs_its_coded_bytes_and_no_more() -> None:
    kv = smooth(64)
    info, view = info_of(SMALL, 64), KVView.of_layers(SMALL, kv)
    block = DeviceBlock.coded(info, view)
    assert block.nbytes == block.memory.untyped_storage().nbytes() == coded_bytes(SMALL, kv)
    assert block.nbytes < 0.8 * DeviceBlock.raw(info, view).nbytes == 0.8 * view.nbytes


def test_damaged_memory_is_a_codec_error() -> None:
    block = DeviceBlock.coded(info_of(SMALL, 9), KVView.of_layers(SMALL, smooth(9)))
    block.memory[0] ^= 1  # the mode of the first layer
    with pytest.raises(CodecError):
        back(block, 9)


@pytest.mark.parametrize("make", [DeviceBlock.raw, DeviceBlock.coded], ids=["raw", "coded"])
def test_a_device_that_has_no_kernels_holds_raw_blocks(make: Callable[..., DeviceBlock]) -> None:
    kv = smooth(9)
    view = without_rows(SMALL, kv)
    assert not codes_on_device(SplitZipCodec(), view)
    block = make(info_of(SMALL, 9), view)
    assert block.nbytes == view.nbytes
    assert same_kv(back(block, 5), kv, 5)
    out = random_kv(9, seed=3)
    block.copy_to(without_rows(SMALL, out))
    assert same_kv(out, kv)


# ---- in a store ----------------------------------------------------------------------------------------------------


def test_a_coded_device_tier_answers_with_every_bit(tmp_path: Path) -> None:
    ids, kv = tokens(20), smooth(20)
    with open_store(tmp_path, device=TierConfig(1 * MIB, "splitzip")) as store:
        store.put(ids, kv)
        store.flush()
        for count in (20, 13, 1):
            hit = store.get(ids[:count])
            assert hit is not None
            assert hit.tiers == {"device": count}
            assert same_kv(hit.layers, kv, count)
        assert store.stats()["device"] == {"bytes": coded_blocks(kv), "budget": 1 * MIB, "records": 3}
        assert coded_blocks(kv) < 20 * SMALL.bytes_per_token
        assert "fallback_device_codec" not in store.stats()["counters"]


def test_a_budget_that_holds_one_raw_block_less_holds_them_all_coded(tmp_path: Path) -> None:
    ids, kv = tokens(64), smooth(64)
    room = 7 * 8 * SMALL.bytes_per_token
    assert coded_blocks(kv) <= room
    for codec, records in (("raw", 7), ("splitzip", 8)):
        with open_store(tmp_path / codec, device=TierConfig(room, codec)) as store:
            store.put(ids, kv)
            store.flush()
            assert store.stats()["device"]["records"] == records
            hit = store.get(ids)
            assert hit is not None
            assert same_kv(hit.layers, kv)


def test_a_full_coded_tier_gives_way_to_the_host(tmp_path: Path) -> None:
    first, second = tokens(16), tokens(16, seed=1)
    kvs = [smooth(16), smooth(16, seed=1)]
    room = max(map(coded_blocks, kvs))
    with open_store(tmp_path, device=TierConfig(room, "splitzip")) as store:
        for ids, kv in zip((first, second), kvs, strict=True):
            store.put(ids, kv)
            store.flush()
        hits = store.get(first), store.get(second)
        assert [hit.tiers for hit in hits if hit is not None] == [{"host": 16}, {"device": 16}]
        assert all(hit is not None and same_kv(hit.layers, kv) for hit, kv in zip(hits, kvs, strict=True))
        assert store.stats()["device"]["bytes"] <= room


def test_the_budget_of_a_coded_tier_holds_at_every_moment(tmp_path: Path) -> None:
    budget = 5 * coded_blocks(smooth(8))
    with open_store(tmp_path, device=TierConfig(budget, "splitzip"), **NO_DISK) as store:
        tier, above, over = store._residency.device, [], threading.Event()

        def watch() -> None:
            while not over.wait(0.0005):
                if tier.nbytes > budget:
                    above.append(tier.nbytes)

        thread = threading.Thread(target=watch)
        thread.start()
        for seed in range(60):
            store.put(tokens(24, seed), smooth(24, seed=seed))
        store.flush()
        over.set()
        thread.join()
        assert above == []
        assert tier.nbytes == sum(item.nbytes for item in tier._items.values()) <= budget
        assert tier.nbytes > budget // 2, "the budget is not used"
        last = store.get(tokens(24, 59))
        assert last is not None
        assert same_kv(last.layers, smooth(24, seed=59), last.tokens)


def test_a_damaged_block_of_the_tier_ends_the_prefix_and_is_counted(tmp_path: Path) -> None:
    ids, kv = tokens(20), smooth(20)
    with open_store(tmp_path, device=TierConfig(1 * MIB, "splitzip"), **NO_DISK) as store:
        store.put(ids, kv)
        store.flush()
        store._residency.device._items[2].memory[0] ^= 1
        hit = store.get(ids)
        assert hit is not None
        assert hit.tokens == 8
        assert same_kv(hit.layers, kv, 8)
        counters = store.stats()["counters"]
        assert counters["damaged_codec"] == counters["quarantined_records"] == 1


# ---- what a device refuses is counted ------------------------------------------------------------------------------


@pytest.fixture
def posing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put poses as tensors of a device."""
    monkeypatch.setattr(planner, "KVView", SimpleNamespace(of_layers=without_rows))


def stored(store: KVStore, count: int = 20) -> dict[str, Any]:
    """The counters, after a put and a get that must give back every bit."""
    ids, kv = tokens(count), smooth(count)
    store.put(ids, kv)
    store.flush()
    hit = store.get(ids)
    assert hit is not None
    assert hit.tokens == count
    assert same_kv(hit.layers, kv)
    counters: dict[str, Any] = store.stats()["counters"]
    return counters


@pytest.mark.usefixtures("posing")
def test_blocks_that_their_device_does_not_code_are_counted(tmp_path: Path) -> None:
    tiers = {"device": TierConfig(1 * MIB, "splitzip"), "host": TierConfig(1 * MIB, "splitzip")}
    with open_store(tmp_path, **tiers) as store:
        assert stored(store)["fallback_device_codec"] == 2 * 3
        assert store.stats()["device"]["bytes"] == 20 * SMALL.bytes_per_token


@pytest.mark.usefixtures("posing")
def test_codecs_that_no_device_has_fall_back_from_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path, device=TierConfig(1 * MIB, "raw")) as store:  # raw, raw, zstd
        assert "fallback_device_codec" not in stored(store)


@pytest.mark.usefixtures("posing")
def test_a_device_without_memory_is_counted_and_the_block_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DeviceBlock, "coded", full)
    with open_store(tmp_path, device=TierConfig(1 * MIB, "splitzip")) as store:
        assert stored(store)["device_full"] == 3
        assert store.stats()["device"]["records"] == 0


@pytest.mark.usefixtures("posing")
def test_a_device_without_memory_to_code_leaves_it_to_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    name = "kvstore.codecs.splitzip.kernels.blocks"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(encode_into=full))  # type: ignore[arg-type]
    monkeypatch.setattr(SplitZipCodec, "codes_on", lambda *_: True)
    with open_store(tmp_path, host=TierConfig(1 * MIB, "splitzip")) as store:
        assert stored(store)["fallback_device_codec"] == 3


def test_a_block_that_cannot_be_decoded_where_it_is_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_to = DeviceBlock.copy_to

    def full(block: DeviceBlock, target: KVView) -> None:
        if block.nbytes and block in held:
            raise torch.OutOfMemoryError("CUDA out of memory")
        copy_to(block, target)

    with open_store(tmp_path, device=TierConfig(1 * MIB, "splitzip")) as store:
        store.put(tokens(20), smooth(20))
        store.flush()
        held = _Same(store._residency.device._items.values())
        monkeypatch.setattr(DeviceBlock, "copy_to", full)
        assert stored(store)["fallback_device_codec"] == 3


class _Same:
    """`in` by identity."""

    def __init__(self, items: Any) -> None:
        self.ids = {id(item) for item in items}

    def __contains__(self, item: object) -> bool:
        return id(item) in self.ids


def test_without_triton_nothing_is_coded_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstore.codecs.splitzip.kernels.blocks", None)  # type: ignore[arg-type]
    assert not SplitZipCodec().codes_on(torch.device("cuda", 0), "bfloat16")


def test_tensors_on_the_cpu_do_not_import_triton() -> None:
    code = (
        "import sys, torch; from kvstore.codecs.splitzip.codec import SplitZipCodec\n"
        "assert not SplitZipCodec().codes_on(torch.device('cpu'), 'bfloat16')\n"
        "assert 'triton' not in sys.modules and 'kvstore.codecs.splitzip.kernels.blocks' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANGS_S)
