"""A catalog entry: the layout of its bytes, in one place (FORMAT.md, "Catalog").

    checksum | the other columns of `ENTRY` | tokens (4 each) | donors (8 each), or the cut (8)

Every value of the catalog begins with a checksum of the rest. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.config import PAGE_BYTES
from kvstore.core.record import FLAG_CUT, FLAG_SUMS, RecordHeader, key_tag
from kvstore.core.tokens import Tokens
from kvstore.tiers.base import Source
from kvstore.tiers.disk._catalog import parents
from kvstore.tiers.disk.segment import Extent, Hold

ENTRY = np.dtype(
    [
        ("sum", "<u8"),
        ("record", "<u8"),
        ("parent", "<u8"),
        ("tag", "<u8"),
        ("parent_tag", "<u8"),
        ("segment", "<u4"),
        ("page", "<u4"),
        ("pages", "<u4"),
        ("start", "<u4"),
        ("count", "<u4"),
        ("namespace", "<u4"),
        ("bits", "<f4"),
        ("codec", "<u2"),
        ("flags", "<u2"),
        ("expiry", "<f8"),
    ]
)
FLAG_HOLE = 2  # of an entry alone; the other flags are those of `RecordHeader`
_HEAD = struct.Struct("<QQQQQIIIIIIfHHd")  # the same columns, for one entry
_SUM = struct.Struct("<Q")
_TOKENS = np.dtype("<u4")
SUM_BYTES = _SUM.size
MAX_RECORD = 1 << 62  # record numbers are below it
_NO_RECORD, _TOO_LARGE = bytes(8), MAX_RECORD.to_bytes(8, "big")  # as keys
_RECORD_AT, _COUNT_AT, _FLAGS_AT = (ENTRY.fields[name][1] for name in ("record", "count", "flags"))  # type: ignore[index]
assert _HEAD.size == ENTRY.itemsize


@dataclass(frozen=True)
class Entry(Source):
    """One record as the catalog knows it; the disk tier reads it. Immutable.

    Or a *hole*: a record that left while others continue it. Its entry stays, with the tokens that those need to have
    a place, and without an extent; it goes when a new record of the same block is written, or the last one behind it
    goes.

    Attributes:
        record: its number.
        parent: number of the record before it when this one was stored, 0 for none.
        tag, parent_tag: the first 8 bytes of the key of the block and of the block before it, 0 before the first.
        extent: where the record lies.
        start: position of its first token.
        namespace: number of the namespace.
        codec: number of the codec.
        tokens: uint32 `[n]`.
        bits: -log2 P of its tokens.
        flags: as in `RecordHeader`, and FLAG_HOLE.
        expiry: unix seconds, 0 for never.
        donors: numbers of the records that it is coded against.
        cut: as in `RecordHeader`; a record that has one has no donors.
        hold: keeps the segment from being recycled; None if the entry was not located to be read.

    Example:
        >>> extent = Extent(segment=1, offset=4096, nbytes=8192)
        >>> entry = Entry(5, 4, 10, 11, extent, start=64, namespace=1, codec=7, tokens=np.array([1, 2], np.uint32))
        >>> Entry.unpack(entry.pack()).tokens
        array([1, 2], dtype=uint32)
        >>> Entry.unpack(entry.pack()[:-1]) is None
        True
    """

    record: int
    parent: int
    tag: int
    parent_tag: int
    extent: Extent
    start: int
    namespace: int
    codec: int
    tokens: Tokens
    bits: float = 0.0
    flags: int = 0
    expiry: float = 0.0
    donors: tuple[int, ...] = ()
    cut: int = 0
    hold: Hold | None = field(default=None, repr=False, compare=False)

    @property
    def tier(self) -> str:
        return "disk"

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes

    @property
    def codec_id(self) -> int | None:
        return self.codec

    @property
    def has_layer_sums(self) -> bool:
        return bool(self.flags & FLAG_SUMS)

    @property
    def is_hole(self) -> bool:
        """Whether this is all that is left of the record."""
        return bool(self.flags & FLAG_HOLE)

    def as_hole(self) -> Entry:
        """Return what stays of the record when it leaves the middle of its sequence."""
        return replace(self, extent=Extent(0, 0, 0), codec=0, flags=FLAG_HOLE, expiry=0.0, donors=(), cut=0)

    @property
    def packed_bytes(self) -> int:
        """How many bytes `pack` returns."""
        return ENTRY.itemsize + 4 * len(self.tokens) + 8 * len(self._last)

    @property
    def _last(self) -> tuple[int, ...]:
        """The numbers behind the tokens."""
        return (self.cut,) if self.cut else self.donors

    def pack(self) -> bytes:
        """Return the bytes for the catalog (FORMAT.md, "Catalog")."""
        body = _HEAD.pack(
            0,
            self.record,
            self.parent,
            self.tag,
            self.parent_tag,
            self.extent.segment,
            self.extent.offset // PAGE_BYTES,
            self.extent.nbytes // PAGE_BYTES,
            self.start,
            len(self.tokens),
            self.namespace,
            self.bits,
            self.codec,
            self.flags,
            self.expiry,
        )[SUM_BYTES:]
        last = np.array(self._last, "<u8").tobytes()
        return with_sum(body + self.tokens.astype("<u4", copy=False).tobytes() + last)

    @classmethod
    def unpack(cls, value: bytes) -> Entry | None:
        """Read what `pack` wrote. Returns None if the bytes are damaged; never raises for any bytes."""
        if not is_entry_sized(value) or checked(value) is None:
            return None
        head = _HEAD.unpack_from(value)
        _, record, parent, tag, parent_tag, segment, page, pages, start, count, namespace, bits, codec, flags, end = (
            head
        )
        entry, more = cls.__new__(cls), len(value) > _HEAD.size + 4 * count
        # What the method that the dataclass has would do; a catalog reads millions, and that takes half of the time.
        entry.__dict__.update(
            record=record,
            parent=parent,
            tag=tag,
            parent_tag=parent_tag,
            extent=Extent(segment, page * PAGE_BYTES, pages * PAGE_BYTES),
            start=start,
            namespace=namespace,
            codec=codec,
            tokens=np.frombuffer(value, _TOKENS, count, _HEAD.size),
            bits=bits,
            flags=flags,
            expiry=end,
            donors=donors_of(value) if more else (),
            cut=cut_of(value) if more else 0,
            hold=None,
        )
        return entry


@dataclass(frozen=True)
class Scan:
    """All intact entries of the catalog, sorted by record number. Immutable.

    Attributes:
        entries: columns of `ENTRY`, of the records.
        tokens: the tokens of all entries, those of each together.
        token_at: uint64 `[entries]`, where in `tokens` those of each record begin.
        damaged: keys of the entries that are not intact.
        donors: donors by record, for the records that have any.
        cuts: cuts by record, for the records that have one.
        holes: columns of `ENTRY`, of the holes.
        hole_token_at: the same as `token_at`, of the holes.

    Example:
        >>> scan = Scan.of(np.zeros(0, ENTRY), np.zeros(0, np.uint32))
        >>> len(scan.entries), scan.token_count
        (0, 0)
    """

    entries: npt.NDArray[np.void]
    tokens: Tokens
    token_at: npt.NDArray[np.uint64]
    damaged: list[bytes]
    donors: dict[int, tuple[int, ...]]
    cuts: dict[int, int]
    holes: npt.NDArray[np.void]
    hole_token_at: npt.NDArray[np.uint64]

    @classmethod
    def of(
        cls,
        entries: npt.NDArray[np.void],
        tokens: Tokens,
        damaged: list[bytes] | None = None,
        donors: dict[int, tuple[int, ...]] | None = None,
        cuts: dict[int, int] | None = None,
        token_at: npt.NDArray[np.uint64] | None = None,
    ) -> Scan:
        """Return the scan of entries among which there may be holes; token_at: default is one after the other."""
        at = token_at if token_at is not None else _one_after_the_other(entries["count"])
        is_hole = (entries["flags"] & FLAG_HOLE) != 0
        holes, hole_at = entries[is_hole], at[is_hole]
        if len(holes):
            entries, at = entries[~is_hole], at[~is_hole]
        return cls(entries, tokens, at, damaged or [], donors or {}, cuts or {}, holes, hole_at)

    @property
    def token_count(self) -> int:
        """How many tokens the records have."""
        return int(self.entries["count"].sum(dtype=np.int64))

    def tokens_of(self, i: int) -> Tokens:
        """Return the tokens of record `i` of `entries`."""
        at = int(self.token_at[i])
        return self.tokens[at : at + int(self.entries["count"][i])]

    def tokens_in_order(self) -> Tokens:
        """Return the tokens of all records, in the order of `entries`."""
        if len(self.tokens) == self.token_count and np.array_equal(
            self.token_at, _one_after_the_other(self.entries["count"])
        ):
            return self.tokens
        return np.concatenate([np.zeros(0, np.uint32), *map(self.tokens_of, range(len(self.entries)))])

    @property
    def last_record(self) -> int:
        """The highest number of a record or a hole; 0 if there is none."""
        return max(int(rows["record"].max(initial=0)) for rows in (self.entries, self.holes))

    @property
    def hole_bytes(self) -> int:
        """How many bytes the entries of the holes take."""
        return ENTRY.itemsize * len(self.holes) + 4 * int(self.holes["count"].sum(dtype=np.int64))

    def with_holes(self, more: Sequence[Entry]) -> Scan:
        """Return the same with more holes, which come last."""
        holes = _columns(more)
        at = _one_after_the_other(holes["count"]) + np.uint64(len(self.tokens))
        return replace(
            self,
            tokens=np.concatenate([self.tokens, *(entry.tokens for entry in more)]),
            holes=np.concatenate([self.holes, holes]),
            hole_token_at=np.concatenate([self.hole_token_at, at]),
        )

    def subset(self, keep: npt.NDArray[np.bool_]) -> Scan:
        """Return the records for which `keep`, bool `[entries]`, is true, and all holes."""
        if keep.all():
            return self
        entries = self.entries[keep]
        left = set(entries["record"].tolist()) if self.donors or self.cuts else set()
        donors = {record: donors for record, donors in self.donors.items() if record in left}
        cuts = {record: cut for record, cut in self.cuts.items() if record in left}
        return replace(self, entries=entries, token_at=self.token_at[keep], donors=donors, cuts=cuts)


def _one_after_the_other(counts: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Where each of so many begins."""
    return np.cumsum(counts, dtype=np.uint64) - counts


