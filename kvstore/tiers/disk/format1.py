"""Sessions as format 1 had them: a msgpack map with all tokens. Read-only stores of that format are read as they are.

`Opening` says when a store becomes one of format 2.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from kvstore.core.session_record import MAX_NAME_BYTES, SessionRecord, session_key

_KINDS = {"name": str, "namespace": bytes, "tokens": bytes, "created": float, "used": float, "sequence": int}
_MAX_SEQUENCE = 1 << 62


def session_of_format_1(key: bytes, data: bytes) -> SessionRecord | None:
    """Return the session; None if the bytes are not one that format 1 keeps under `key`. Never raises for any bytes."""
    try:
        # No extension types, no timestamps; sizes are bounded by the input's own.
        fields: Any = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_refuse)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    if not isinstance(fields, dict) or set(fields) != {"v", *_KINDS} or fields["v"] != 1:
        return None
    if not all(isinstance(fields[name], kind) for name, kind in _KINDS.items()):
        return None
    if len(fields["namespace"]) != 32 or len(fields["tokens"]) % 4 or not fields["tokens"]:
        return None
    if not 1 <= len(fields["name"].encode()) <= MAX_NAME_BYTES or not 0 <= fields["sequence"] < _MAX_SEQUENCE:
        return None
    if session_key(fields["namespace"], fields["name"]) != key:
        return None
    return SessionRecord(
        fields["name"],
        fields["namespace"],
        np.frombuffer(fields["tokens"], "<u4"),
        fields["created"],
        fields["used"],
        fields["sequence"],
    )


def _refuse(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")
