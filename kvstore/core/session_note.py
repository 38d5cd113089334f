"""What is noted beside a session: how often it was resumed, and metadata of the user's. Pure: values in, bytes out."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgpack

from kvstore.errors import MetadataError

MAX_METADATA_BYTES = 4096
MAX_COUNT = 1 << 62
_MOST_DEPTH = 16
_NOTE = struct.Struct("<QdQ")
_SCALARS = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True)
class SessionNote:
    """What stands in the catalog beside a session that was resumed, or has metadata. Immutable.

    Attributes:
        sequence: of the change of the session that wrote it.
        created: of the session; a note of another creation time belongs to one that is gone.
        hits: how often the session was resumed.
        metadata: what `pack_metadata` made; b"" for none.

    Example:
        >>> note = SessionNote(7, 1.0, hits=2, metadata=pack_metadata({"user": "ann"}))
        >>> SessionNote.unpack(note.pack()) == note
        True
    """

    sequence: int
    created: float
    hits: int
    metadata: bytes

    def pack(self) -> bytes:
        """Return the bytes for the catalog (FORMAT.md, "Sessions")."""
        return _NOTE.pack(self.sequence, self.created, self.hits) + self.metadata

    @classmethod
    def unpack(cls, data: bytes) -> SessionNote | None:
        """Read what `pack` wrote. Returns None if the bytes are anything else; never raises for any."""
        if len(data) < _NOTE.size:
            return None
        sequence, created, hits = _NOTE.unpack_from(data)
        metadata = data[_NOTE.size :]
        if sequence >= MAX_COUNT or hits >= MAX_COUNT or not isfinite(created):
            return None
        return cls(sequence, created, hits, metadata) if unpack_metadata(metadata) is not None else None


def pack_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Return the metadata of a session as bytes, b"" if it is empty.

    Args:
        metadata: names, and of each None, a bool, an integer of 64 bits, a finite float, text, bytes, or a list or
            mapping of such. At most 4096 bytes when packed by msgpack.

    Raises:
        MetadataError: it is larger, or something else.

    Example:
        >>> unpack_metadata(pack_metadata({"user": "ann", "tags": ["a", "b"]}))
        {'user': 'ann', 'tags': ['a', 'b']}
    """
    if not isinstance(metadata, Mapping):
        raise MetadataError(f"metadata: expected a mapping, found {type(metadata).__name__}")
    plain = _plain(metadata, "metadata", 0)
    try:
        data: bytes = msgpack.packb(plain) if plain else b""
    except (ValueError, OverflowError) as error:  # integers of more than 64 bits, text that UTF-8 cannot hold
        raise MetadataError(f"metadata: {error}") from error
    if len(data) > MAX_METADATA_BYTES:
        raise MetadataError(
            f"metadata: takes {len(data)} bytes, and a session may have {MAX_METADATA_BYTES}; keep more elsewhere"
        )
    return data


def unpack_metadata(data: bytes) -> dict[str, Any] | None:
    """Return what `pack_metadata` packed; None if the bytes are anything else. Never raises for any bytes."""
    if not data:
        return {}
    if len(data) > MAX_METADATA_BYTES:
        return None
    try:
        found = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_refuse)
        plain = _plain(found, "metadata", 0)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return plain if isinstance(plain, dict) else None


def _plain(value: Any, where: str, depth: int) -> Any:
    """The same in dicts and lists; raises `MetadataError` for what is not kept."""
    if depth > _MOST_DEPTH:
        raise MetadataError(f"metadata: nested more than {_MOST_DEPTH} deep")
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise MetadataError(f"{where}: expected names that are text, found {list(value)!r:.100}")
        return {name: _plain(each, f"{where}.{name}", depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, where, depth + 1) for each in value]
    if type(value) not in _SCALARS or (isinstance(value, float) and not isfinite(value)):
        raise MetadataError(
            f"{where}: expected None, a bool, an integer, a finite float, text, bytes, a list or a mapping, "
            f"found {type(value).__name__}"
        )
    return value


def _refuse(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")
