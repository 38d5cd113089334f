"""Memory for a result: of any size, each tensor has a place of its own."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from kvcases import mixed_layout

from kvstore import KVLayout, LayerLayout
from kvstore.codecs import KVView
from kvstore.config import MIB
from kvstore.read.result import OutputBuffers, allocate
from kvstore.tiers.buffers import BufferPool

FLAT = KVLayout.uniform(8, 2, 64, "bfloat16")


@pytest.mark.parametrize("layout", [FLAT, mixed_layout("float32")])
@pytest.mark.parametrize("mib", [1, 9, 33, 70])
def test_tensors_have_the_shapes_of_the_layout_and_share_nothing(layout: KVLayout, mib: int) -> None:
    tokens = mib * MIB // layout.bytes_per_token
    out = allocate(layout, tokens, reserve=3, pool=BufferPool(keep_bytes=0))
    ranges = []
    for layer, pair in zip(layout.layers, out.tensors, strict=True):
        for tensor, dim in zip(pair, (layer.key_dim, layer.value_dim), strict=True):
            assert tensor.shape == (1, layer.heads, tokens + 3, dim)
            assert tensor.dtype == getattr(torch, layout.dtype)
            assert tensor.is_contiguous()
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    ranges.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    assert out.view.tokens == tokens
    assert out.layers(tokens)[0][0].shape[2] == tokens


def test_tensors_of_a_large_result_can_be_saved_one_by_one() -> None:
    """Each has a storage of its own."""
    out = allocate(FLAT, 40 * MIB // FLAT.bytes_per_token, 0, BufferPool(keep_bytes=0))
    for pair in out.tensors:
        for tensor in pair:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_memory_of_a_large_result_is_used_again_once_nobody_uses_it() -> None:
    pool, tokens = BufferPool(keep_bytes=64 * MIB), 40 * MIB // FLAT.bytes_per_token

    def places(out: OutputBuffers) -> set[int]:
        return {tensor.data_ptr() for pair in out.tensors for tensor in pair}

    first = allocate(FLAT, tokens, 0, pool)
    old = places(first)
    keys = first.tensors[3][0]
    keys.fill_(1)
    del first
    second = allocate(FLAT, tokens, 0, pool)
    for pair in second.tensors:
        for tensor in pair:
            tensor.fill_(2)
    assert bool((keys == 1).all())  # one tensor keeps the memory that it lies in
    assert keys.data_ptr() not in places(second)
    new = places(second)
    assert len(new & old) > len(old) / 2
    del keys, second, tensor, pair
    assert places(allocate(FLAT, tokens, 0, pool)) <= old | new


def test_no_more_memory_is_kept_than_the_pool_may() -> None:
    pool = BufferPool(keep_bytes=20 * MIB)
    allocate(FLAT, 40 * MIB // FLAT.bytes_per_token, 0, pool)
    assert 0 < pool.free_bytes <= 20 * MIB


@pytest.mark.parametrize("mib", [1, 9, 33])
@pytest.mark.parametrize("short", [0, 5])
def test_the_first_tokens_are_those_of_the_tensors(mib: int, short: int) -> None:
    tokens = mib * MIB // FLAT.bytes_per_token - short
    out = allocate(FLAT, tokens + short, reserve=3, pool=BufferPool(keep_bytes=0))
    for pair, whole in zip(out.layers(tokens), out.tensors, strict=True):
        for tensor, of in zip(pair, whole, strict=True):
            expected = of[:, :, :tokens]
            assert (tensor.data_ptr(), tensor.shape, tensor.stride()) == (
                expected.data_ptr(),
                expected.shape,
                expected.stride(),
            )


def test_the_view_of_recycled_memory_says_where_its_tensors_are() -> None:
    layout = KVLayout((LayerLayout(2, 24, 40), LayerLayout(3, 8, 16)), "bfloat16")
    tokens, reserve = 2 * MIB // layout.bytes_per_token, 7
    out = allocate(layout, tokens, reserve, BufferPool(keep_bytes=0))
    asked = KVView.of_layers(layout, [(k[0], v[0]) for k, v in out.tensors])
    assert np.array_equal(out.view.rows, asked.rows)
    assert (out.view.tokens, asked.tokens) == (tokens, tokens + reserve)
    assert all(t.is_contiguous() and t.data_ptr() % 64 == 0 for pair in out.tensors for t in pair)
