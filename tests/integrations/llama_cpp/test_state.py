"""States of sequences: bytes to layers and back, and bytes that are none. Nothing here needs llama.cpp."""

from __future__ import annotations

import random
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import seeds
import torch

from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.errors import KVStoreError, LayoutMismatch, MalformedState, UnsupportedCache
from kvstore.integrations.llama_cpp.form import StateForm
from kvstore.integrations.llama_cpp.state import build_state, parse_state, state_size

LAYOUT = KVLayout((LayerLayout(2, 8, 6), LayerLayout(3, 8, 6)), "float16")
FORM = StateForm(4, True, 8)
FORMS = [StateForm(3, True, 0), StateForm(3, False, 6), FORM, StateForm(4, False, 8)]


def _layers(tokens: int, layout: KVLayout = LAYOUT) -> Any:
    made = torch.Generator().manual_seed(tokens)
    kind = getattr(torch, layout.dtype)
    return tuple(
        tuple(torch.randn(1, x.heads, tokens, dim, generator=made).to(kind) for dim in (x.key_dim, x.value_dim))
        for x in layout.layers
    )


@pytest.mark.parametrize("tokens", [1, 5, 123])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_was_built_is_read(form: StateForm, tokens: int, dtype: str) -> None:
    layout, streams = replace(LAYOUT, dtype=dtype), 1 + tokens % 3
    layers = _layers(tokens, layout)
    data = build_state(layers, tokens, form, layout, streams=streams, head=b"abcd")
    assert len(data) == 4 + state_size(tokens, streams, form, layout)
    found = parse_state(data[4:], form, layout)
    assert (found.tokens, found.streams) == (tokens, streams)
    for pair, given in zip(found.layers, layers, strict=True):
        assert all(torch.equal(a, b[0]) for a, b in zip(pair, given, strict=True))


def test_a_row_of_keys_has_neighbours_for_pairs() -> None:
    layout = KVLayout((LayerLayout(1, 8, 2),), "float32")
    k = torch.arange(8.0).view(1, 1, 1, 8)
    data = build_state(((k, torch.zeros(1, 1, 1, 2)),), 1, replace(FORM, paired=6), layout)
    row = np.frombuffer(data.tobytes()[8 + 12 + 16 + 12 :][:32], "<f4")
    assert row.tolist() == [0, 3, 1, 4, 2, 5, 6, 7]


def test_cells_may_stand_in_any_order() -> None:
    layers = _layers(5)
    data = build_state(layers, 5, replace(FORM, paired=0), LAYOUT)
    order = np.array([3, 0, 4, 1, 2])
    cells = data[8 : 8 + 60].view("<i4").reshape(5, 3)
    cells[:, 0] = order
    found = parse_state(data, replace(FORM, paired=0), LAYOUT)
    places = torch.from_numpy(np.argsort(order))
    for pair, given in zip(found.layers, layers, strict=True):
        assert all(torch.equal(a, b[0][:, places]) for a, b in zip(pair, given, strict=True))


def test_an_empty_sequence_has_no_layers() -> None:
    assert parse_state(struct.pack("<3I", 2, 0, 0), FORM, LAYOUT) == (0, (), 2)


@pytest.mark.parametrize("form", FORMS)
def test_every_truncated_state_is_refused(form: StateForm) -> None:
    data = build_state(_layers(3), 3, form, LAYOUT).tobytes()
    for length in range(len(data)):
        with pytest.raises(MalformedState):
            parse_state(data[:length], form, LAYOUT)
    with pytest.raises(MalformedState, match="follow its end"):
        parse_state(data + b"\0", form, LAYOUT)


@pytest.mark.parametrize(
    ("place", "code", "value", "error", "message"),
    [
        (0, "I", 1 << 31, MalformedState, "are left"),
        (4, "I", 1 << 31, MalformedState, "are left"),
        (8, "i", 7, MalformedState, "without a gap"),
        (12, "I", 2, MalformedState, "one sequence"),
        (44, "I", 1, LayoutMismatch, "flash attention off"),
        (44, "I", 2, LayoutMismatch, "flash attention"),
        (48, "I", 1, UnsupportedCache, "windows"),
        (52, "I", 64, UnsupportedCache, "rotated"),
        (60, "i", 8, UnsupportedCache, "q8_0"),
        (60, "i", -5, UnsupportedCache, "number -5"),
        (60, "i", 0, LayoutMismatch, "f32"),
        (64, "Q", 1 << 63, LayoutMismatch, "bytes a token"),
    ],
)
def test_a_field_that_does_not_fit_is_named(place: int, code: str, value: int, error: type, message: str) -> None:
    data = bytearray(build_state(_layers(3), 3, FORM, LAYOUT).tobytes())
    struct.pack_into("<" + code, data, place, value)
    with pytest.raises(error, match=message):
        parse_state(data, FORM, LAYOUT)


def test_huge_counts_take_no_memory() -> None:
    tracemalloc.start()
    for streams, cells in ((1, 0xFFFFFFFF), (0xFFFFFFFF, 0), (0xFFFFFFFF, 0xFFFFFFFF)):
        with pytest.raises(MalformedState):
            parse_state(struct.pack("<2I", streams, cells), FORM, LAYOUT)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_bytes_that_anything_happened_to_are_read_or_refused() -> None:
    draw = random.Random(seeds.of("llama-state"))
    whole = build_state(_layers(4), 4, FORM, LAYOUT).tobytes()
    refused = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(120)] = draw.choice((0, 1, 255, draw.randrange(256)))
        try:
            assert parse_state(data, FORM, LAYOUT).tokens in (0, 4)
        except KVStoreError:
            refused += 1
    assert refused > 1000


def test_a_state_of_another_version_is_refused() -> None:
    for written, read in ((3, 4), (4, 3)):
        data = build_state(_layers(4), 4, replace(FORM, version=written), LAYOUT)
        with pytest.raises(KVStoreError):
            parse_state(data, replace(FORM, version=read), LAYOUT)
