"""Parcels: values that hold several records, of blocks that follow each other (FORMAT.md, "Parcels"). Pure.

A server to which each call is slow, or is paid for, is asked once for many blocks. The head says where each record
lies, so that one call brings the head, and one more the records that are wanted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import xxhash

from kvstore.core.record import Damage, DamagedRecord

MAGIC = b"KVSTPCL1"
VERSION = 1
HEAD_BYTES = 1024
MOST_RECORDS = 16
_BEGINNING = struct.Struct("<8sII")  # magic, version, records
_ROW = struct.Struct("<32sQ")  # key, bytes of the record
_SUM_BYTES = 16


def group_of(parcel_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a group has: a power of two. Parcels reach across no border of groups, so that all who
    share an identity know where one may begin.

    Args:
        parcel_bytes: `RemoteLimits.parcel_bytes`.
        block_bytes: raw bytes of a block.

    Example:
        >>> group_of(16 << 20, 1_474_560), group_of(16 << 20, 64), group_of(0, 64)
        (8, 16, 1)
    """
    count = min(MOST_RECORDS, parcel_bytes // max(1, block_bytes))
    return 1 << max(0, count.bit_length() - 1)


@dataclass(frozen=True)
class ParcelHead:
    """What a parcel holds. Immutable.

    Attributes:
        keys: of the blocks, each the one before the next.
        sizes: bytes of each record, as it lies there.

    Example:
        >>> head = ParcelHead((b"a" * 32, b"b" * 32), (500, 600))
        >>> ParcelHead.unpack(head.pack(), b"a" * 32, most_bytes=1000) == head, head.offsets
        (True, (0, 500))
    """

    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each record begins, behind the head."""
        return (0, *accumulate(self.sizes[:-1]))

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(self.sizes)

    def shared(self, keys: Sequence[bytes]) -> int:
        """Return how many of its first blocks are the first of these."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.keys, keys, strict=False)))

    def first(self, count: int) -> ParcelHead:
        """Return the head of a parcel that ends after so many records."""
        return ParcelHead(self.keys[:count], self.sizes[:count])

    def pack(self) -> bytes:
        """Return the head as `HEAD_BYTES` bytes, with a checksum."""
        rows = b"".join(map(_ROW.pack, self.keys, self.sizes))
        data = _BEGINNING.pack(MAGIC, VERSION, len(self.keys)) + rows
        data = data.ljust(HEAD_BYTES - _SUM_BYTES, b"\0")
        return data + xxhash.xxh3_128_digest(data)

    @classmethod
    def unpack(cls, data: bytes | memoryview, key: bytes, most_bytes: int) -> ParcelHead:
        """Read what `pack` wrote.

        Args:
            data: of any length; it may hold anything.
            key: of the first block, as the name of the parcel says.
            most_bytes: that a record may take.

        Raises:
            DamagedRecord: it is not the head of this parcel.
        """
        if len(data) != HEAD_BYTES:
            raise DamagedRecord(Damage.LENGTH, f"a parcel's head of {len(data)} bytes, expected {HEAD_BYTES}")
        data = bytes(data)
        magic, version, count = _BEGINNING.unpack_from(data)
        if magic != MAGIC:
            raise DamagedRecord(Damage.MAGIC, "the bytes do not begin a parcel")
        if version != VERSION:
            raise DamagedRecord(Damage.VERSION, f"expected a parcel of version {VERSION}, found version {version}")
        if xxhash.xxh3_128_digest(data[:-_SUM_BYTES]) != data[-_SUM_BYTES:]:
            raise DamagedRecord(Damage.HEADER_SUM, "the checksum of the parcel's head differs")
        if not 1 <= count <= MOST_RECORDS:
            raise DamagedRecord(Damage.FIELD, f"a parcel of {count} records")
        end = _BEGINNING.size + count * _ROW.size
        rows = list(_ROW.iter_unpack(data[_BEGINNING.size : end]))
        head = cls(tuple(row[0] for row in rows), tuple(row[1] for row in rows))
        if head.keys[0] != key or len(set(head.keys)) < count:
            raise DamagedRecord(Damage.KEY, "another block's parcel")
        if not all(0 < size <= most_bytes for size in head.sizes) or any(data[end:-_SUM_BYTES]):
            raise DamagedRecord(Damage.FIELD, "the parcel's sizes are out of bounds")
        return head
