"""Layers that are read after the get: those of all blocks before the next ones of any, into memory that is used again.

A get of many large records that wants one layer after another reads of each record the beginning, with the first layer.
What is read later is a stripe: some layers of some blocks, each of which has a checksum of its own.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from kvstore.codecs import Codec, KVView
from kvstore.codecs.base import BlockInfo, CodedBlock
from kvstore.codecs.registry import has_layers_apart
from kvstore.config import KIB, MIB, PAGE_BYTES
from kvstore.core.record import (
    HEADER_BYTES,
    DamagedRecord,
    RecordHeader,
    check_layers,
    header_bytes,
    layer_sums,
    padded,
    parse,
)
from kvstore.metrics import Metric, Metrics
from kvstore.read.block_read import BlockRead
from kvstore.read.decode import check_identity
from kvstore.residency.lifecycle import interrupted
from kvstore.tiers.base import Part, ReadsAhead, Source, StorageTier
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.disk.fs import is_passing
from kvstore.tiers.profiles import Profiles

# Less of a record at a time would be read more slowly; of a smaller cache, a get has most as soon as it has the first.
_PART_BYTES, _LEAST_BYTES, _MOST_PARTS = 160 * KIB, 6 * MIB, 8
# The first layer may take so many times its share of a record, and is read with the beginning of that.
_MARGIN = 2
DECODING = "the decoding of a layer"
# What may be under way, or wait to be decoded.
_AHEAD_BYTES = 12 * MIB


class Finishes(Protocol):
    """Reads layers after a get."""

    @property
    def is_here(self) -> bool:
        """Whether this thread is doing so, and was interrupted by the code that asks."""

    def finish(self) -> None:
        """Read and decode everything that is left."""


Lost = tuple[BlockRead, Metric | None]
"""A block of which layers cannot be had, and the counter of its damage; None if it may be read later."""


def is_striped(source: Source) -> bool:
    """Return whether a record can be read in parts."""
    return source.has_layer_sums and has_layers_apart(source.codec_id)


def parts_of(reads: Sequence[BlockRead], layers: int) -> int:
    """Return in how many parts behind the first layer records are worth reading whose layers are wanted one after
    another; 1 for whole records.

    Args:
        reads: of one get, all of one tier.
        layers: of each record.
    """
    sizes = [read.source.nbytes for read in reads if is_striped(read.source)]
    if sum(sizes) < max(_LEAST_BYTES, sum(read.source.nbytes for read in reads) / 2):
        return 1
    return max(1, min(_MOST_PARTS, max(sizes) // _PART_BYTES, layers // _MARGIN))


def first_bytes(source: Source, layers: int) -> int:
    """Return how much of a record is read first, whole pages: what has the first of so many layers; 0 for all of it."""
    if not layers or not is_striped(source):
        return source.nbytes
    return min(source.nbytes, padded(-(-_MARGIN * source.nbytes // layers)))


@dataclass(frozen=True)
class StripedBlock:
    """A block of which the first layers are in memory, read and checked.

    Attributes:
        read: what was wanted.
        number: of the block among those of its get.
        header: of its record.
        sums: checksums of the layers.
        codec: that decodes each layer by itself.
        at: the token of the result where it begins.
    """

    read: BlockRead
    number: int
    header: RecordHeader
    sums: bytes
    codec: Codec
    at: int
    ends: Sequence[int] = field(init=False)  # of the layers, in the record

    def __post_init__(self) -> None:
        sizes, begin = self.header.layer_sizes, self.header.payload_offset
        object.__setattr__(self, "ends", list(accumulate(sizes, initial=begin)))

    @classmethod
    def of(
        cls, read: BlockRead, number: int, data: memoryview, profiles: Profiles, out: KVView, origin: int
    ) -> StripedBlock | None:
        """Return the block of a record that begins with `data`; None if it must be read whole.

        Args:
            profiles: know the codec of the record.
            out, origin: the result, and the position of its first token.

        Raises:
            DamagedRecord: it does not begin the record that was wanted.
        """
        if len(data) < header_bytes(data[:HEADER_BYTES].tobytes()) <= read.source.nbytes:
            return None  # it is small, and has many tokens
        header = parse(data, read.source.nbytes)
        check_identity(read, header)
        fits = header.has_sums and len(header.layer_sizes) == len(out.layout.layers) and not header.donors
        codec = profiles.decoder(header.codec, header.profile) if fits and has_layers_apart(header.codec) else None
        if codec is None:
            return None
        return cls(read, number, header, layer_sums(header, data), codec, read.start - origin)

    def begins_with(self, layers: range, data: memoryview) -> bool:
        """Whether `data`, the beginning of the record, has these layers."""
        return self.ends[layers.stop] <= len(data)

    def pages(self, layers: range) -> range:
        """Return where in the record the pages lie with these layers."""
        begin, end = self.ends[layers.start], self.ends[layers.stop]
        return range(begin // PAGE_BYTES * PAGE_BYTES, min(padded(end), self.read.source.nbytes))

    def coded(self, layers: range, memory: memoryview, begin: int, part: KVView) -> CodedBlock:
        """Return these layers, checked.

        Args:
            memory: the record from byte `begin` on.
            part: the result, of these layers alone.

        Raises:
            DamagedRecord: a checksum differs.
        """
        payload = memory[self.ends[layers.start] - begin : self.ends[layers.stop] - begin]
        check_layers(self.header, self.sums, layers, payload)
        info = BlockInfo(part.layout, self.header.tokens, self.header.start)
        sizes = self.header.layer_sizes[layers.start : layers.stop]
        return CodedBlock(info, payload, sizes, self.at, len(self.read.tokens))


def decode_first(
    blocks: Sequence[tuple[StripedBlock, memoryview]], first: range, out: KVView
) -> list[tuple[StripedBlock, Metric]]:
    """Decode the first layers of blocks from what their records begin with; return which are damaged, and how."""
    return _decode([(block, memory, 0) for block, memory in blocks], first, out)


def _decode(
    pieces: Sequence[tuple[StripedBlock, memoryview, int]], layers: range, out: KVView
) -> list[tuple[StripedBlock, Metric]]:
    """Decodes layers of blocks, each from the bytes of its record behind a place."""
    lost, part = list[tuple[StripedBlock, Metric]](), out.layers(layers)
    alike: dict[int, list[tuple[StripedBlock, CodedBlock]]] = {}
    for block, memory, begin in pieces:
        try:
            coded = block.coded(layers, memory, begin, part)
        except DamagedRecord as damage:
            lost.append((block, damage.metric))
        else:
            alike.setdefault(id(block.codec), []).append((block, coded))
    for same in alike.values():
        decode = same[0][0].codec.by_layers([coded for _, coded in same], part)
        bad = decode(range(len(layers)), range(len(same)))
        lost += [(same[number][0], Metric.DAMAGED_CODEC) for number in bad]
    return lost


@dataclass(frozen=True)
class Stripe:
    """Some layers of some blocks.

    Attributes:
        layers: which.
        blocks: of one get, in order.
    """

    layers: range
    blocks: Sequence[StripedBlock]

    def spans(self) -> list[range]:
        """Return where in each record the pages lie."""
        return [block.pages(self.layers) for block in self.blocks]


class Finishing:
    """Those who still read layers, which closing the store waits for. Thread-safe. Who is referred to nowhere else
    leaves."""

    def __init__(self) -> None:
        self._all = weakref.WeakSet[Finishes]()
        self._lock = threading.RLock()  # a thread that is interrupted while it adds one may ask

    def add(self, one: Finishes) -> None:
        """Note one."""
        with self._lock:
            self._all.add(one)

    def check(self) -> None:
        """Raise `StoreBusy` if this thread is inside one of them, which would wait for itself."""
        with self._lock:
            here = any(one.is_here for one in self._all)
        if here:
            raise interrupted(DECODING)

    def finish(self) -> None:
        """Let all of them finish. Raises as `check` does."""
        self.check()
        with self._lock:
            left = list(self._all)
        for one in left:
            one.finish()


@dataclass(frozen=True)
class Striping:
    """How the records of one get are read.

    Attributes:
        layers: of each record.
        parts: of a record, behind its first layer, that are read one after the other.
        tier: where the records are.
        reads: of that tier.
        pool: memory for what is read.
        metrics: counts what cannot be read.
        finishing: where they are noted who read later.
    """

    layers: int
    parts: int
    tier: StorageTier[Any]
    reads: ReadsAhead[Any]
    pool: BufferPool
    metrics: Metrics
    finishing: Finishing

    def reader(self, stripes: Sequence[Stripe], out: KVView) -> StripeReader:
        """Return what reads layers later, and decodes them into `out`; some reads have begun."""
        return StripeReader(self, stripes, out)


@dataclass(frozen=True)
class _UnderWay:
    """A stripe that is being read. parts: the bytes of each block; numbers: of the reads, () if none could begin."""

    buffer: Buffer
    parts: Sequence[Part]
    numbers: Sequence[int]


class StripeReader:
    """Reads and decodes stripes, some of which are read before they are wanted. Thread-safe; `_lock` guards the rest.

    Args:
        how: what reads.
        stripes: in the order in which they are wanted.
        out: where they are decoded.
    """

    def __init__(self, how: Striping, stripes: Sequence[Stripe], out: KVView) -> None:
        self._how = how
        self._stripes = stripes
        self._out = out
        self._lock = threading.Lock()
        self._begun: dict[int, _UnderWay] = {}
        self._next = 0
        self._nbytes = 0
        self._done: dict[int, list[Lost]] = {}
        with self._lock:
            self._begin()

    def decode(self, number: int) -> list[Lost]:
        """Decode a stripe; return of which blocks it is lost. By one thread; again if it was interrupted."""
        if number in self._done:  # the place of its records may have been given away
            return self._done[number]
        stripe, here = self._stripes[number], self._take(number)
        lost = list[Lost]()
        pieces = list[tuple[StripedBlock, memoryview, int]]()
        whole = self._wait(here)
        for block, piece in zip(stripe.blocks, here.parts, strict=True):
            try:
                if not whole:
                    self._read(piece)
                pieces.append((block, piece.memory, piece.begin))
            except OSError as error:
                lost.append((block.read, None if is_passing(error) else Metric.DAMAGED_UNREADABLE))
        lost += [(block.read, why) for block, why in _decode(pieces, stripe.layers, self._out)]
        self._note(number, lost)
        return lost

    def _note(self, number: int, lost: list[Lost]) -> None:
        """Once all stripes are there, others may have the place of their records."""
        with self._lock:
            self._done[number] = lost
            if len(self._done) < len(self._stripes):
                return
        sources = {block.number: block.read.source for stripe in self._stripes for block in stripe.blocks}
        self._how.tier.release(sources.values())

    def _take(self, number: int) -> _UnderWay:
        with self._lock:
            found = self._begun.pop(number, None)
            if found is None:  # threads are far ahead of each other, or one was interrupted
                found = self._started(self._stripes[number])
                self._next = max(self._next, number + 1)
            else:
                self._nbytes -= len(found.buffer.view)
            self._begin()
        return found

    def _begin(self) -> None:
        """Begin the next stripes, as many as may be under way."""
        while self._next < len(self._stripes) and self._nbytes < _AHEAD_BYTES:
            found = self._begun[self._next] = self._started(self._stripes[self._next])
            self._next += 1
            self._nbytes += len(found.buffer.view)

    def _started(self, stripe: Stripe) -> _UnderWay:
        spans, parts, at = stripe.spans(), [], 0
        buffer = self._how.pool.take(sum(map(len, spans)))
        for block, span in zip(stripe.blocks, spans, strict=True):
            parts.append(Part(block.read.source, span.start, buffer.view[at : at + len(span)]))
            at += len(span)
        numbers: Sequence[int] = ()
        with contextlib.suppress(OSError):  # it is read when it is wanted, and fails then
            numbers = self._how.reads.begin_parts(parts, buffer)
        return _UnderWay(buffer, parts, numbers)

    def _wait(self, here: _UnderWay) -> bool:
        """Wait for what is under way; return whether all of it was read."""
        good = bool(here.numbers)
        for number in here.numbers:
            try:
                self._how.reads.wait(number)
            except OSError as error:
                self._how.metrics.add(Metric.DISK_READ_ERRORS, because=error)
                good = False
        return good

    def _read(self, part: Part) -> None:
        """Read a part by itself, in a read of its whole record. Raises: OSError."""
        buffer = self._how.pool.take(part.source.nbytes)
        self._how.tier.read([part.source], [buffer])
        part.memory[:] = buffer.view[part.begin : part.begin + len(part.memory)]
