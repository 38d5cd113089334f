"""Memory for a result: of any size, each tensor has a place of its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kvcases import mixed_layout

from kvstore import KVLayout
from kvstore.config import MIB
from kvstore.read.result import allocate

FLAT = KVLayout.uniform(8, 2, 64, "bfloat16")


@pytest.mark.parametrize("layout", [FLAT, mixed_layout("float32")])
@pytest.mark.parametrize("mib", [1, 9, 33, 70])
def test_tensors_have_the_shapes_of_the_layout_and_share_nothing(layout: KVLayout, mib: int) -> None:
    tokens = mib * MIB // layout.bytes_per_token
    out = allocate(layout, tokens, reserve=3)
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
    out = allocate(FLAT, 40 * MIB // FLAT.bytes_per_token, reserve=0)
    for pair in out.tensors:
        for tensor in pair:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_large_result_outlives_the_buffers_it_was_made_of() -> None:
    out = allocate(FLAT, 40 * MIB // FLAT.bytes_per_token, reserve=0)
    keys = out.tensors[3][0]
    del out
    keys.fill_(1)
    assert bool((keys == 1).all())
