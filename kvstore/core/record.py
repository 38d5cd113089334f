"""A record: one block of one sequence, all layers, as bytes that describe themselves (FORMAT.md, "Record").

    header (256) | layer sizes (4 each) | tokens (4 each) | donors (40 each) | layer sums (8 each, in some records)
    | zeros to a multiple of 64 | payload

The payload is the layers' coded bytes one after the other. Everything before the payload is covered by `header_sum`,
the payload by `payload_sum` (both xxh3-128). Where there are layer sums (xxh3-64), each covers the bytes of its layer,
so that one can be read and checked without the others, and `payload_sum` covers the sums. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.config import PAGE_BYTES
from kvstore.core._sums import LEAST_BYTES, LEAST_BYTES_64, xxh3_64_each, xxh3_128
from kvstore.core.tokens import Tokens
from kvstore.metrics import Metric

MAGIC = b"KVSTREC1"
VERSION = 1
FLAG_PINNED = 1
FLAG_CUT = 4  # 2 is a flag of catalog entries alone
FLAG_STATES = 8
FLAG_SUMS = 16
KNOWN_FLAGS = FLAG_PINNED | FLAG_CUT | FLAG_STATES | FLAG_SUMS
NO_KEY = bytes(32)
ALIGNMENT = 64

_BEGINNING = struct.Struct("<8sHHI")  # magic, version, codec, where the payload starts
_HEADER = struct.Struct(_BEGINNING.format + "32s32s32s32s16sQQQIIIffIdH2xI16s16s")
_DONOR = struct.Struct("<Q32s")
HEADER_BYTES = _HEADER.size
_SUM_BYTES = 16
_LAYER_SUM_BYTES = 8
_BRIEF_BYTES = 1 << 20  # the most that is summed with Python's lock
assert HEADER_BYTES == 256


class _Fixed(NamedTuple):
    """The columns of `_HEADER`."""

    magic: bytes
    version: int
    codec: int
    payload_offset: int
    key: bytes
    parent: bytes
    first_donor: bytes
    namespace: bytes
    profile: bytes
    record_id: int
    raw_bytes: int
    payload_bytes: int
    tokens: int
    start: int
    layers: int
    error_bound: float
    bits: float
    flags: int
    expiry: float
    donors: int
    cut: int
    payload_sum: bytes
    header_sum: bytes


class Damage(Enum):
    """Why bytes are not a record; each kind has a counter of its own.

    Example:
        >>> Damage.KEY.value
        'key'
    """

    MAGIC = "magic"
    VERSION = "version"
    LENGTH = "length"
    HEADER_SUM = "header_sum"
    PAYLOAD_SUM = "payload_sum"
    KEY = "key"
    FIELD = "field"


class DamagedRecord(Exception):
    """Bytes that are not an intact record. Readers turn it into a counted miss; users never see it.

    Attributes:
        damage: the kind of damage.

    Example:
        >>> str(DamagedRecord(Damage.LENGTH, "100 bytes are no header"))
        'length: 100 bytes are no header'
    """

    def __init__(self, damage: Damage, detail: str) -> None:
        super().__init__(f"{damage.value}: {detail}")
        self.damage = damage

    @property
    def metric(self) -> Metric:
        """The counter of such damage."""
        return Metric[f"DAMAGED_{self.damage.name}"]


@dataclass(frozen=True, slots=True)
class Donor:
    """A record that another one is coded against. Immutable.

    Attributes:
        record: its number in this store.
        key: key of its block, 32 bytes.

    Example:
        >>> Donor(record=7, key=NO_KEY).record
        7
    """

    record: int
    key: bytes


@dataclass(frozen=True)
class RecordHeader:
    """What a record says of itself. Immutable.

    Attributes:
        key: key of the block (`keys.chain_key`).
        parent: key of the block before it; the chain's root for the first block.
        namespace: digest of the namespace, 32 bytes.
        codec: number of the codec.
        record_id: number in this store.
        start: position of its first token.
        tokens: uint32 `[n]`.
        layer_sizes: coded bytes of each layer.
        raw_bytes: bytes of the block before coding.
        bits: -log2 P of its tokens.
        expiry: unix seconds, 0 for never.
        flags: FLAG_PINNED, if it is; FLAG_CUT, if `cut` is not 0; FLAG_STATES, if it has the states at its end;
            FLAG_SUMS, if each layer has a checksum.
        profile: id of the profile it needs, 16 bytes, zeros for none.
        error_bound: the largest error of a value; 0 for exact codecs.
        donors: the records it is coded against.
        cut: length of the cache it was taken from, if layers with windows lack some of its tokens; else 0.

    Example:
        >>> tokens = np.array([1, 2, 3], np.uint32)
        >>> header = RecordHeader(NO_KEY, NO_KEY, NO_KEY, 0, 1, start=0, tokens=tokens, layer_sizes=(8,), raw_bytes=8)
        >>> header.payload_offset, header.record_bytes
        (320, 328)
        >>> record = memoryview(bytearray(header.record_bytes))
        >>> seal(header, record)
        >>> parse(record, max_record_bytes=4096).tokens
        array([1, 2, 3], dtype=uint32)
    """

    key: bytes
    parent: bytes
    namespace: bytes
    codec: int
    record_id: int
    start: int
    tokens: Tokens
    layer_sizes: tuple[int, ...]
    raw_bytes: int
    bits: float = 0.0
    expiry: float = 0.0
    flags: int = 0
    profile: bytes = bytes(16)
    error_bound: float = 0.0
    donors: tuple[Donor, ...] = ()
    cut: int = 0

    @property
    def count(self) -> int:
        """How many tokens the block has."""
        return len(self.tokens)

    @cached_property
    def payload_bytes(self) -> int:
        """Coded bytes of all layers."""
        return sum(self.layer_sizes)

    @cached_property
    def payload_offset(self) -> int:
        """Where the payload starts in the record."""
        return payload_offset(len(self.layer_sizes), self.count, len(self.donors), self.has_sums)

    @property
    def has_sums(self) -> bool:
        """Whether each layer has a checksum of its own."""
        return bool(self.flags & FLAG_SUMS)

    @property
    def record_bytes(self) -> int:
        """Bytes of the record without the padding to a page that it has on disk."""
        return self.payload_offset + self.payload_bytes


def payload_offset(layers: int, tokens: int, donors: int = 0, has_sums: bool = False) -> int:
    """Return where the payload of a record starts, by its numbers of layers, tokens and donors.

    has_sums: whether each layer has a checksum; with them it is never less than without.
    """
    return -(-_tables_end(layers, tokens, donors, has_sums) // ALIGNMENT) * ALIGNMENT


def _tables_end(layers: int, tokens: int, donors: int, has_sums: bool) -> int:
    """Where the tables behind the header end: with the checksums of the layers, or before them."""
    return HEADER_BYTES + (4 + _LAYER_SUM_BYTES * has_sums) * layers + 4 * tokens + _DONOR.size * donors


def padded(nbytes: int) -> int:
    """Return the bytes that a record takes on disk, which are whole pages.

    Example:
        >>> padded(4097)
        8192
    """
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def key_tag(key: bytes) -> int:
    """Return the first 8 bytes of a block's key as a number. The catalog links blocks to their parents by it."""
    return int.from_bytes(key[:8], "little")


