"""Which threads code what was put, and that blocks which are copied together become the records that each would be."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcases import random_kv
from small_stores import IDENTITY, LAYOUT, config, put, stored, tokens_of

from kvstore import KVLayout, KVStore
from kvstore.codecs import KVView, codec_by_name
from kvstore.core.record import check_payload, parse
from kvstore.residency.block import Block
from kvstore.tiers.buffers import BufferPool
from kvstore.write import encode
from kvstore.write.encode import Encoder

TOKENS = tokens_of(1, 64)


class Seen:
    """Which threads code blocks by themselves, and how many are copied with each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads, self.together = set[str](), list[int]()
        coded, copied = Encoder._encode, Block.copy_all

        def codes(encoder: Encoder, *arguments: Any) -> Any:
            self.threads.add(threading.current_thread().name)
            return coded(encoder, *arguments)

        def copies(blocks: Sequence[Block], *arguments: Any) -> Any:
            assert threading.current_thread().name == "kvstore-encode-0"
            self.together.append(len(blocks))
            return copied(blocks, *arguments)

        monkeypatch.setattr(Encoder, "_encode", codes)
        monkeypatch.setattr(Block, "copy_all", copies)


@pytest.mark.parametrize(("codec", "host", "alike"), [("raw", 0, True), ("raw", 1 << 20, True), ("entropy", 0, False)])
def test_small_blocks_that_are_only_copied_are_copied_together(
    codec: str, host: int, alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    with KVStore(tmp_path, IDENTITY, config(host=host, codec=codec, threads=2)) as store:
        for number in range(4):
            put(store, tokens_of(number, 64))  # TOKENS among them
        store.flush()
        assert stored(store, TOKENS) == 64
    assert (sum(seen.together), seen.threads) == ((4 * 16, set()) if alike else (0, seen.threads))
    assert bool(seen.threads) is not alike


def test_no_more_is_copied_together_than_a_put_should_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    monkeypatch.setattr(encode, "_COPIED_BYTES", 3 * 4 * LAYOUT.bytes_per_token)  # three blocks
    with KVStore(tmp_path, IDENTITY, config()) as store:
        put(store, TOKENS)
        store.flush()
        assert stored(store, TOKENS) == 64
    assert max(seen.together) == 3
    assert sum(seen.together) == 16


def test_a_store_in_memory_alone_copies_together_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    settings = config(disk=0, host=1 << 20)
    assert settings.host.codec == "raw"
    with KVStore(tmp_path, IDENTITY, settings) as store:
        put(store, TOKENS)
        store.flush()
        assert stored(store, TOKENS) == 64
    assert sum(seen.together) == 16


@pytest.mark.parametrize("layout", [LAYOUT, KVLayout.uniform(2, 3, 40)])
@pytest.mark.parametrize("lasting", [False, True])
def test_copied_together_or_coded_one_by_one_is_the_same(layout: KVLayout, lasting: bool) -> None:
    """For payloads above and below 240 bytes, which are hashed otherwise."""
    codec, pool = codec_by_name("raw"), BufferPool(0)
    view, blocks = KVView.of_layers(layout, random_kv(50, layout)), []
    for number, (start, count) in enumerate([(0, 1), (1, 7), (8, 2), (10, 40)]):
        ids = np.arange(start, start + count, dtype=np.uint32)
        part = view.narrow(start, count)
        blocks.append(
            Block(number + 1, number, b"k" * 32, b"p" * 32, b"n" * 32, start, ids, part, 1.5, 2.5, pinned=number == 2)
        )
    for block, made in zip(blocks, Block.copy_all(blocks, codec, pool, lasting), strict=True):
        alone = block.encode(codec, pool, lasting)
        assert bytes(made.buffer.view) == bytes(alone.buffer.view)
        assert made.buffer.capacity == alone.buffer.capacity
        header = parse(made.buffer.view, len(made.buffer.view))
        check_payload(header, made.buffer.view)
        assert header.record_id == block.record
