"""A block that was put, and how it becomes a record; a block that is on disk already."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.codecs.base import BlockInfo, Codec
from kvstore.codecs.delta import DeltaCodec
from kvstore.codecs.device import copy_on_cpu, move
from kvstore.codecs.view import KVView
from kvstore.config import KIB
from kvstore.core.layout import KVLayout
from kvstore.core.record import (
    FLAG_CUT,
    FLAG_PINNED,
    FLAG_STATES,
    FLAG_SUMS,
    Donor,
    RecordHeader,
    padded,
    payload_offset,
    seal,
)
from kvstore.core.tokens import Tokens
from kvstore.tiers.base import SealedSource, TensorSource
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.host import HostRecord

if TYPE_CHECKING:
    import torch

# The layers of a smaller block are not read one by one.
_LEAST_FOR_SUMS = 512 * KIB


def most_bytes(layout: KVLayout, tokens: int, paged: bool = True) -> int:
    """What a block of so many tokens takes in a tier if coding does not make it smaller. paged: it is a record, which
    takes whole pages; else it is its tensors alone."""
    raw = tokens * layout.bytes_per_token
    return padded(payload_offset(layout.sections, tokens, has_sums=True) + raw) if paged else raw


@dataclass(frozen=True)
class Block(TensorSource):
    """A block that waits to be written. Its keys and values are still the caller's, or a copy; or it came as a record,
    and readers decode that. Immutable.

    Attributes:
        record: its number.
        parent: number of the block before it, 0 for none.
        key, parent_key: keys of the two, see `core.keys.chain_key`.
        namespace: digest of the namespace.
        start: position of its first token.
        tokens: its token ids, `[n]`.
        view: its keys and values; without memory if there is only the record.
        bits: information in its tokens.
        expiry: unix seconds; 0 for never.
        pinned: a pinned sequence ends with it.
        alone: it must not be coded against others.
        cut: length of the cache that it was taken from, if layers with windows lack some of its tokens; else 0.
        sealed_as: the record that it is written as, because it came as one; None if it is to be coded.
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
    cut: int = 0
    sealed_as: HostRecord | None = None

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.tokens)

    @property
    def tier(self) -> str:
        return "queue"

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    @property
    def tensors(self) -> TensorSource | None:
        return self if self.view.has_memory else None

    @property
    def sealed(self) -> SealedSource | None:
        return None if self.view.has_memory else self.sealed_as

    @property
    def codec_id(self) -> int | None:
        return None if self.view.has_memory or self.sealed_as is None else self.sealed_as.header.codec

    def copy_to(self, target: KVView) -> None:
        move(self.view.narrow(0, target.tokens), target)

    def reaches(self, device: torch.device) -> bool:
        return not self.view.on_cpu

    def fetched(self) -> Block:
        return self if self.view.on_cpu else replace(self, view=copy_on_cpu(self.view))

    @property
    def queued(self) -> Block | None:
        """The block that waits to be written: this one."""
        return self

    @property
    def has_states(self) -> bool:
        """Whether it has the states at its end."""
        return self.view.state_bytes > 0

    def info(self) -> BlockInfo:
        """Return what a codec must know of the block."""
        return BlockInfo(self.view.layout, self.tokens, self.start, self.cut, self.view.state_bytes)

    def encode(self, codec: Codec, pool: BufferPool, lasting: bool = False) -> HostRecord:
        """Return the block as a sealed record in a buffer of whole pages.

        Args:
            pool: gives the buffer.
            lasting: the record will be kept in memory.
        """
        info, error = self.info(), codec.error_bound
        has_sums = self._wants_sums(codec)
        for limit in (codec.usual(info), codec.bound(info)):
            record = self.encode_by(
                codec, lambda out: codec.encode(info, self.view, out), limit, pool, error, lasting, has_sums=has_sums
            )
            if record is not None:
                return record
        raise AssertionError(f"codec {codec.name}: a block takes more bytes than `bound` allows")

    def _wants_sums(self, codec: Codec) -> bool:
        """Whether layers of the record are worth reading one by one."""
        large = self.view.nbytes >= _LEAST_FOR_SUMS and not self.view.layout.is_grouped
        return large and codec.layers_apart and not codec.copies

    def encode_by(
        self,
        codec: Codec | DeltaCodec,
        write: Callable[[memoryview], tuple[int, ...] | None],
        limit: int,
        pool: BufferPool,
        error: Callable[[memoryview, Sequence[int]], float],
        lasting: bool = False,
        donors: Sequence[Donor] = (),
        has_sums: bool = False,
    ) -> HostRecord | None:
        """Return the block as a sealed record with a payload of at most `limit` bytes; None if that is too little.

        Args:
            codec: the record names this codec.
            write: writes the payload and returns the sizes of its layers, or None if it does not fit.
            error: gives the error bound of a payload.
            donors: what the payload is coded against.
            has_sums: whether each layer gets a checksum of its own.
        """
        begin = payload_offset(self.view.layout.sections, len(self.tokens), len(donors), has_sums)
        buffer = pool.take(padded(begin + limit), lasting)
        sizes = write(buffer.view[begin:])
        if sizes is None:
            return None
        bound = 0.0
        if not codec.exact:
            bound = error(buffer.view[begin : begin + sum(sizes)], sizes) or math.inf
        return self._sealed(self._header(codec, sizes, bound, donors, has_sums), buffer)

    @staticmethod
    def copy_all(blocks: Sequence[Block], codec: Codec, pool: BufferPool, lasting: bool = False) -> list[HostRecord]:
        """Return what `encode` makes of each block, all in one call without the GIL.

        Args:
            blocks: of one layout, on the CPU; at least one.
            codec: one that only copies.
            pool, lasting: as for `encode`.
        """
        buffers, rooms = [], []
        for block in blocks:
            begin = payload_offset(block.view.layout.sections, len(block.tokens))
            buffers.append(pool.take(padded(begin + block.view.nbytes), lasting))
            rooms.append(buffers[-1].view[begin : begin + block.view.nbytes])
        records = []
        for block, buffer, payload_sum in zip(
            blocks, buffers, KVView.pack_all([block.view for block in blocks], rooms), strict=True
        ):
            header = block._header(codec, tuple(block.info().layer_bytes()))
            records.append(block._sealed(header, buffer, payload_sum))
        return records

    def _header(
        self,
        codec: Codec | DeltaCodec,
        sizes: tuple[int, ...],
        bound: float = 0.0,
        donors: Sequence[Donor] = (),
        has_sums: bool = False,
    ) -> RecordHeader:
        marks = FLAG_PINNED * self.pinned | FLAG_CUT * bool(self.cut) | FLAG_STATES * self.has_states
        return RecordHeader(
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
            flags=marks | FLAG_SUMS * has_sums,
            profile=codec.profile,
            error_bound=bound,
            donors=tuple(donors),
            cut=self.cut,
        )

    @staticmethod
    def _sealed(header: RecordHeader, buffer: Buffer, payload_sum: bytes | None = None) -> HostRecord:
        buffer.trim(padded(header.record_bytes))
        seal(header, buffer.view, payload_sum)
        return HostRecord(header, buffer)


@dataclass(frozen=True)
class StoredBlock:
    """A block that is on disk already and becomes known here. Immutable.

    Attributes:
        donors: numbers of the records that it is coded against.
        record, parent, namespace, start, tokens, expiry, pinned, cut, has_states: see `Block`.

    Example:
        >>> import numpy as np
        >>> StoredBlock(1, 0, b"n" * 32, start=64, tokens=np.arange(64, dtype=np.uint32), expiry=0.0).end
        128
    """

    record: int
    parent: int
    namespace: bytes
    start: int
    tokens: Tokens
    expiry: float
    donors: tuple[int, ...] = ()
    pinned: bool = False
    cut: int = 0
    has_states: bool = False

    @property
    def queued(self) -> None:
        """Nothing waits to be written."""
        return None

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.tokens)
