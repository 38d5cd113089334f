"""Batches of events are what vLLM's own classes decode, and what they encode is read, new and old."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from kvstore.errors import MalformedEvents
from kvstore.events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, packed, unpacked

Hash = bytes | int
STORED = BlockStored([1, 2**63], None, [5, 6, 7, 8], 2, medium="CPU")
CHILD = BlockStored([3], 2**63, [], 2, medium="STORAGE", extra_keys=[["salt"]])
BATCH = Batch(1.25, [STORED, CHILD, BlockRemoved([1], "CPU"), AllBlocksCleared()], 0)


class Theirs:
    """The classes of vllm/distributed/kv_events.py (0.32): events are maps with their type, batches are arrays."""

    class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
        pass

    class BlockStored(Event, tag="BlockStored"):
        block_hashes: list[Hash]
        parent_block_hash: Hash | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None

    class BlockRemoved(Event, tag="BlockRemoved"):
        block_hashes: list[Hash]
        medium: str | None

    class AllBlocksCleared(Event, tag="AllBlocksCleared"):
        pass


class TheirBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Theirs.BlockStored | Theirs.BlockRemoved | Theirs.AllBlocksCleared]
    data_parallel_rank: int | None = None


def test_what_is_sent_is_what_vllm_decodes() -> None:
    batch = msgspec.msgpack.Decoder(TheirBatch).decode(packed(BATCH))
    first, child, removed, cleared = batch.events
    assert isinstance(first, Theirs.BlockStored)
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([1, 2**63], None, [5, 6, 7, 8])
    assert (first.block_size, first.medium, first.extra_keys) == (2, "CPU", None)
    assert isinstance(child, Theirs.BlockStored)
    assert (child.parent_block_hash, child.medium, child.extra_keys) == (2**63, "STORAGE", [("salt",)])
    assert isinstance(removed, Theirs.BlockRemoved)
    assert isinstance(cleared, Theirs.AllBlocksCleared)
    assert (batch.ts, batch.data_parallel_rank) == (1.25, 0)


def test_what_vllm_sends_is_read() -> None:
    stored = Theirs.BlockStored([b"x" * 32], None, [1, 2], 2, None, "GPU", None)
    message = msgspec.msgpack.encode(TheirBatch(2.0, [stored, Theirs.BlockRemoved([7], "GPU")]))
    assert unpacked(message).events == [
        BlockStored([b"x" * 32], None, [1, 2], 2, medium="GPU"),
        BlockRemoved([7], "GPU"),
    ]


def test_what_is_packed_comes_back() -> None:
    assert unpacked(packed(BATCH)) == BATCH


def test_events_as_arrays_are_read() -> None:
    old = [["BlockStored", [9], 8, [1, 2], 2, None, "GPU"], ["BlockRemoved", [9]], ["AllBlocksCleared"]]
    assert unpacked(msgpack.packb([3.0, old])).events == [
        BlockStored([9], 8, [1, 2], 2, medium="GPU"),
        BlockRemoved([9]),
        AllBlocksCleared(),
    ]


def test_fields_that_are_not_known_are_left_out() -> None:
    new = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "lookahead_token_ids": [4]}
    assert unpacked(msgpack.packb([3.0, [new], None])).events == [BlockRemoved([1], "CPU")]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([1.0]),
        msgpack.packb(["now", []]),
        msgpack.packb([1.0, [7]]),
        msgpack.packb([1.0, [[]]]),
        msgpack.packb([1.0, [["BlockStored", [1]]]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved"}]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": "abc"}]]),
        msgpack.packb([1.0, [{"type": ["BlockRemoved"], "block_hashes": []}]]),
        msgpack.packb([1.0, [{"type": "Other"}]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, ["a"], 64]]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, 7, 64]]]),
        msgpack.packb([1.0, [["BlockStored", [1], [2], [3], 64]]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, [3], "64"]]]),
        msgpack.packb([1.0, [["BlockRemoved", [1], {}]]]),
    ],
)
def test_what_is_no_batch_is_refused(message: bytes) -> None:
    with pytest.raises(MalformedEvents):
        unpacked(message)
