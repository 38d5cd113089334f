"""From a device into the store and back, on a GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernelruns import needs_triton, on_a_gpu
from kvcases import Layers, identity, same_kv, tokens

from kvstore import KVLayout, KVStore, StoreConfig, TierConfig
from kvstore.codecs.splitzip.codec import SplitZipCodec
from kvstore.config import KIB, MIB
from kvstore.read.result import allocate
from kvstore.tiers.buffers import BufferPool

pytestmark = needs_triton
LAYOUT = KVLayout.uniform(6, 2, 64)
COUNT = 200  # three blocks and a tail


def _kv(seed: int = 0) -> Layers:
    generator = torch.Generator("cuda").manual_seed(seed)

    def tensor() -> torch.Tensor:
        values = torch.randn(2, COUNT, 64, device="cuda", generator=generator)
        values.view(-1)[::1009] = 1e-7
        return values.bfloat16()

    return [(tensor(), tensor()) for _ in LAYOUT.layers]


def _to(kv: Any, device: str) -> Layers:
    return [(k.to(device), v.to(device)) for k, v in kv]


def _open(path: Path, **tiers: TierConfig) -> KVStore:
    none: dict[str, Any] = {"device": TierConfig(0), "host": TierConfig(0), "disk": TierConfig(0)}
    return KVStore(path, identity(LAYOUT), StoreConfig(**{**none, **tiers}, segment_bytes=512 * KIB))


def _payloads(store: KVStore) -> list[bytes]:
    store.flush()
    return [bytes(item.payload) for _, item in sorted(store._residency.host._items.items())]


@on_a_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_this_gpu_codes(dtype: str) -> None:
    assert SplitZipCodec().codes_on(torch.device("cuda", 0), dtype)


@on_a_gpu
@pytest.mark.parametrize("codec", ["raw", "splitzip"])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_cuda_caches_come_back_from_every_tier(tmp_path: Path, tier: str, codec: str) -> None:
    ids, kv = tokens(COUNT), _kv()
    with _open(tmp_path, **{tier: TierConfig(16 * MIB, codec)}) as store:
        store.put(ids, kv)
        store.flush()
        for device in ("cpu", "cuda"):
            for count in (COUNT, 70):
                hit = store.get(ids[:count], device=device)
                assert hit is not None
                assert hit.tiers == {tier: count}
                assert hit.layers[0][0].device.type == device
                assert same_kv(_to(hit.layers, "cpu"), _to(kv, "cpu"), count)
        assert "fallback_device_codec" not in store.stats()["counters"]
        if tier == "device":
            raw = COUNT * LAYOUT.bytes_per_token
            held = store.stats()["device"]["bytes"]
            assert held == raw if codec == "raw" else held < 0.8 * raw
            assert all(block.memory.is_cuda for block in store._residency.device._items.values())


@on_a_gpu
def test_the_gpu_writes_the_records_that_the_cpu_writes(tmp_path: Path) -> None:
    ids, kv = tokens(COUNT), _kv()
    with _open(tmp_path / "a", host=TierConfig(16 * MIB, "splitzip"), device=TierConfig(16 * MIB, "splitzip")) as store:
        store.put(ids, kv)
        by_gpu = _payloads(store)
        on_gpu = [b.memory.cpu().numpy().tobytes() for _, b in sorted(store._residency.device._items.items())]
    with _open(tmp_path / "b", host=TierConfig(16 * MIB, "splitzip")) as store:
        store.put(ids, _to(kv, "cpu"))
        by_cpu = _payloads(store)
    assert len(by_cpu) == 4
    assert by_gpu == on_gpu == by_cpu


@on_a_gpu
@pytest.mark.parametrize("codec", ["raw", "splitzip"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_cache_that_another_stream_still_computes_is_stored_as_it_will_be(
    tmp_path: Path, tier: str, codec: str
) -> None:
    """Threads of the store read it; they know nothing of the stream that the program computes on."""
    ids, kv = tokens(COUNT), _kv()
    with _open(tmp_path, **{tier: TierConfig(16 * MIB, codec)}) as store:
        store.put(tokens(COUNT, seed=1), _kv(seed=1))  # kernels are compiled
        store.flush()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            late = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv]
            torch.cuda._sleep(1_000_000_000)  # clock cycles: most of a second
            for pair, other in zip(late, kv, strict=True):
                for tensor, value in zip(pair, other, strict=True):
                    tensor.copy_(value)
            store.put(ids, late)
        store.flush()
        hit = store.get(ids)
        assert hit is not None
        assert same_kv(hit.layers, _to(kv, "cpu"))


@on_a_gpu
@pytest.mark.parametrize("codec", ["raw", "splitzip"])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_demotion_waits_for_nothing_that_is_computed_after_the_put(tmp_path: Path, tier: str, codec: str) -> None:
    ids, kv = tokens(COUNT), _kv()
    with _open(tmp_path, **{tier: TierConfig(16 * MIB, codec)}) as store:
        for name in (b"once", b"twice"):  # kernels are compiled, and memory is at hand
            store.put(ids, kv, namespace=name)
            store.flush()
            store.delete_namespace(name)
        torch.cuda.synchronize()
        store.put(ids, kv)
        torch.cuda._sleep(6_000_000_000)  # clock cycles: seconds
        done = torch.cuda.current_stream().record_event()
        store.flush()
        assert not done.query(), "the demotion waited for the computation, or that took no time"
        torch.cuda.synchronize()
        hit = store.get(ids)
        assert hit is not None
        assert same_kv(hit.layers, _to(kv, "cpu"))


@on_a_gpu
def test_a_program_may_write_into_its_tensors_once_put_has_returned(tmp_path: Path) -> None:
    ids, kv = tokens(COUNT), _kv()
    with _open(tmp_path, host=TierConfig(16 * MIB, "splitzip")) as store:
        torch.cuda.synchronize()
        expected = _to(kv, "cpu")
        torch.cuda._sleep(1_000_000_000)  # the default stream, where the copies are made, is busy
        with torch.cuda.stream(torch.cuda.Stream()):
            store.put(ids, kv)
            for pair in kv:
                for tensor in pair:
                    tensor.zero_()
        store.flush()
        hit = store.get(ids)
        assert hit is not None
        assert same_kv(hit.layers, expected)


@on_a_gpu
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_result_on_the_gpu_is_decoded_there(tmp_path: Path, tier: str) -> None:
    ids, kv = tokens(COUNT), _kv()
    with _open(tmp_path, **{tier: TierConfig(16 * MIB, "splitzip")}) as store:
        store.put(ids, kv)
        store.flush()
        reads = store._lookup.reads(store._digest(b""), ids)
        where = store._engine.getter.placement.decode_device(reads, "cuda")
        assert where == torch.device("cuda", torch.cuda.current_device())
        result = allocate(LAYOUT, COUNT, 0, BufferPool(0), where)
        assert store._engine.getter.fetcher.fetch(reads, result.view) == (4, {tier: COUNT})
        assert same_kv(_to(result.layers(COUNT), "cpu"), _to(kv, "cpu"))


@on_a_gpu
def test_a_result_that_the_cpu_must_decode_is_made_there(tmp_path: Path) -> None:
    with _open(tmp_path, host=TierConfig(16 * MIB, "zstd")) as store:
        store.put(tokens(COUNT), _kv())
        store.flush()
        reads = store._lookup.reads(store._digest(b""), tokens(COUNT))
        assert store._engine.getter.placement.decode_device(reads, "cuda") is None


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_a_result_for_the_cpu_stays_there(tmp_path: Path, device: Any) -> None:
    with _open(tmp_path, host=TierConfig(16 * MIB, "raw")) as store:
        assert store._engine.getter.placement.decode_device([], device) is None