def header_bytes(data: bytes | bytearray) -> int:
    """Return how many bytes of a record `parse` needs; 0 if `data` does not begin a record.

    Args:
        data: the first 16 bytes or more; nothing else of them is checked.
    """
    magic, _, _, start_of_payload = _BEGINNING.unpack_from(data)
    return int(start_of_payload) if magic == MAGIC else 0


def seal(header: RecordHeader, record: memoryview, payload_sum: bytes | None = None) -> None:
    """Write the header and both checksums in front of the payload that already stands in `record`.

    Args:
        header: of the record.
        record: writable memory of at least `header.record_bytes`, which is mutated; what is longer is zeroed.
        payload_sum: checksum of the payload, xxh3-128, if it is known; of a record without checksums of its layers.
    """
    start, payload_bytes = header.payload_offset, header.payload_bytes
    end = start + payload_bytes
    if len(record) > end:
        record[end:] = bytes(len(record) - end)
    sizes = header.layer_sizes
    table = _sizes(len(sizes)).pack(*sizes) + header.tokens.astype("<u4", copy=False).tobytes()
    table += b"".join([_DONOR.pack(donor.record, donor.key) for donor in header.donors])
    if header.has_sums:
        sums = _layer_sums(record[start:end], sizes)
        table, payload_sum = table + sums, _sum(sums)
    fixed = _HEADER.pack(
        MAGIC,
        VERSION,
        header.codec,
        start,
        header.key,
        header.parent,
        header.donors[0].key if header.donors else NO_KEY,
        header.namespace,
        header.profile,
        header.record_id,
        header.raw_bytes,
        payload_bytes,
        header.count,
        header.start,
        len(sizes),
        header.error_bound,
        header.bits,
        header.flags,
        header.expiry,
        len(header.donors),
        header.cut,
        payload_sum or xxhash.xxh3_128_digest(record[start:end]),
        bytes(_SUM_BYTES),
    )[:-_SUM_BYTES]
    record[:start] = (fixed + _header_sum(fixed, table) + table).ljust(start, b"\0")


