"""Some layers of some blocks at once: the same bits as block by block, and what is damaged is named."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from codeccontract import empty, encode
from codecrows import DTYPES, likely_kv
from kvcases import mixed_layout, random_kv, same_kv

import kvstore.codecs._native as _native
from kvstore import KVLayout
from kvstore.codecs import BlockInfo, Codec, KVView, codec_by_name
from kvstore.codecs.base import CodedBlock
from kvstore.codecs.tensor_memory import row_shapes

APART = ["raw", "splitzip", "entropy", "zstd"]
COUNTS = (16, 16, 7, 5)  # tokens of blocks; of the last but one only 4 are wanted
WANTED = (16, 16, 4, 5)
CHOICES = [(range(9), range(4)), (range(1), range(1, 3)), (range(3, 8), range(2, 4)), (range(8, 9), range(0))]


def coded(codec: Codec, layout: KVLayout, random: bool) -> tuple[list[CodedBlock], list[Any]]:
    """Blocks one behind the other, and what they hold."""
    blocks, caches, at = [], [], 0
    for number, (count, wanted) in enumerate(zip(COUNTS, WANTED, strict=True)):
        info = BlockInfo(layout, np.arange(count, dtype=np.uint32), 100 * number)
        kv = random_kv(count, layout) if random else likely_kv(layout, count)
        payload, sizes = encode(codec, info, kv)
        blocks.append(CodedBlock(info, memoryview(bytearray(payload)), sizes, at, wanted))
        caches.append([tuple(tensor[:, :wanted] for tensor in pair) for pair in kv])
        at += wanted
    return blocks, caches


def decoded(call: Any, codec: Codec, blocks: list[CodedBlock], layout: KVLayout, layers: range, numbers: range) -> Any:
    out = empty(layout, sum(WANTED) + 1, 0x55)
    found = call(codec, blocks, KVView.of_layers(layout, out))(layers, numbers)
    return out, found


def layouts(dtype: str) -> list[KVLayout]:
    return [KVLayout.uniform(9, 2, 16, dtype), mixed_layout(dtype)]


@pytest.mark.parametrize("random", [True, False], ids=["random", "likely"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", APART)
def test_the_bits_are_those_of_one_block_after_the_other(name: str, dtype: str, random: bool) -> None:
    codec = codec_by_name(name)
    for layout in layouts(dtype):
        blocks, caches = coded(codec, layout, random)
        depth = len(layout.layers)
        for layers, numbers in CHOICES:
            part = range(min(layers.start, depth - 1), min(layers.stop, depth))
            out, bad = decoded(type(codec).by_layers, codec, blocks, layout, part, numbers)
            plain, none = decoded(Codec.by_layers, codec, blocks, layout, part, numbers)
            assert bad == none == []
            assert same_kv(out, plain)  # and so nothing else was written
            for number in numbers:
                at, wanted = blocks[number].at, WANTED[number]
                for layer in part:
                    here = tuple(tensor[:, at : at + wanted] for tensor in out[layer])
                    assert same_kv([here], [caches[number][layer]])


@pytest.mark.parametrize("name", ["splitzip", "entropy"])
def test_every_damaged_block_is_named_and_the_others_are_decoded(name: str) -> None:
    codec, layout = codec_by_name(name), KVLayout.uniform(9, 2, 16)
    blocks, caches = coded(codec, layout, random=False)
    for number in (0, 2):
        sizes = blocks[number].layer_sizes
        blocks[number].payload[sum(sizes[:4]) : sum(sizes[:5])] = b"\xff" * sizes[4]
    for call in (type(codec).by_layers, Codec.by_layers):
        out, bad = decoded(call, codec, blocks, layout, range(3, 6), range(4))
        assert bad == [0, 2]
        for number in (1, 3):
            at, wanted = blocks[number].at, WANTED[number]
            here = [tuple(tensor[:, at : at + wanted] for tensor in pair) for pair in out[3:6]]
            assert same_kv(here, caches[number][3:6])
        assert decoded(call, codec, blocks, layout, range(5, 9), range(4))[1] == []
        assert decoded(call, codec, blocks, layout, range(9), range(3, 4))[1] == []


def native(layout: KVLayout, out: Any) -> _native.LayerBlocks:
    view = KVView.of_layers(layout, out)
    return _native.LayerBlocks(layout.dtype, *row_shapes(layout), view.rows, view.tokens, view)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"sizes": [1]}, "sizes: expected one a layer"),
        ({"sizes": [1 << 63] * 9}, "sizes: more than the payload has"),
        ({"wanted": 8}, "wanted: more tokens than there are"),
        ({"at": 15}, "at: the target has no such rows"),
        ({"at": 1 << 62}, "at: the target has no such rows"),
    ],
)
def test_a_block_that_does_not_fit_is_refused(change: dict[str, Any], wrong: str) -> None:
    layout = KVLayout.uniform(9, 2, 16)
    payload, sizes = encode(
        codec_by_name("splitzip"), BlockInfo(layout, np.arange(7, dtype=np.uint32), 0), kv := empty(layout, 7)
    )
    given: dict[str, Any] = {"payload": payload, "sizes": sizes, "tokens": 7, "at": 0, "wanted": 7} | change
    with pytest.raises(ValueError, match=wrong):
        native(layout, kv).add(**given)


@pytest.mark.parametrize("asked", [(3, 2, 0, 0), (0, 10, 0, 0), (0, 9, 1, 0), (0, 9, 0, 1)])
def test_layers_and_blocks_that_there_are_not_are_refused(asked: tuple[int, int, int, int]) -> None:
    layout = KVLayout.uniform(9, 2, 16)
    with pytest.raises(ValueError, match="no such"):
        native(layout, empty(layout, 7)).decode(*asked)


def test_the_model_of_entropy_stays_as_long_as_its_blocks() -> None:
    """What is decoded later needs its tables."""
    codec, layout = codec_by_name("entropy"), KVLayout.uniform(3, 2, 16)
    blocks, caches = coded(codec, layout, random=False)
    out = empty(layout, sum(WANTED))
    decode = codec.by_layers(blocks, KVView.of_layers(layout, out))
    del blocks[1:]  # Python keeps the payloads that are still to be read
    assert decode(range(3), range(4)) == []
    assert same_kv([tuple(t[:, :16] for t in pair) for pair in out], caches[0])
    assert torch.is_tensor(out[0][0])


@pytest.mark.parametrize("name", APART)
def test_what_decodes_keeps_the_memory_of_its_target(name: str) -> None:
    """A thread may decode on when nobody else refers to the result any more."""
    layout = layouts("bfloat16")[0]
    blocks, _ = coded(codec_by_name(name), layout, random=False)
    out = empty(layout, sum(WANTED), 0)
    memory = weakref.ref(out[0][0])
    decode = codec_by_name(name).by_layers(blocks, KVView.of_layers(layout, out))
    del out
    gc.collect()
    assert memory() is not None
    assert decode(range(9), range(4)) == []
    del decode
    gc.collect()
    assert memory() is None
