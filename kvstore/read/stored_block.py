"""Blocks as they are on disk: whole, decoded, to be learned from or coded otherwise; counted as no use of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.codecs import KVView, is_delta
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.groups import GroupedView
from kvstore.core.layout import KVLayout
from kvstore.core.record import FLAG_PINNED, DamagedRecord, RecordHeader
from kvstore.core.tokens import Tokens
from kvstore.errors import CodecError, UnknownCodec
from kvstore.metrics import Metric
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.residency.whole_record import read_whole
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.host import HostRecord
from kvstore.tiers.profiles import Profiles

Words = npt.NDArray[np.uint16]
_AT_ONCE = 256  # entries that are looked up together
_INFINITE = 0x7F80  # exponent of a bf16 value that is no finite number


@dataclass(frozen=True)
class GroupWords:
    """The keys and values of layers that keep the same tokens, of those tokens of a block that they have.

    Attributes:
        layout: of these layers.
        tokens: their tokens.
        start: position of the first of them.
        words: 16-bit words, tensor after tensor, each `[heads, tokens, dim]`.
    """

    layout: KVLayout
    tokens: Tokens
    start: int
    words: Words

    def layers(self) -> list[tuple[Words, Words]]:
        """K and V of every layer: 16-bit words `[tokens, heads * dim]`, copies."""
        return [self.layer(number) for number in range(len(self.layout.layers))]

    def layer(self, number: int) -> tuple[Words, Words]:
        """K and V of one layer, as in `layers`."""
        count, shape = len(self.tokens), self.layout.layers[number]
        at = count * sum(x.heads * (x.key_dim + x.value_dim) for x in self.layout.layers[:number])
        k, v = count * shape.heads * shape.key_dim, count * shape.heads * shape.value_dim
        keys = self.words[at : at + k].reshape(shape.heads, count, shape.key_dim)
        values = self.words[at + k : at + k + v].reshape(shape.heads, count, shape.value_dim)
        k_rows, v_rows = (np.array(x.transpose(1, 0, 2), order="C") for x in (keys, values))
        return k_rows.reshape(count, -1), v_rows.reshape(count, -1)

    @property
    def is_finite(self) -> bool:
        """Whether all its values, of bfloat16, are numbers."""
        return not ((self.words & _INFINITE) == _INFINITE).any()


@dataclass(frozen=True)
class StoredWords:
    """A block that was read and decoded.

    Attributes:
        entry: where it was, when it was read.
        header: of its record.
        buffer: its values, group after group of layers, tensor after tensor, each `[heads, tokens, dim]`.
        layout: of these.
    """

    entry: Entry
    header: RecordHeader
    buffer: Buffer
    layout: KVLayout

    @property
    def view(self) -> KVView:
        """Its keys and values."""
        if not self.layout.is_grouped:
            return KVView.packed(self.layout, self.header.count, self.buffer.address, self.buffer)
        parts, address = list[tuple[int, KVView | None]](), self.buffer.address
        for layout, lacks in parts_of(self.layout, self.header):
            left = self.header.count - lacks
            parts.append((lacks, KVView.packed(layout, left, address, self.buffer) if left else None))
            address += left * layout.bytes_per_token
        return GroupedView(self.layout, self.header.count, parts)

    @property
    def info(self) -> BlockInfo:
        """What a codec must know of it."""
        return BlockInfo(self.layout, self.header.tokens, self.header.start, self.header.cut)

    def block(self) -> Block:
        """The block, to be coded anew: with the number and the marks that the catalog has."""
        header, entry = self.header, self.entry
        return Block(
            record=entry.record,
            parent=entry.parent,
            key=header.key,
            parent_key=header.parent,
            namespace=header.namespace,
            start=header.start,
            tokens=header.tokens,
            view=self.view,
            bits=header.bits,
            expiry=entry.expiry,
            pinned=bool(entry.flags & FLAG_PINNED),
            alone=True,
            cut=header.cut,
        )

    def groups(self) -> list[GroupWords]:
        """Its layers by the tokens that they keep; all together without windows."""
        words, at, found = self.buffer.array().view(np.uint16), 0, []  # they outlive this object
        for layout, lacks in parts_of(self.layout, self.header):
            tokens = self.header.tokens[lacks:]
            size = len(tokens) * layout.bytes_per_token // words.itemsize
            found.append(GroupWords(layout, tokens, self.header.start + lacks, words[at : at + size]))
            at += size
        return found

    @property
    def is_finite(self) -> bool:
        """Whether all its values, of bfloat16, are numbers."""
        return all(group.is_finite for group in self.groups())


class Cut(Protocol):
    """What says which tokens a block lacks in layers with windows: its header or its entry."""

    @property
    def cut(self) -> int:
        """See `core.record.RecordHeader`."""

    @property
    def start(self) -> int:
        """Position of its first token."""

    @property
    def tokens(self) -> Tokens:
        """Its tokens."""


def parts_of(layout: KVLayout, block: Cut) -> list[tuple[KVLayout, int]]:
    """The groups of layers of a block, as codecs are told them, and how many of its first tokens each lacks."""
    if not layout.is_grouped:
        return [(layout, 0)]
    count = len(block.tokens)
    return [(group.layout, group.missing(block.cut, block.start, count)) for group in layout.groups]


@dataclass(frozen=True)
class BlockReader:
    """Finds and reads blocks that stand alone. Thread-safe: has no state of its own."""

    residency: Residency
    disk: DiskTier
    pool: BufferPool
    profiles: Profiles
    layout: KVLayout
    block_tokens: int

    @property
    def layouts(self) -> list[KVLayout]:
        """Of each group of layers, as codecs are told them."""
        return [group.layout for group in self.layout.groups] if self.layout.is_grouped else [self.layout]

    def newest_first(self, below: int, pause: Callable[[], None]) -> Iterator[Entry]:
        """Yield the entries of whole blocks that stand alone, from record `below` - 1 down. `pause` is called between
        steps of some microseconds."""
        for stop in range(below, 0, -_AT_ONCE):
            pause()
            numbers = range(max(1, stop - _AT_ONCE), stop)
            for entry in reversed(self.disk.known(numbers)):
                if entry is not None and len(entry.tokens) == self.block_tokens and self.stands_alone(entry):
                    yield entry

    def stands_alone(self, entry: Entry) -> bool:
        """Whether the record can be decoded by itself."""
        return not entry.donors and not is_delta(entry.codec)

    def group(self, number: int) -> Callable[[int], GroupWords | None]:
        """Return what reads a group of layers of a block; it gives None as `read` does."""

        def read(record: int) -> GroupWords | None:
            block = self.read(record)
            return None if block is None else block.groups()[number]

        return read

    def whole(self, entry: Entry) -> HostRecord:
        """Return the record of a located entry, any that is on disk, checked. Raises as `read_whole`."""
        return read_whole(self.disk, self.pool, entry)

    def read(self, record: int) -> StoredWords | None:
        """Return a block from disk; None if it is gone or cannot be read. A damaged one is quarantined."""
        entry = self.disk.locate([record])[0]
        if entry is None:
            return None
        try:
            found = self.whole(entry)
            codec = self.profiles.decoder(found.header.codec, found.header.profile)
            parts = parts_of(self.layout, found.header)
            size = sum((found.header.count - lacks) * layout.bytes_per_token for layout, lacks in parts)
            if codec is None or found.header.donors or not size:
                return None
            buffer = self.pool.take(size)
            words = StoredWords(entry, found.header, buffer, self.layout)
            codec.decode(words.info, found.payload, found.header.layer_sizes, words.view)
        except UnknownCodec:
            return None
        except OSError as error:
            self.residency.metrics.add(Metric.DISK_READ_ERRORS, because=error)
            return None
        except DamagedRecord as damage:
            return self.read(record) if self.residency.reject(record, entry, damage.metric) else None
        except CodecError:
            return self.read(record) if self.residency.reject(record, entry, Metric.DAMAGED_CODEC) else None
        finally:
            self.disk.release([entry])
        return words
