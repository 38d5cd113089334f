"""Blocks of a get that are only copied: noted one by one, and copied all at once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvstore.codecs import KVView
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.registry import codec_label, only_copies
from kvstore.codecs.view import Packed
from kvstore.config import MIB
from kvstore.core.tokens import Tokens
from kvstore.gate.gate import Gate
from kvstore.metrics import Metrics
from kvstore.read.block_read import BlockRead
from kvstore.read.place import place_in
from kvstore.tiers.base import SealedSource
from kvstore.timing import Timing

_ENOUGH_BYTES = 4 * MIB  # to let go of Python's lock for; more would keep more memory


@dataclass
class Copies:
    """Records that hold their tensors as they are, and the part of a result that each goes to. For one thread.

    Whoever lets go of Python's lock for each of many small blocks has to wait for it as often, and whoever keeps it
    keeps others from going on: all are copied by one call.

    Attributes:
        out: the result, on the CPU.
        origin: position of its first token.
        gate, metrics: are told how long copying took.
        within: see `Spans.here`.
    """

    out: KVView
    origin: int
    gate: Gate
    metrics: Metrics
    within: object
    _noted: list[tuple[BlockRead, SealedSource]] = field(default_factory=list)
    _pieces: list[Packed] = field(default_factory=list)  # of these
    _nbytes: int = 0
    _layer_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by tokens

    def note(self, read: BlockRead, record: SealedSource) -> bool:
        """Note a record that was checked; return False if it must be decoded instead. Copies what is a lot."""
        header = record.header
        count, wanted = len(header.tokens), len(read.tokens)
        if not only_copies(header.codec) or header.cut or wanted > count:
            return False
        if header.layer_sizes != self._expected(header.tokens, header.start):
            return False
        piece = Packed(record.payload, count, read.start - self.origin, wanted)
        self._noted.append((read, record))
        self._pieces.append(piece)
        self._nbytes += len(piece.memory)
        if self._nbytes >= _ENOUGH_BYTES:
            self.make()
        return True

    def make(self) -> None:
        """Copy what was noted into the result."""
        if not self._noted:
            return
        begin = time.perf_counter()
        self.out.unpack_all(self._pieces)
        each = (time.perf_counter() - begin) / len(self._noted)
        for read, record in self._noted:
            where = place_in(read.source.tier, read.source.codec_id)
            self.metrics.timings.observe(Timing.DECODE, each, where)
            if self.metrics.spans is not None:
                self.metrics.spans.done("decode", each, len(read.tokens), where, self.within)
            self.gate.observe_decode(codec_label(record.header.codec), len(read.tokens), each)
        self._noted, self._pieces, self._nbytes = [], [], 0

    def _expected(self, tokens: Tokens, start: int) -> tuple[int, ...]:
        sizes = self._layer_bytes.get(len(tokens))
        if sizes is None:
            sizes = self._layer_bytes[len(tokens)] = tuple(BlockInfo(self.out.layout, tokens, start).layer_bytes())
        return sizes
