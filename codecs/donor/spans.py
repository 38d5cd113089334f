"""Which rows of a block are coded against which rows of other blocks: the first bytes of a donor payload.

    mode (4) | spans (2) | angles (2) | flags (4) | bytes of what has no donor (4) | spans, 16 bytes each | angles

A span: first row (2), rows (2), donor (2), first row of the donor (2), position less the donor's (4), angles (4, from
1; 0 for none). An angle is int16 [2 (cos, sin), half] in 1/16384, of a rotation by a span's difference of positions:
with it a record is decoded alike on every machine, whatever its mathematical library rounds to.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import KVLayout
from kvstore.core.rope import ONE, Angles, angles_of
from kvstore.errors import CodecError

EXACT, STEPS, GROUPS = 6, 7, 24
"""Modes: bit for bit, what differs from the donor in steps, bit for bit and predicted in groups."""
PROPAGATED = 1
"""Flag: what a layer differs in predicts the next one, by the profile's section "donor"."""
MAX_SPANS = 256

_HEAD = struct.Struct("<IHHII")
_SPAN = struct.Struct("<HHHHiI")


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a block, and the rows of a donor that have the same tokens. Immutable.

    Attributes:
        start, count: rows [start, start + count) of the block.
        donor: number of the donor, from 0.
        donor_start: its first row.
        shift: position of a row less the position of the donor's row.

    Example:
        >>> Span(start=8, count=40, donor=0, donor_start=24, shift=128).end
        48
    """

    start: int
    count: int
    donor: int
    donor_start: int
    shift: int

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.start + self.count


@dataclass(frozen=True)
class SpanTable:
    """What a donor payload begins with: its spans. Immutable.

    Attributes:
        mode: EXACT, STEPS or GROUPS.
        flags: 0 or PROPAGATED.
        spans: disjoint, in rising order.
        angles: cos and sin of rotations, int16 `[angles, 2, half]` in 1/16384.
        which: index into `angles` for each span; -1 for no rotation.
        rest: bytes, at the payload's end, of the rows in no span.
        nbytes: bytes of the table itself.

    Example:
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=16)
        >>> table = SpanTable.of(layout, [Span(start=8, count=40, donor=0, donor_start=24, shift=0)])
        >>> table.covered(), table.gaps(64)
        (40, [(0, 8), (48, 16)])
    """

    mode: int
    flags: int
    spans: tuple[Span, ...]
    angles: Angles
    which: tuple[int, ...]
    rest: int
    nbytes: int

    @property
    def propagated(self) -> bool:
        return bool(self.flags & PROPAGATED)

    @property
    def donors(self) -> int:
        return max(span.donor for span in self.spans) + 1

    @property
    def runs(self) -> npt.NDArray[np.int64]:
        """First row, rows and index of the angles of each span, `[spans, 3]`, as C++ takes them."""
        rows = [(s.start, s.count, which) for s, which in zip(self.spans, self.which, strict=True)]
        return np.array(rows, np.int64)

    def covered(self) -> int:
        """Return how many rows are in spans."""
        return sum(span.count for span in self.spans)

    def gaps(self, count: int) -> list[tuple[int, int]]:
        """Return (first row, rows) of what lies outside of spans in a block of `count` rows."""
        edges = [0, *(edge for span in self.spans for edge in (span.start, span.end)), count]
        return [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]

    @classmethod
    def of(cls, layout: KVLayout, spans: Sequence[Span], mode: int = EXACT, flags: int = 0) -> SpanTable:
        """Make the table of an encoder. Raises `ValueError` if keys cannot be rotated by a span's shift."""
        rotated = layout.rope != "none"
        shifts = sorted({span.shift for span in spans if span.shift and rotated})
        half = layout.layers[0].key_dim // 2 if rotated else 0
        angles = (
            np.stack([angles_of(layout, shift) for shift in shifts]) if shifts else np.zeros((0, 2, half), np.int16)
        )
        which = tuple(shifts.index(span.shift) if span.shift and rotated else -1 for span in spans)
        return cls(mode, flags, tuple(spans), angles, which, 0, cls._nbytes(len(spans), len(shifts), half))

    @staticmethod
    def _nbytes(spans: int, angles: int, half: int) -> int:
        return _HEAD.size + _SPAN.size * spans + 4 * half * angles

    def pack(self, rest: int) -> bytes:
        """The section's bytes, with the number of bytes of what has no donor."""
        rows = (
            _SPAN.pack(s.start, s.count, s.donor, s.donor_start, s.shift, w + 1)
            for s, w in zip(self.spans, self.which, strict=True)
        )
        head = _HEAD.pack(self.mode, len(self.spans), len(self.angles), self.flags, rest)
        return b"".join([head, *rows, self.angles.astype("<i2", copy=False).tobytes()])

    @classmethod
    def parse(cls, layout: KVLayout, count: int, payload: memoryview) -> SpanTable:
        """Of a block of `count` rows. Raises `CodecError` for anything that `pack` does not write; sizes are checked
        before memory is taken."""
        if len(payload) < _HEAD.size:
            raise CodecError("donor: the payload is too short for its header")
        mode, number, tables, flags, rest = _HEAD.unpack_from(payload)
        rotated = layout.rope != "none"
        half = layout.layers[0].key_dim // 2 if rotated else 0
        nbytes = cls._nbytes(number, tables, half)
        is_known = mode in (EXACT, STEPS, GROUPS) and flags in (0, PROPAGATED if mode == EXACT else 0)
        if not is_known or (tables and not rotated):
            raise CodecError(f"donor: the payload has an unknown mode ({mode}) or unknown flags ({flags})")
        if not 1 <= number <= MAX_SPANS or tables > number or nbytes + rest > len(payload):
            raise CodecError(f"donor: {number} spans with {tables} angles do not fit a payload of {len(payload)} bytes")
        spans, which, end = [], [], 0
        for i in range(number):
            start, rows, donor, donor_start, shift, angle = _SPAN.unpack_from(payload, _HEAD.size + _SPAN.size * i)
            if start < end or not rows or start + rows > count or donor >= number or angle > tables:
                raise CodecError(f"donor: span {i} is empty, overlaps another, or lies outside of the block")
            end = start + rows
            spans.append(Span(start, rows, donor, donor_start, shift))
            which.append(angle - 1)
        at = _HEAD.size + _SPAN.size * number
        angles = np.frombuffer(payload, "<i2", 2 * half * tables, at).reshape(tables, 2, half).astype(np.int16)
        if angles.size and (angles.min() < -ONE or angles.max() > ONE):
            raise CodecError("donor: cosines and sines must be between -1 and 1")
        return cls(mode, flags, tuple(spans), angles, tuple(which), rest, nbytes)