def parse(data: memoryview, max_record_bytes: int) -> RecordHeader:
    """Read and check a header; the payload may still be missing from `data`.

    Every size is checked against `max_record_bytes` and `data` before anything is allocated.

    Args:
        data: a record from its beginning; it may hold anything.
        max_record_bytes: the most that the record may take.

    Raises:
        DamagedRecord: the bytes are not an intact header.
    """
    fixed, tables = _checked(data, max_record_bytes)
    sizes = _sizes(fixed.layers).unpack_from(tables)
    first, end = 4 * (fixed.layers + fixed.tokens), _tables_end(fixed.layers, fixed.tokens, fixed.donors, False)
    donors = tuple([Donor(*row) for row in _DONOR.iter_unpack(tables[first : end - HEADER_BYTES])])
    first_donor = donors[0].key if donors else NO_KEY
    fits = sum(sizes) == fixed.payload_bytes and fixed.first_donor == first_donor
    fits = fits and bool(fixed.flags & FLAG_CUT) == bool(fixed.cut)
    if not fits or fixed.flags & ~KNOWN_FLAGS or fixed.tokens == 0:
        raise DamagedRecord(Damage.FIELD, "fields contradict each other")
    return RecordHeader(
        key=fixed.key,
        parent=fixed.parent,
        namespace=fixed.namespace,
        codec=fixed.codec,
        record_id=fixed.record_id,
        start=fixed.start,
        tokens=np.frombuffer(tables, "<u4", fixed.tokens, 4 * fixed.layers),
        layer_sizes=sizes,
        raw_bytes=fixed.raw_bytes,
        bits=fixed.bits,
        expiry=fixed.expiry,
        flags=fixed.flags,
        profile=fixed.profile,
        error_bound=fixed.error_bound,
        donors=donors,
        cut=fixed.cut,
    )


def _checked(data: memoryview, max_record_bytes: int) -> tuple[_Fixed, bytes]:
    """The fixed part of a header and the tables behind it, covered by their checksum."""
    if len(data) < HEADER_BYTES:
        raise DamagedRecord(Damage.LENGTH, f"{len(data)} bytes are too few for a header")
    fixed = _Fixed(*_HEADER.unpack_from(data))
    if fixed.magic != MAGIC:
        raise DamagedRecord(Damage.MAGIC, "the bytes do not begin a record")
    if fixed.version != VERSION:
        raise DamagedRecord(Damage.VERSION, f"expected a record of version {VERSION}, found version {fixed.version}")
    # Bounds first: `layers` and `count` are below 2^32 each, so the sums below cannot run away.
    has_sums = bool(fixed.flags & FLAG_SUMS)
    begin = payload_offset(fixed.layers, fixed.tokens, fixed.donors, has_sums)
    if fixed.payload_offset != begin or begin + fixed.payload_bytes > max_record_bytes:
        raise DamagedRecord(Damage.LENGTH, "the sizes in the header are out of bounds")
    if len(data) < begin:
        raise DamagedRecord(Damage.LENGTH, "the header is cut short")
    tables = bytes(data[HEADER_BYTES : _tables_end(fixed.layers, fixed.tokens, fixed.donors, has_sums)])
    if fixed.header_sum != _header_sum(bytes(data[: HEADER_BYTES - _SUM_BYTES]), tables):
        raise DamagedRecord(Damage.HEADER_SUM, "the header's checksum differs")
    return fixed, tables


