"""Whether a value of the remote tier is the record that was asked for. Whoever may write there may have written it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from kvstore.codecs import is_delta
from kvstore.core.keys import chain_key
from kvstore.core.layout import KVLayout
from kvstore.core.record import (
    FLAG_CUT,
    FLAG_PINNED,
    FLAG_STATES,
    FLAG_SUMS,
    Damage,
    DamagedRecord,
    check_payload,
    parse,
)
from kvstore.core.tokens import Tokens
from kvstore.core.windows import raw_bytes
from kvstore.tiers.buffers import Buffer
from kvstore.tiers.remote.record import ExpiredRecord, RemoteRecord

_MOST_BITS = 1 << 20  # of one token; hardly any has more than 50


@dataclass(frozen=True)
class RemoteCheck:
    """What a block that was asked for must be.

    Attributes:
        layout: of the caches.
        exact: only records of codecs that give back every bit.
        namespace: its digest.
        key, parent: of the block and of the one before it.
        start: position of its first token.
        tokens: all of them.
        cut: of a layout with windows, see `RecordHeader`.
        state_bytes: the most that its states may take; 0: it has none.
    """

    layout: KVLayout
    exact: bool
    namespace: bytes
    key: bytes
    parent: bytes
    start: int
    tokens: Tokens
    cut: int = 0
    state_bytes: int = 0

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.tokens)

    def __call__(self, buffer: Buffer) -> RemoteRecord:
        """Return the record in `buffer`, which it fills.

        Raises:
            ExpiredRecord: it is past its time.
            DamagedRecord: it is another block's, damaged, or not one that stands alone.
        """
        data = buffer.view
        header = parse(data, len(data))
        if header.record_bytes != len(data):
            raise DamagedRecord(Damage.LENGTH, f"a record of {header.record_bytes} bytes, found {len(data)}")
        check_payload(header, data)
        if (
            header.namespace != self.namespace
            or header.parent != self.parent
            or header.key != self.key
            or header.start != self.start
            or not np.array_equal(header.tokens, self.tokens)
            or chain_key(header.parent, header.tokens) != header.key
        ):
            raise DamagedRecord(Damage.KEY, "another block's record")
        if header.donors or is_delta(header.codec):
            raise DamagedRecord(Damage.FIELD, "the record does not stand alone")
        has_states = bool(header.flags & FLAG_STATES)
        if (
            header.cut != self.cut
            or has_states != bool(self.state_bytes)
            or header.flags & ~(FLAG_PINNED | FLAG_CUT | FLAG_STATES | FLAG_SUMS)
        ):
            raise DamagedRecord(Damage.FIELD, "the record has other tokens of windows than it should, or other states")
        states = header.raw_bytes - raw_bytes(self.layout, self.cut, self.start, len(self.tokens))
        fits = 0 < states <= self.state_bytes if has_states else states == 0
        if len(header.layer_sizes) != self.layout.sections or not fits:
            raise DamagedRecord(Damage.FIELD, "a record of another layout")
        if self.exact and header.error_bound != 0.0:
            raise DamagedRecord(Damage.FIELD, "a record with loss, of an identity that is exact")
        if not 0.0 <= header.bits <= _MOST_BITS * len(self.tokens):
            raise DamagedRecord(Damage.FIELD, "its bits are out of range")
        if not 0.0 <= header.expiry < math.inf:
            raise DamagedRecord(Damage.FIELD, "the end of its life is out of range")
        if header.expiry and header.expiry <= time.time():
            raise ExpiredRecord(header.expiry)
        return RemoteRecord(header, buffer)
