"""Files of sequences: as llama.cpp writes them, and damaged ones."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from kvstore.core.layout import KVLayout
from kvstore.errors import IdentityMismatch, KVStoreError, MalformedState, UnsupportedCache
from kvstore.integrations.llama_cpp.form import StateForm
from kvstore.integrations.llama_cpp.slot_file import MAGIC, build_slot_file, read_slot_file
from kvstore.integrations.llama_cpp.state import parse_state

LAYOUT, FORM = KVLayout.uniform(2, 2, 8, "float16"), StateForm(4, True, 8)
LAYERS = tuple((torch.randn(1, 2, 3, 8).half(), torch.randn(1, 2, 3, 8).half()) for _ in range(2))
TOKENS = np.array([7, 8, 9], np.uint32)


def _file(numbers: list[int], magic: int = MAGIC, version: int = 4, count: int | None = None) -> bytes:
    named = len(numbers) if count is None else count
    return struct.pack(f"<3I{len(numbers)}iI", magic, version, named, *numbers, 1)


@pytest.mark.parametrize("packed", [False, True])
def test_what_was_built_is_read(packed: bool) -> None:
    data = build_slot_file(TOKENS, LAYERS, FORM, LAYOUT, streams=2, packed=packed)
    found = read_slot_file(data, 4)
    assert found.tokens.tolist() == [7, 8, 9]
    assert (found.packed, found.streams) == (packed, 2)
    state = parse_state(found.state, FORM, LAYOUT)
    assert all(torch.equal(a[0], b[0][0]) for a, b in zip(state.layers, LAYERS, strict=True))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", MalformedState, "are left"),
        (_file([7], magic=1), MalformedState, "magic"),
        (_file([7], version=3), IdentityMismatch, "state_version=3"),
        (_file([7], version=9), IdentityMismatch, "does not know"),
        (_file([7], count=1 << 31), MalformedState, "are left"),
        (_file([7, -2]), UnsupportedCache, "images"),
        (_file([-1, 2, 0, 0]), MalformedState, "packed"),
        (_file([-1, 1, 2]), MalformedState, "packed"),
        (_file([-1, 1, 9, 7, 0]), MalformedState, "9 tokens"),
        (_file([-1, 1, -9, 7, 0]), MalformedState, "-9 tokens"),
        (_file([-1, 1, 1, 7, 1]), UnsupportedCache, "images"),
        (_file([-1, 1, 1, 7, 5, 1]), UnsupportedCache, "images"),
        (_file([-1, 1, 1, -7, 0]), UnsupportedCache, "images"),
    ],
)
def test_a_file_that_is_none_is_refused_by_what_is_wrong(data: bytes, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        read_slot_file(data, 4)


def test_every_truncated_file_is_refused() -> None:
    data = build_slot_file(TOKENS, LAYERS, FORM, LAYOUT, packed=True).tobytes()
    for length in range(len(data)):
        with pytest.raises(KVStoreError):
            parse_state(read_slot_file(data[:length], 4).state, FORM, LAYOUT)
