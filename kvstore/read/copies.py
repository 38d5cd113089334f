"""Blocks of a get that are only copied: noted one by one, and copied all at once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvstore.codecs import KVView
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.registry import only_copies
from kvstore.codecs.view import Packed
from kvstore.config import MIB
from kvstore.core.tokens import Tokens
from kvstore.read.block_read import BlockRead
from kvstore.read.decode_times import DecodeTimes
from kvstore.tiers.base import SealedSource

ENOUGH_BYTES = 4 * MIB  # to let go of Python's lock for; more would keep more memory


@dataclass
class Copies:
    """Records that hold their tensors as they are, and the part of a result that each goes to. For one thread.

    Whoever lets go of Python's lock for each of many small blocks has to wait for it as often, and whoever keeps it
    keeps others from going on: all are copied by one call.

    Attributes:
        out: the result, on the CPU.
        origin: position of its first token.
        times: is told how long copying took.
    """

    out: KVView
    origin: int
    times: DecodeTimes
    # The records are kept: their memory goes to others once nobody refers to them, whatever views of it there are.
    _noted: list[tuple[BlockRead, SealedSource, Packed]] = field(default_factory=list)
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
        self._noted.append((read, record, piece))
        self._nbytes += len(piece.memory)
        if self._nbytes >= ENOUGH_BYTES:
            self.make()
        return True

    def make(self) -> None:
        """Copy what was noted into the result."""
        if not self._noted:
            return
        begin = time.perf_counter()
        self.out.unpack_all([piece for _, _, piece in self._noted])
        each = (time.perf_counter() - begin) / len(self._noted)
        for read, record, _ in self._noted:
            self.times.add(read, record.header.codec, each)
        self._noted, self._nbytes = [], 0

    def _expected(self, tokens: Tokens, start: int) -> tuple[int, ...]:
        sizes = self._layer_bytes.get(len(tokens))
        if sizes is None:
            sizes = self._layer_bytes[len(tokens)] = tuple(BlockInfo(self.out.layout, tokens, start).layer_bytes())
        return sizes
