"""What is kept of a session: its tokens, so that it can be continued even when its cache was evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from kvstore.core.tokens import Tokens

_KEYS = {"v", "name", "namespace", "tokens", "created", "used", "sequence"}
_MAX_SEQUENCE = 1 << 62  # what a store counts to; more would not fit when it counts on
MAX_NAME_BYTES = 400  # LMDB takes keys of at most 511 bytes


@dataclass(frozen=True)
class SessionRecord:
    """What the catalog keeps of a session.

    Attributes:
        name: the session's id.
        namespace: digest of its namespace, 32 bytes.
        tokens: `[n]` uint32.
        created, used: unix seconds, for people only.
        sequence: grows with every change of any session, so the newest value is known.

    Example:
        >>> import numpy as np
        >>> record = SessionRecord("alice", bytes(32), np.array([1, 2], np.uint32), 0.0, 0.0, 1)
        >>> SessionRecord.unpack(record.pack()).tokens
        array([1, 2], dtype=uint32)
    """

    name: str
    namespace: bytes
    tokens: Tokens
    created: float
    used: float
    sequence: int

    def pack(self) -> bytes:
        """Return the bytes for the catalog (msgpack, see FORMAT.md)."""
        data: bytes = msgpack.packb(
            {
                "v": 1,
                "name": self.name,
                "namespace": self.namespace,
                "tokens": self.tokens.astype("<u4", copy=False).tobytes(),
                "created": self.created,
                "used": self.used,
                "sequence": self.sequence,
            }
        )
        return data

    @classmethod
    def unpack(cls, data: bytes) -> SessionRecord | None:
        """Read what `pack` wrote. Returns None if the bytes are not a session; never raises for any bytes."""
        try:
            # No extension types, no timestamps; sizes are bounded by the input's own.
            fields: Any = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_refuse)
        except (ValueError, TypeError, msgpack.UnpackException):
            return None
        if not isinstance(fields, dict) or set(fields) != _KEYS or fields["v"] != 1:
            return None
        kinds = {"name": str, "namespace": bytes, "tokens": bytes, "created": float, "used": float, "sequence": int}
        if not all(isinstance(fields[key], kind) for key, kind in kinds.items()):
            return None
        if len(fields["namespace"]) != 32 or len(fields["tokens"]) % 4 or not fields["name"]:
            return None
        if len(fields["name"].encode()) > MAX_NAME_BYTES or not 0 <= fields["sequence"] < _MAX_SEQUENCE:
            return None
        return cls(
            fields["name"],
            fields["namespace"],
            np.frombuffer(fields["tokens"], "<u4"),
            fields["created"],
            fields["used"],
            fields["sequence"],
        )


@dataclass(frozen=True)
class SessionChange:
    """A change of a session, for the catalog. Immutable.

    Attributes:
        key: what `session_key` made.
        value: the session's bytes; None if it was deleted.
        sequence: order of changes.

    Example:
        >>> SessionChange(session_key(bytes(32), "alice"), value=None, sequence=3).value is None
        True
    """

    key: bytes
    value: bytes | None
    sequence: int


def session_key(namespace: bytes, name: str) -> bytes:
    """Return the catalog's key of a session: 16 bytes of its namespace's digest, then its id.

    Raises:
        ValueError: the id is not text of 1 to 400 bytes.

    Example:
        >>> session_key(bytes(32), "alice")[16:]
        b'alice'
    """
    if not isinstance(name, str):
        raise ValueError(f"session: expected text, found {type(name).__name__}")
    try:
        key = name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"session: expected text that UTF-8 can hold, found {name!r}") from error
    if not 1 <= len(key) <= MAX_NAME_BYTES:
        raise ValueError(f"session: expected 1 to {MAX_NAME_BYTES} bytes, found {len(key)}")
    return namespace[:16] + key


def _refuse(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")