def check_payload(header: RecordHeader, data: memoryview) -> None:
    """Compare the payload in `data`, a whole record, with its checksum.

    Raises:
        DamagedRecord: the payload is cut short, or its checksum differs.
    """
    if len(data) < header.record_bytes:
        raise DamagedRecord(Damage.LENGTH, "the payload is cut short")
    stored = bytes(data[HEADER_BYTES - 2 * _SUM_BYTES : HEADER_BYTES - _SUM_BYTES])
    covered = payload_of(header, data)
    if header.has_sums:
        sums = layer_sums(header, data)
        check_layers(header, sums, range(len(header.layer_sizes)), covered)
        covered = memoryview(sums)
    if _sum(covered) != stored:
        raise DamagedRecord(Damage.PAYLOAD_SUM, "the payload's checksum differs")


def layer_sums(header: RecordHeader, data: memoryview) -> bytes:
    """Return the checksums of the layers, 8 bytes each; nothing if there are none.

    Args:
        header: of the record, checked.
        data: the record from its beginning; what stands before the payload is enough.
    """
    if not header.has_sums:
        return b""
    begin = _tables_end(len(header.layer_sizes), header.count, len(header.donors), has_sums=False)
    return bytes(data[begin : begin + _LAYER_SUM_BYTES * len(header.layer_sizes)])


def check_layers(header: RecordHeader, sums: bytes, layers: range, coded: memoryview) -> None:
    """Compare the coded bytes of consecutive layers with their checksums.

    Args:
        sums: what `layer_sums` returned.
        coded: the bytes of these layers, one after the other.

    Raises:
        DamagedRecord: one of them differs.
    """
    wanted = sums[_LAYER_SUM_BYTES * layers.start : _LAYER_SUM_BYTES * layers.stop]
    if _layer_sums(coded, header.layer_sizes[layers.start : layers.stop]) != wanted:
        raise DamagedRecord(Damage.PAYLOAD_SUM, "the checksum of a layer differs")


def payload_of(header: RecordHeader, data: memoryview) -> memoryview:
    """Return the payload, as a view into the record."""
    return data[header.payload_offset : header.record_bytes]


@lru_cache(maxsize=64)
def _sizes(layers: int) -> struct.Struct:
    """The table of the layers' sizes."""
    return struct.Struct(f"<{layers}I")


def _layer_sums(coded: memoryview, sizes: tuple[int, ...]) -> bytes:
    """xxh3-64 of each layer, one after the other."""
    if min(sizes, default=0) >= LEAST_BYTES_64:
        return xxh3_64_each(coded, sizes)
    ends = accumulate(sizes)
    sums = [xxhash.xxh3_64_intdigest(coded[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    return b"".join([number.to_bytes(_LAYER_SUM_BYTES, "little") for number in sums])


def _sum(payload: memoryview | bytes) -> bytes:
    """xxh3-128. The package lets go of Python's lock, which pays for what takes long: whoever has let go of it waits up
    to 5 ms (sys.getswitchinterval) where another thread computes."""
    brief = LEAST_BYTES <= len(payload) <= _BRIEF_BYTES
    return xxh3_128(payload) if brief else xxhash.xxh3_128_digest(payload)


def _header_sum(fixed: bytes, table: bytes) -> bytes:
    return xxhash.xxh3_128_digest(fixed + table)
