"""The path from a device into the store and back, in triton's interpreter: `python interpreted_store.py GROUP...`.

Tensors on the CPU pose as a device's: their views have no rows, so that nothing but torch and the kernels reads them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import kernelgroups
import numpy as np
import pytest
import torch
from kvcases import Layers, identity, mixed_layout, random_kv, same_kv, tokens
from threadruns import HANGS_S

from kvstore import KVLayout, KVStore, StoreConfig, TierConfig
from kvstore.codecs import BlockInfo, KVView, codec_by_name
from kvstore.codecs.device import codes_on_device
from kvstore.codecs.launching import LAUNCH
from kvstore.codecs.splitzip.kernels import blocks
from kvstore.config import KIB, MIB
from kvstore.errors import CodecError
from kvstore.tiers.device import DeviceBlock
from kvstore.write import plan as planner

CODEC = codec_by_name("splitzip")
CPU = torch.device("cpu")
LAYOUTS = [
    (KVLayout.uniform(2, 2, 16), 8),
    (mixed_layout("bfloat16"), 37),
    (KVLayout.uniform(1, 2, 33, "float16"), 20),
    (KVLayout.uniform(1, 1, 64, "float32"), 70),
]


def smooth(count: int, layout: KVLayout, seed: int = 0) -> Layers:
    """Normal values with a few escapes."""
    generator = torch.Generator().manual_seed(count + 1000 * seed)
    kv = []
    for x in layout.layers:
        pair = [torch.randn(x.heads, count, dim, generator=generator) for dim in (x.key_dim, x.value_dim)]
        for tensor in pair:
            tensor.view(-1)[::97] = 1e-6
        kv.append(tuple(tensor.to(getattr(torch, layout.dtype)) for tensor in pair))
    return kv  # type: ignore[return-value]


def posing(layout: KVLayout, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], checked: bool = False) -> KVView:
    tensors = [tensor for pair in kv for tensor in pair]
    return KVView(layout, tensors[0].shape[1], None, tensors, tensors)


def info_of(layout: KVLayout, count: int) -> BlockInfo:
    return BlockInfo(layout, np.arange(count, dtype=np.uint32), 0)


def coded(info: BlockInfo, view: KVView) -> tuple[bytes, tuple[int, ...]]:
    out = bytearray(b"\xa5" * (CODEC.bound(info) + 1))
    sizes = CODEC.encode(info, view, memoryview(out)[:-1])
    assert sizes is not None
    assert not out[sum(sizes) :].strip(b"\xa5")
    return bytes(out[: sum(sizes)]), sizes


@contextmanager
def calls(name: str) -> Iterator[list[object]]:
    """What `blocks.NAME` was called with: so that a test does not pass on the CPU's codec."""
    function, seen = getattr(blocks, name), []

    def counted(*arguments: Any) -> Any:
        seen.append(arguments)
        return function(*arguments)

    setattr(blocks, name, counted)
    try:
        yield seen
    finally:
        setattr(blocks, name, function)


def encoding() -> None:
    for layout, count in LAYOUTS:
        info = info_of(layout, count)
        for kv in (smooth(count, layout), random_kv(count, layout)):
            with calls("encode_into") as seen:
                found = coded(info, posing(layout, kv))
            assert len(seen) == 1
            assert found == coded(info, KVView.of_layers(layout, kv))
            short = bytearray(len(found[0]) - 1)
            assert CODEC.encode(info, posing(layout, kv), memoryview(short)) is None
            exact = bytearray(len(found[0]))
            assert CODEC.encode(info, posing(layout, kv), memoryview(exact)) == found[1]
    # A cache is one long run; a block is a slice of it. And as models make them: tokens before heads.
    for layout, count in LAYOUTS[1:3]:
        info, kv = info_of(layout, count), smooth(count, layout)
        found = coded(info, KVView.of_layers(layout, kv))
        wide = [tuple(torch.cat([t, t, t], 1) for t in pair) for pair in kv]
        assert coded(info, posing(layout, wide).narrow(count, count)) == found
        turned = [tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in pair) for pair in kv]
        assert coded(info, posing(layout, turned)) == found
        apart = [tuple(torch.stack([t, t], 3)[..., 0] for t in pair) for pair in kv]
        assert apart[0][0].stride(2) == 2
        assert coded(info, posing(layout, apart)) == found


