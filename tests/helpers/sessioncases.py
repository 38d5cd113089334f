"""Sessions as the catalog gets them, and as format 1 wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import xxhash

from kvstore.core.session_record import SessionChange, SessionRecord, session_key
from kvstore.tiers.disk.catalog import Catalog

NAMESPACE = b"n" * 32


def session(
    name: str, count: int = 3, sequence: int = 1, first: int = 0, namespace: bytes = NAMESPACE, **how: Any
) -> SessionRecord:
    """A session of `count` tokens that rise from `first`; equal beginnings are shared."""
    return SessionRecord(name, namespace, np.arange(first, first + count, dtype=np.uint32), 1.0, 2.0, sequence, **how)


def saved(name: str, count: int = 3, sequence: int = 1, **how: Any) -> SessionChange:
    record = session(name, count, sequence, **how)
    return SessionChange(record.namespace[:16] + name.encode(), record, sequence)


def deleted(name: str, sequence: int = 1) -> SessionChange:
    return SessionChange(session_key(NAMESPACE, name), None, sequence)


def found(catalog: Catalog, name: str) -> SessionRecord | None:
    return catalog.session(session_key(NAMESPACE, name))


def tokens_in(catalog: Catalog) -> dict[str, list[int] | None]:
    """Tokens of every session that the catalog lists, by name."""
    records = {head.name: catalog.session(head.key) for head in catalog.sessions()}
    return {name: record.tokens.tolist() if record is not None else None for name, record in records.items()}


def format_1_value(record: SessionRecord) -> bytes:
    """What format 1 kept of a session, behind the sum."""
    fields = {
        "v": 1,
        "name": record.name,
        "namespace": record.namespace,
        "tokens": record.tokens.tobytes(),
        "created": record.created,
        "used": record.used,
        "sequence": record.sequence,
    }
    data: bytes = msgpack.packb(fields)
    return data


def write_format_1(directory: Path, records: list[SessionRecord]) -> None:
    """Makes the catalog of format 1 with these sessions; adds them where there is one."""
    with lmdb.open(str(directory), map_size=1 << 28, max_dbs=8) as env:
        databases = [env.open_db(n) for n in (b"records", b"places", b"namespaces", b"sessions", b"traffic")]
        with env.begin(write=True, db=databases[3]) as txn:
            for record in records:
                value = format_1_value(record)
                txn.put(record.key, xxhash.xxh3_64_intdigest(value).to_bytes(8, "little") + value)
