"""A block on its way to the tiers, and how it becomes a record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.codecs.base import BlockInfo, Codec
from kvstore.codecs.view import KVView
from kvstore.identity import Tokens
from kvstore.layout import KVLayout
from kvstore.record import FLAG_PINNED, Donor, RecordHeader, padded, payload_offset, seal
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.host import HostRecord


@dataclass(frozen=True)
class Block:
    """One block of one sequence, its keys and values still where the caller (or a copy) has them.

    record: its number. parent: number of the block before it, 0 for none. key, parent_key: see `identity.chain_key`.
    alone: not to be coded against others.
    """

    record: int
    parent: int
    key: bytes
    parent_key: bytes
    namespace: bytes
    start: int
    tokens: Tokens
    view: KVView
    bits: float
    expiry: float
    pinned: bool
    alone: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def info(self) -> BlockInfo:
        return BlockInfo(self.view.layout, self.tokens, self.start)

    def encode(self, codec: Codec, pool: BufferPool, lasting: bool = False) -> HostRecord:
        """The block as a sealed record in a buffer of whole pages. lasting: it will be kept in memory."""
        info = self.info()
        record = self.encode_by(codec, lambda out: codec.encode(info, self.view, out), codec.usual(info), pool, lasting)
        if record is None:
            bound = codec.bound(info)
            record = self.encode_by(codec, lambda out: codec.encode(info, self.view, out), bound, pool, lasting)
        assert record is not None
        return record

    def encode_by(
        self,
        codec: Codec,
        write: Callable[[memoryview], tuple[int, ...] | None],
        room: int,
        pool: BufferPool,
        lasting: bool = False,
        donors: Sequence[Donor] = (),
        error: Callable[[memoryview, Sequence[int]], float] | None = None,
    ) -> HostRecord | None:
        """The same with a payload of at most `room` bytes that `write` writes in the manner of `codec`, against
        `donors`; None where it does not fit. error: says its error bound, by default the codec."""
        begin = payload_offset(len(self.view.layout.layers), len(self.tokens), len(donors))
        buffer = pool.take(padded(begin + room), lasting)
        sizes = write(buffer.view[begin:])
        if sizes is None:
            return None
        bound = 0.0
        if not codec.exact:
            bound = (error or codec.error_bound)(buffer.view[begin : begin + sum(sizes)], sizes) or math.inf
        header = RecordHeader(
            key=self.key,
            parent=self.parent_key,
            namespace=self.namespace,
            codec=codec.id,
            record_id=self.record,
            start=self.start,
            tokens=self.tokens,
            layer_sizes=sizes,
            raw_bytes=self.view.nbytes,
            bits=self.bits,
            expiry=self.expiry,
            flags=FLAG_PINNED if self.pinned else 0,
            profile=codec.profile,
            error_bound=bound,
            donors=tuple(donors),
        )
        buffer.trim(padded(header.record_bytes))
        seal(header, buffer.view)
        return HostRecord(header, buffer)


@dataclass(frozen=True)
class StoredBlock:
    """A block that is on disk already and becomes known here: see `Block` for what the fields mean. donors: the records
    that it is coded against."""

    record: int
    parent: int
    namespace: bytes
    start: int
    tokens: Tokens
    expiry: float
    donors: tuple[int, ...] = ()
    pinned: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def max_record_bytes(layout: KVLayout, block_tokens: int, codec: Codec) -> int:
    """Pages that the largest record of a full block takes."""
    import numpy as np

    info = BlockInfo(layout, np.zeros(block_tokens, np.uint32), 0)
    return padded(payload_offset(len(layout.layers), block_tokens) + codec.bound(info))