def _columns(entries: Sequence[Entry]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join([entry.pack()[: ENTRY.itemsize] for entry in entries]), ENTRY)


def parents_of(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """Return the number of the record before each entry, uint64 `[n]`: the one that is stored now, not the one that was
    there when the entry was made; that where none is stored, 0 before the first.

    Args:
        rows: columns of `ENTRY`, by rising record number.
    """
    return parents(np.ascontiguousarray(rows).view(np.uint8))


def entry_of(header: RecordHeader, extent: Extent, parent: int, namespace: int) -> Entry:
    """Return the catalog's entry for a record."""
    return Entry(
        record=header.record_id,
        parent=parent,
        tag=key_tag(header.key),
        parent_tag=key_tag(header.parent) if header.start else 0,
        extent=extent,
        start=header.start,
        namespace=namespace,
        codec=header.codec,
        tokens=header.tokens,
        bits=header.bits,
        flags=header.flags,
        expiry=header.expiry,
        donors=tuple(donor.record for donor in header.donors),
        cut=header.cut,
    )


def with_sum(body: bytes) -> bytes:
    """Return a value for the catalog: `body` behind its checksum."""
    return _SUM.pack(xxhash.xxh3_64_intdigest(body)) + body


def checked(value: bytes) -> bytes | None:
    """Return the contents of a checksummed value; None if it is damaged."""
    body = value[SUM_BYTES:]
    if len(value) < SUM_BYTES or _SUM.unpack_from(value)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    return body


def is_entry(key: bytes, value: bytes) -> bool:
    """Return whether a value is intact, and the entry of the record that `key` names.

    The inner loop of a scan: the checks of `Entry.unpack`, without making an object.
    """
    if not is_entry_sized(value) or checked(value) is None:
        return False
    # Numbers are counted from 1 on: no store writes such a large one, and no number could follow it.
    return value[_RECORD_AT : _RECORD_AT + 8] == key[::-1] and _NO_RECORD < key < _TOO_LARGE


def tokens_end(value: bytes) -> int:
    """Return where the tokens of an entry end, and its donors begin."""
    return ENTRY.itemsize + 4 * int.from_bytes(value[_COUNT_AT : _COUNT_AT + 4], "little")


def is_entry_sized(value: bytes) -> bool:
    """Return whether a value has the length of an entry: head, tokens, donors."""
    left = len(value) - tokens_end(value)
    return len(value) >= ENTRY.itemsize and left >= 0 and left % 8 == 0


def donors_of(value: bytes) -> tuple[int, ...]:
    """Return the donors that an entry names."""
    return () if _flags_of(value) & FLAG_CUT else _last_of(value)


def cut_of(value: bytes) -> int:
    """Return the cut that an entry names; 0 for none."""
    last = _last_of(value) if _flags_of(value) & FLAG_CUT else ()
    return last[0] if len(last) == 1 else 0


def _last_of(value: bytes) -> tuple[int, ...]:
    """The numbers behind the tokens."""
    end = tokens_end(value)
    return tuple(np.frombuffer(value, "<u8", -1, end).tolist()) if len(value) > end else ()


def _flags_of(value: bytes) -> int:
    return int.from_bytes(value[_FLAGS_AT : _FLAGS_AT + 2], "little")
