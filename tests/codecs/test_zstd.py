"""Codec 16: byte shuffle and zstd by blosc2. The chunk's own claims are not believed."""

from __future__ import annotations

import struct
import tracemalloc

import blosc2
import numpy as np
import pytest
import torch
from kvcases import random_kv, same_kv

from kvstore import KVLayout
from kvstore.codecs import BlockInfo, KVView, codec_by_name
from kvstore.errors import CodecError

ZSTD = codec_by_name("zstd")
LAYOUT = KVLayout.uniform(1, 2, 32)
INFO = BlockInfo(LAYOUT, np.arange(32, dtype=np.uint32), 0)
RAW_BYTES = INFO.layer_bytes()[0]


def chunk_of(data: bytes, **settings) -> bytes:
    options = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.SHUFFLE], "typesize": 2}
    return bytes(blosc2.compress2(data, **{**options, **settings}))


def decode(payload: bytes, info: BlockInfo = INFO) -> list[tuple[torch.Tensor, torch.Tensor]]:
    out = random_kv(info.count, info.layout, seed=9)
    ZSTD.decode(info, memoryview(payload), (len(payload),), KVView.of_layers(info.layout, out))
    return out


def test_a_smooth_block_becomes_smaller() -> None:
    kv = [(torch.linspace(0, 1, 2048).reshape(2, 32, 32).bfloat16(),) * 2]
    memory = memoryview(bytearray(ZSTD.bound(INFO)))
    (size,) = ZSTD.encode(INFO, KVView.of_layers(LAYOUT, kv), memory)
    assert size < RAW_BYTES // 2
    assert same_kv(decode(bytes(memory[:size])), kv)


def test_a_layer_is_one_chunk_that_blosc2_itself_reads() -> None:
    kv = random_kv(32, LAYOUT)
    memory = memoryview(bytearray(ZSTD.bound(INFO)))
    (size,) = ZSTD.encode(INFO, KVView.of_layers(LAYOUT, kv), memory)
    expected = b"".join(t.view(torch.uint8).numpy().tobytes() for t in kv[0])
    assert blosc2.decompress2(bytes(memory[:size])) == expected


@pytest.mark.parametrize("claimed", [1 << 30, (1 << 31) - 1, RAW_BYTES + 1, RAW_BYTES - 1, 0, -1])
def test_a_chunk_that_claims_another_size_is_refused_before_memory_is_taken(claimed: int) -> None:
    chunk = bytearray(chunk_of(bytes(RAW_BYTES // 2) + np.random.default_rng(0).bytes(RAW_BYTES // 2)))
    struct.pack_into("<i", chunk, 4, claimed)
    tracemalloc.start()
    with pytest.raises(CodecError, match=r"chunk speaks of|blosc|zstd: layer 0"):
        decode(bytes(chunk))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_true_bomb_is_refused() -> None:
    """A few hundred bytes that are an intact chunk of 64 MiB."""
    bomb = chunk_of(bytes(64 << 20))
    assert len(bomb) < RAW_BYTES
    with pytest.raises(CodecError, match="chunk speaks of"):
        decode(bomb)


@pytest.mark.parametrize("stored", [0, 16, 31, 1 << 30, -1])
def test_a_chunk_that_claims_another_stored_size_is_refused(stored: int) -> None:
    chunk = bytearray(chunk_of(np.random.default_rng(0).bytes(RAW_BYTES)))
    struct.pack_into("<i", chunk, 12, stored)
    with pytest.raises(CodecError):
        decode(bytes(chunk))


def test_more_bytes_than_any_encoder_writes_are_refused() -> None:
    chunk = chunk_of(np.random.default_rng(0).bytes(RAW_BYTES))
    with pytest.raises(CodecError, match="cannot hold"):
        decode(chunk + bytes(64))


def test_blocks_of_different_sizes_share_scratch_memory_without_mixing() -> None:
    for count in (64, 1, 33, 64, 2):
        info = BlockInfo(LAYOUT, np.arange(count, dtype=np.uint32), 0)
        kv = random_kv(count, LAYOUT, seed=count)
        memory = memoryview(bytearray(ZSTD.bound(info)))
        (size,) = ZSTD.encode(info, KVView.of_layers(LAYOUT, kv), memory)
        assert same_kv(decode(bytes(memory[:size]), info), kv)


def test_a_chunk_of_all_equal_bytes_decodes_in_full_over_used_scratch_memory() -> None:
    """blosc2 stores runs as a value and a count; what was in the scratch memory before must not shine through."""
    decode(chunk_of(np.random.default_rng(0).bytes(RAW_BYTES)))
    zeros = [(torch.zeros(2, 32, 32, dtype=torch.bfloat16),) * 2]
    assert same_kv(decode(chunk_of(bytes(RAW_BYTES))), zeros)
