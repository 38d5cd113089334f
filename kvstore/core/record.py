"""A record: one block of one sequence, all layers, as bytes that describe themselves (FORMAT.md, "Record").

    header (256) | layer sizes (4 each) | tokens (4 each) | donors (40 each) | zeros to a multiple of 64 | payload

The payload is the layers' coded bytes one after the other. Everything before the payload is covered by
`header_sum`, the payload by `payload_sum` (both xxh3-128). Pure: bytes in, bytes out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

import numpy as np
import xxhash

from kvstore.config import PAGE_BYTES
from kvstore.core.tokens import Tokens
from kvstore.metrics import Metric

MAGIC = b"KVSTREC1"
VERSION = 1
FLAG_PINNED = 1
KNOWN_FLAGS = FLAG_PINNED
NO_KEY = bytes(32)
ALIGNMENT = 64

_BEGINNING = struct.Struct("<8sHHI")  # magic, version, codec, where the payload starts
_HEADER = struct.Struct(_BEGINNING.format + "32s32s32s32s16sQQQIIIffIdH6x16s16s")
_DONOR = struct.Struct("<Q32s")
HEADER_BYTES = _HEADER.size
_SUM_BYTES = 16
assert HEADER_BYTES == 256


class Damage(Enum):
    """Why bytes are not a record."""

    MAGIC = "magic"
    VERSION = "version"
    LENGTH = "length"
    HEADER_SUM = "header_sum"
    PAYLOAD_SUM = "payload_sum"
    KEY = "key"
    FIELD = "field"


class DamagedRecord(Exception):
    """Bytes that are not an intact record. Internal: readers turn it into a counted miss."""

    def __init__(self, damage: Damage, detail: str) -> None:
        super().__init__(f"{damage.value}: {detail}")
        self.damage = damage

    @property
    def metric(self) -> Metric:
        """The counter of such damage."""
        return Metric[f"DAMAGED_{self.damage.name}"]


@dataclass(frozen=True, slots=True)
class Donor:
    """A record that another one is coded against: its number in this store, and the key of its block."""

    record: int
    key: bytes


@dataclass(frozen=True)
class RecordHeader:
    """What a record says of itself.

    key: key of the block (`identity.chain_key`); parent: key of the block before it (the chain's root for the first).
    namespace: digest of the namespace. donors: the records it is coded against.
    profile: id of the calibrated tables it needs, zeros for none. record_id: number in this store.
    start: position of its first token. bits: -log2 P of its tokens. expiry: unix seconds, 0 for never.
    error_bound: 0 for exact codecs. layer_sizes: coded bytes of each layer. tokens: `[n]` uint32.
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

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def payload_bytes(self) -> int:
        return sum(self.layer_sizes)

    @property
    def payload_offset(self) -> int:
        return payload_offset(len(self.layer_sizes), self.count, len(self.donors))

    @property
    def record_bytes(self) -> int:
        """Bytes of the record without the padding to a page that it has on disk."""
        return self.payload_offset + self.payload_bytes


def payload_offset(layers: int, tokens: int, donors: int = 0) -> int:
    """Where the payload of a record starts."""
    return -(-(HEADER_BYTES + 4 * layers + 4 * tokens + _DONOR.size * donors) // ALIGNMENT) * ALIGNMENT


def padded(nbytes: int) -> int:
    """Bytes that a record takes on disk: whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def key_tag(key: bytes) -> int:
    """The first 8 bytes of a block's key, by which the catalog links blocks to their parents."""
    return int.from_bytes(key[:8], "little")


def header_bytes(data: bytes | bytearray) -> int:
    """How many bytes of a record must be there for `parse`, by its first ones, of which nothing is checked yet; 0 where
    these do not begin a record."""
    magic, _, _, start_of_payload = _BEGINNING.unpack_from(data)
    return int(start_of_payload) if magic == MAGIC else 0


def seal(header: RecordHeader, record: memoryview) -> None:
    """Writes the header and both checksums in front of the payload that already stands in `record`.

    record: writable, `header.record_bytes` long, or longer with the rest zeroed here (the padding on disk).
    """
    start, end = header.payload_offset, header.record_bytes
    record[end:] = bytes(len(record) - end)
    table = np.asarray(header.layer_sizes, dtype="<u4").tobytes() + header.tokens.astype("<u4", copy=False).tobytes()
    table += b"".join(_DONOR.pack(donor.record, donor.key) for donor in header.donors)
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
        header.payload_bytes,
        header.count,
        header.start,
        len(header.layer_sizes),
        header.error_bound,
        header.bits,
        header.flags,
        header.expiry,
        len(header.donors),
        xxhash.xxh3_128_digest(record[start:end]),
        bytes(_SUM_BYTES),
    )[:-_SUM_BYTES]
    record[:start] = (fixed + _header_sum(fixed, table) + table).ljust(start, b"\0")


def parse(data: memoryview, max_record_bytes: int) -> RecordHeader:
    """Reads and checks a header; the payload may still be missing from `data`.

    Every size is checked against `max_record_bytes` and `data` before anything is allocated.
    Raises `DamagedRecord`.
    """
    if len(data) < HEADER_BYTES:
        raise DamagedRecord(Damage.LENGTH, f"{len(data)} bytes are no header")
    (
        magic,
        version,
        codec,
        start_of_payload,
        key,
        parent,
        first_donor,
        namespace,
        profile,
        record_id,
        raw_bytes,
        payload_bytes,
        count,
        start,
        layers,
        error_bound,
        bits,
        flags,
        expiry,
        donor_count,
        _payload_sum,
        header_sum,
    ) = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedRecord(Damage.MAGIC, "not a record")
    if version != VERSION:
        raise DamagedRecord(Damage.VERSION, f"record version {version}")
    # Bounds first: `layers` and `count` are below 2^32 each, so the sums below cannot run away.
    begin = payload_offset(layers, count, donor_count)
    if start_of_payload != begin or begin + payload_bytes > max_record_bytes:
        raise DamagedRecord(Damage.LENGTH, "sizes out of bounds")
    if len(data) < start_of_payload:
        raise DamagedRecord(Damage.LENGTH, "header cut short")
    tables = bytes(data[HEADER_BYTES : HEADER_BYTES + 4 * (layers + count) + _DONOR.size * donor_count])
    if header_sum != _header_sum(bytes(data[: HEADER_BYTES - _SUM_BYTES]), tables):
        raise DamagedRecord(Damage.HEADER_SUM, "header checksum differs")
    sizes = np.frombuffer(tables, "<u4", layers)
    donors = tuple(Donor(*row) for row in _DONOR.iter_unpack(tables[4 * (layers + count) :]))
    told = first_donor == (donors[0].key if donors else NO_KEY)
    if int(sizes.sum(dtype=np.uint64)) != payload_bytes or flags & ~KNOWN_FLAGS or count == 0 or not told:
        raise DamagedRecord(Damage.FIELD, "fields contradict each other")
    return RecordHeader(
        key=key,
        parent=parent,
        namespace=namespace,
        codec=codec,
        record_id=record_id,
        start=start,
        tokens=np.frombuffer(tables, "<u4", count, 4 * layers),
        layer_sizes=tuple(sizes.tolist()),
        raw_bytes=raw_bytes,
        bits=bits,
        expiry=expiry,
        flags=flags,
        profile=profile,
        error_bound=error_bound,
        donors=donors,
    )


def check_payload(header: RecordHeader, data: memoryview) -> None:
    """Compares the payload with its checksum. Raises `DamagedRecord`."""
    if len(data) < header.record_bytes:
        raise DamagedRecord(Damage.LENGTH, "payload cut short")
    stored = bytes(data[HEADER_BYTES - 2 * _SUM_BYTES : HEADER_BYTES - _SUM_BYTES])
    if xxhash.xxh3_128_digest(data[header.payload_offset : header.record_bytes]) != stored:
        raise DamagedRecord(Damage.PAYLOAD_SUM, "payload checksum differs")


def payload_of(header: RecordHeader, data: memoryview) -> memoryview:
    """The payload, as a view into the record."""
    return data[header.payload_offset : header.record_bytes]


def _header_sum(fixed: bytes, table: bytes) -> bytes:
    return xxhash.xxh3_128_digest(fixed + table)
