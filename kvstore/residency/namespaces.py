"""What each namespace takes, by its name where that is known: a store keeps digests alone."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.config import StoreConfig
from kvstore.core.keys import namespace_digest
from kvstore.core.session_record import TEXT_KEY_BYTES
from kvstore.residency.residency import Residency
from kvstore.residency.sessions import SessionTable

MOST_NAMED = 64  # namespaces that are told apart in `stats()`; more would make metrics without bound
OTHERS = "(others)"
_DIGEST = "digest:"


def names_of(config: StoreConfig) -> dict[bytes, str]:
    """Return the names that settings give, by digest.

    Example:
        >>> names = names_of(StoreConfig(namespaces=("ann",)))
        >>> names[namespace_digest("ann")], names[namespace_digest(b"")]
        ('ann', '')
    """
    return {namespace_digest(name): _printed(name) for name in (b"", *config.namespaces, *config.tenants)}


def label(digest: bytes, names: dict[bytes, str]) -> str:
    """Return the name of a namespace, or digest:HEX, which the command takes as one."""
    return names.get(digest, f"{_DIGEST}{digest.hex()}")


def usage_by_namespace(residency: Residency, sessions: SessionTable) -> dict[str, dict[str, int]]:
    """Return records, tokens, bytes and sessions by namespace: of the disk, or of the host tier of a store without one.
    Tenants also have what is reserved for them, and their quotas.

    Namespaces of the settings come first, then those that take most; what is more than `MOST_NAMED` is one row,
    "(others)".
    """
    names = names_of(residency.config)
    found = {digest: {"records": 0, "tokens": 0, "bytes": 0, "sessions": 0} for digest in names}
    ends = {digest[:TEXT_KEY_BYTES]: digest for digest in names}
    for digest, records, tokens, nbytes in _stored(residency):
        ends[digest[:TEXT_KEY_BYTES]] = digest
        row = found.setdefault(digest, {"records": 0, "tokens": 0, "bytes": 0, "sessions": 0})
        row["records"] += records
        row["tokens"] += tokens
        row["bytes"] += nbytes
    strangers = 0  # of namespaces that have sessions and nothing else: only half of their digests is known
    for begin, count in sessions.by_namespace().items():
        if begin in ends:
            found[ends[begin]]["sessions"] += count
        else:
            strangers += count
    used = {digest: row for digest, row in found.items() if any(row.values()) or names[digest]}
    ordered = sorted(used.items(), key=lambda item: (item[0] not in names, -item[1]["bytes"], item[0]))
    for name, tenant in residency.config.tenants.items():
        row = found[namespace_digest(name)]
        row |= {"reserved_bytes": tenant.reserved_bytes}
        row |= {"quota_bytes": tenant.quota_bytes} if tenant.quota_bytes is not None else {}
    for digest, nbytes in residency.host.by_namespace().items():
        found[digest]["host_bytes"] = nbytes
    rows = {label(digest, names): row for digest, row in ordered[:MOST_NAMED]}
    others = [row for _, row in ordered[MOST_NAMED:]]
    if others or strangers:
        total = {field: sum(row[field] for row in others) for field in ("records", "tokens", "bytes", "sessions")}
        total["sessions"] += strangers
        rows[OTHERS] = total
    return rows


def _stored(residency: Residency) -> Iterable[tuple[bytes, int, int, int]]:
    """(digest, records, tokens, bytes) of what is stored."""
    disk = residency.disk
    if disk is not None:
        used, numbers = disk.usage(), {number: digest for digest, number in dict(disk.namespaces).items()}
        return [(numbers[number], *use) for number, use in used.items() if number in numbers]
    held = [residency.host.get(record) for record in list(residency.host.sizes()[1])]
    return [(r.header.namespace, 1, len(r.header.tokens), r.nbytes) for r in held if r is not None]


def _printed(name: bytes) -> str:
    """The name as text, where it is one that cannot be taken for another's."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = ""
    plain = text.isprintable() and not text.startswith(_DIGEST) and text != OTHERS
    return text if plain and (text or not name) else f"{_DIGEST}{namespace_digest(name).hex()}"