def joined() -> None:
    """Blocks that threads code at the same time are coded by few launches, as alone; one that is damaged harms no
    other."""
    cases = [(info_of(layout, count), smooth(count, layout, seed)) for layout, count in LAYOUTS for seed in (1, 2)]
    right = [coded(info, KVView.of_layers(info.layout, kv)) for info, kv in cases]
    assert [coded(info, posing(info.layout, kv)) for info, kv in cases] == right
    with calls("encode_block") as seen:
        found = at_once(lambda of: coded(of[0], posing(of[0].layout, of[1])), cases)
    assert found == right
    assert len(seen) < len(cases)

    def decoded(number: int) -> str:
        (info, kv), (payload, sizes) = cases[number], right[number]
        data = bytearray(payload)
        if number == 3:
            data[len(data) // 2] ^= 1
            data[-1] ^= 255
        room = [tuple(torch.zeros_like(t) for t in pair) for pair in kv]
        wanted = info.count - number % 2
        target = posing(info.layout, room).narrow(0, wanted)
        try:
            CODEC.decode(info, memoryview(data), sizes, target)
        except CodecError:
            return "damaged"
        kept = [tuple(t[:, :wanted] for t in pair) for pair in kv]
        return "same" if same_kv([tuple(t[:, :wanted] for t in pair) for pair in room], kept) else "wrong"

    with calls("decode_blocks") as seen:
        outcomes = at_once(decoded, range(len(cases)))
    assert outcomes[:3] + outcomes[4:] == ["same"] * (len(cases) - 1), outcomes
    assert outcomes[3] != "same"
    assert len(seen) < len(cases)
    # What is on another device is launched on a stream of that one.
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert blocks.encoding(one) is blocks.encoding(one) is not blocks.encoding(other)
    assert blocks.decoding(one) is blocks.decoding(one) is not blocks.decoding(other)


def at_once(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """What threads make of the items that come while nothing may be launched."""
    with ThreadPoolExecutor(len(items)) as pool:
        with LAUNCH:
            found = [pool.submit(work, item) for item in items]
            begin = time.monotonic()
            joined = (blocks.encoding(CPU), blocks.decoding(CPU))
            while sum(len(together._waiting) for together in joined) < len(items) - 1:
                assert time.monotonic() < begin + HANGS_S
                time.sleep(0.001)
        return [future.result(HANGS_S) for future in found]


def decoding() -> None:
    for layout, count in LAYOUTS:
        info = info_of(layout, count)
        for kv in (smooth(count, layout), random_kv(count, layout)):
            payload, sizes = coded(info, KVView.of_layers(layout, kv))
            for wanted in {1, count // 2, count}:
                around = random_kv(count + 9, layout, seed=3)
                target = [tuple(t.clone() for t in pair) for pair in around]
                with calls("decode_from") as seen:
                    CODEC.decode(info, memoryview(payload), sizes, posing(layout, target).narrow(4, wanted))
                assert len(seen) == 1
                for pair, before, original in zip(target, around, kv, strict=True):
                    for t, b, o in zip(pair, before, original, strict=True):
                        expected = torch.cat([b[:, :4], o[:, :wanted], b[:, 4 + wanted :]], 1)
                        assert same_kv([(t, t)], [(expected, expected)])
    layout, count = LAYOUTS[0]
    info, kv = info_of(layout, count), smooth(count, layout)
    payload, sizes = coded(info, KVView.of_layers(layout, kv))
    apart = posing(layout, [tuple(torch.stack([t, t], 3)[..., 0] for t in pair) for pair in kv])
    with pytest.raises(ValueError, match="contiguous"):
        CODEC.decode(info, memoryview(payload), sizes, apart)
    other = codec_by_name("entropy")  # no kernel decodes it
    out = bytearray(other.bound(info))
    written = other.encode(info, posing(layout, kv), memoryview(out))
    assert written is not None
    back = random_kv(count, layout, seed=5)
    other.decode(info, memoryview(out)[: sum(written)], written, posing(layout, back))
    assert same_kv(back, kv)


def hostile() -> None:
    """Whatever the CPU's decoder refuses the device's does, and where neither does they agree."""
    layout, count = KVLayout.uniform(2, 1, 24), 40
    info = info_of(layout, count)
    payload, sizes = coded(info, KVView.of_layers(layout, smooth(count, layout)))
    random = np.random.default_rng(0)
    places = [*range(12), *(sizes[0] + np.arange(12)).tolist(), *random.integers(0, len(payload), 30).tolist()]
    places += [sizes[0] - 1 - i for i in range(24)]  # ends, bases, escapes
    refused = [0, 0]
    for place in places:
        damaged = bytearray(payload)
        damaged[place] ^= 1 << int(random.integers(8))
        outcomes = []
        for which, make in enumerate((KVView.of_layers, posing)):
            out = random_kv(count, layout, seed=7)
            try:
                CODEC.decode(info, memoryview(damaged), sizes, make(layout, out))
                outcomes.append(out)
            except CodecError:
                refused[which] += 1
                outcomes.append(None)
        if outcomes[0] is None:
            assert outcomes[1] is None, f"byte {place}: the CPU refuses it"
        elif outcomes[1] is not None:
            assert same_kv(outcomes[1], outcomes[0]), f"byte {place}"
    assert 12 < refused[0] == refused[1] < len(places)
    first, second = sizes
    view = posing(layout, random_kv(count, layout))
    for wrong in ((first - 16, second + 16), (first + 16, second - 16), (0, first + second), (first - 1, second + 1)):
        with pytest.raises(CodecError):
            CODEC.decode(info, memoryview(payload), wrong, view)
    with pytest.raises(CodecError):
        CODEC.decode(info, memoryview(payload)[:-16], (first, second - 16), view)
    longer = memoryview(payload + bytes(16))  # the kernel alone would not mind what lies behind the last escape
    for make in (KVView.of_layers, posing):
        with pytest.raises(CodecError):
            CODEC.decode(info, longer, (first, second + 16), make(layout, random_kv(count, layout)))


def tier() -> None:
    for layout, count in LAYOUTS:
        kv = smooth(count, layout)
        info = info_of(layout, count)
        block = DeviceBlock.coded(info, posing(layout, kv))
        expected, sizes = coded(info, KVView.of_layers(layout, kv))
        assert (block.on_cpu, block.view, block.layer_sizes) == (False, None, sizes)
        assert block.memory.numpy().tobytes() == expected
        assert block.nbytes == block.memory.untyped_storage().nbytes() == len(expected)
        for held in (block, block.fetched()):
            for wanted in (1, count):
                for make in (KVView.of_layers, posing):
                    out = random_kv(wanted, layout, seed=3)
                    held.copy_to(make(layout, out))
                    assert same_kv(out, kv, wanted)
    block.memory[0] ^= 1
    for make in (KVView.of_layers, posing):
        with pytest.raises(CodecError):
            block.copy_to(make(layout, random_kv(count, layout)))


def opened(path: str, **tiers: TierConfig) -> KVStore:
    none: dict[str, Any] = {"device": TierConfig(0), "host": TierConfig(0), "disk": TierConfig(0)}
    config = StoreConfig(**{**none, **tiers}, block_tokens=8, segment_bytes=64 * KIB, threads=2)
    return KVStore(path, identity(LAYOUTS[0][0]), config)


def store() -> None:
    layout, ids = LAYOUTS[0][0], tokens(20)
    kv = smooth(20, layout)
    planner.KVView = SimpleNamespace(of_layers=posing)  # type: ignore[misc,assignment]
    places = {"device": "encode", "host": "encode_into", "disk": "encode_into"}
    for name, function in places.items():
        with tempfile.TemporaryDirectory() as path, calls(function) as seen:
            with opened(path, **{name: TierConfig(1 * MIB, "splitzip")}) as written:
                written.put(ids, kv)
                written.flush()
                assert len(seen) == 3
                for count in (20, 13):
                    hit = written.get(ids[:count])
                    assert hit is not None
                    assert hit.tiers == {name: count}
                    assert same_kv(hit.layers, kv, count)
                # As a result on the device gets it.
                reads = written._lookup.reads(written._digest(b""), ids)
                room = random_kv(20, layout, seed=4)
                assert written._engine.getter.fetcher.fetch(reads, posing(layout, room)) == (3, {name: 20})
                assert same_kv(room, kv)
                assert "fallback_device_codec" not in written.stats()["counters"]
            assert name != "disk" or _read_again(path, ids, kv)
    # Another codec's records into a result on the device, and blocks that wait in the queue.
    with tempfile.TemporaryDirectory() as path, opened(path, host=TierConfig(1 * MIB, "zstd")) as written:
        written.put(ids, kv)
        written.flush()
        room = random_kv(20, layout, seed=4)
        reads = written._lookup.reads(written._digest(b""), ids)
        assert written._engine.getter.fetcher.fetch(reads, posing(layout, room)) == (3, {"host": 20})
        assert same_kv(room, kv)


def _read_again(path: str, ids: np.ndarray[Any, Any], kv: Layers) -> bool:
    with opened(path, disk=TierConfig(1 * MIB, "raw")) as again:
        hit = again.get(ids)
        return hit is not None and hit.tiers == {"disk": 20} and same_kv(hit.layers, kv)


def control() -> None:
    """Rowless views are coded by kernels here, views with rows never."""
    layout, count = LAYOUTS[0]
    kv = smooth(count, layout)
    assert codes_on_device(CODEC, posing(layout, kv))
    assert not codes_on_device(CODEC, KVView.of_layers(layout, kv))
    works = blocks._encode
    blocks.works.cache_clear()
    blocks._encode = None  # type: ignore[assignment]
    assert not codes_on_device(CODEC, posing(layout, kv)), "kernels that raise must not be used"
    blocks._encode = works
    blocks.works.cache_clear()


if __name__ == "__main__":
    kernelgroups.run({f.__name__: f for f in (control, encoding, joined, decoding, hostile, tier, store)})
