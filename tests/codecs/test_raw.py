"""Codec 0: the tensors one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvcases import mixed_layout, random_kv

from kvstore.codecs import BlockInfo, KVView, codec_by_name
from kvstore.errors import CodecError

RAW = codec_by_name("raw")
LAYOUT = mixed_layout("bfloat16")
INFO = BlockInfo(LAYOUT, np.arange(9, dtype=np.uint32), 0)


def test_the_payload_is_the_bytes_of_the_tensors_in_order() -> None:
    kv = random_kv(9, LAYOUT)
    memory = bytearray(RAW.bound(INFO))
    sizes = RAW.encode(INFO, KVView.of_layers(LAYOUT, kv), memoryview(memory))
    layers = [b"".join(t.view(torch.uint8).numpy().tobytes() for t in pair) for pair in kv]
    assert bytes(memory) == b"".join(layers)
    assert list(sizes) == [len(layer) for layer in layers] == INFO.layer_bytes()


def test_the_bound_is_the_raw_size() -> None:
    assert RAW.bound(INFO) == 9 * LAYOUT.bytes_per_token == sum(INFO.layer_bytes())


def test_sizes_other_than_the_raw_ones_are_refused() -> None:
    payload = bytes(RAW.bound(INFO))
    first, *rest = INFO.layer_bytes()
    out = KVView.of_layers(LAYOUT, random_kv(9, LAYOUT))
    with pytest.raises(CodecError, match="raw: 9 tokens take layers of"):
        RAW.decode(INFO, memoryview(payload), (first + rest[0], 0, *rest[1:]), out)
