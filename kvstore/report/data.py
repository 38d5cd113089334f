"""What the page of a store says, as plain numbers. Reads no payload, but for a deep check."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.history import Sample
from kvstore.core.results import SessionInfo
from kvstore.report.tree import Node, PrefixTree
from kvstore.residency.block_table import BlockTable
from kvstore.residency.check import CheckReport, lost_at_open
from kvstore.stored import stored_bytes

if TYPE_CHECKING:
    from kvstore.store import KVStore

MOST_SESSIONS, MOST_FAMILIES = 100, 20


@dataclass(frozen=True)
class Part:
    """Something that takes bytes. what: in words for people."""

    name: str
    bytes: int
    what: str


@dataclass(frozen=True)
class CodecRow:
    """Blocks of one codec, or with `is_member` those of it that are coded against others."""

    label: str
    is_member: bool
    blocks: int
    tokens: int
    raw_bytes: int
    bytes: int


@dataclass(frozen=True)
class NamespaceRow:
    """Blocks of one namespace, by its digest."""

    digest: bytes
    sequences: int
    blocks: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Savings:
    """What the blocks on disk would take without each mechanism, in bytes.

    Attributes:
        alone: raw, each sequence for itself.
        shared: raw, each block once.
        coded: as coded, members as if they had the ratio of the blocks that stand alone.
        stored: as they are.
    """

    alone: int
    shared: int
    coded: int
    stored: int


@dataclass(frozen=True)
class Family:
    """A block that others are coded against.

    Attributes:
        donor: its record.
        start: position of its first token.
        begins: its first tokens.
        members: how many blocks are coded against it (and perhaps against others, too).
        raw_bytes, bytes: of those, before and after.
    """

    donor: int
    start: int
    begins: tuple[int, ...]
    members: int
    raw_bytes: int
    bytes: int


@dataclass(frozen=True)
class ReportData:
    """Everything that the page shows. Immutable; made by `collect`.

    Attributes:
        path, model, made: folder of the store, name of its model, unix seconds when this was read.
        facts: (name, value) of identity and layout.
        records, tokens, members, donors: blocks on disk, their tokens, those coded against others, and those others.
        space: what is in the folder; `used` is the sum. budget: of the disk, as its writer had it; 0 if not known.
        segments: how many segment files there are by tenths of them that live; 11 numbers, the last for full ones.
        namespace_digests: as nodes name them by number.
        codecs, namespaces, savings, nodes, families: see there.
        history: samples, the oldest first.
        sessions: the last used ones; session_count: of all; session_bytes: that they take.
        check: whether all agrees; lost: what opening left out. deep: whether every record was read.
    """

    path: str
    model: str
    made: float
    facts: tuple[tuple[str, str], ...]
    records: int
    tokens: int
    members: int
    donors: int
    space: tuple[Part, ...]
    used: int
    budget: int
    segments: tuple[int, ...]
    codecs: tuple[CodecRow, ...]
    namespace_digests: tuple[bytes, ...]
    namespaces: tuple[NamespaceRow, ...]
    savings: Savings
    nodes: tuple[Node, ...]
    families: tuple[Family, ...]
    history: tuple[Sample, ...]
    sessions: tuple[SessionInfo, ...]
    session_count: int
    session_bytes: int
    check: CheckReport
    lost: tuple[str, ...]
    deep: bool


def collect(store: KVStore, deep: bool = False) -> ReportData:
    """Read what the page says of an open store, which may be open for reading beside its writer.

    Args:
        store: with a disk tier.
        deep: also read and verify every record.

    Raises:
        DiskError: the catalog cannot be read.
    """
    table, stats, history = store.blocks(), store.stats(), store.history()
    tree, per_token = PrefixTree(table), store.identity.layout.bytes_per_token
    sessions = store.sessions()
    space = _space(store.path, stats["disk"], stats["sessions"]["bytes"])
    return ReportData(
        path=store.path,
        model=f"{store.identity.model} {store.identity.revision}".strip(),
        made=time.time(),
        facts=_facts(store),
        records=len(table.rows),
        tokens=int(table.rows["count"].sum(dtype=np.int64)),
        members=len(table.donors),
        donors=len({donor for donors in table.donors.values() for donor in donors}),
        space=space,
        used=sum(part.bytes for part in space),
        budget=history[-1].sizes.get("disk_budget", 0) if history else 0,
        segments=_segments(table, int(stats["disk"]["segments"]), store.config.segment_bytes),
        codecs=_codecs(table, per_token),
        namespace_digests=table.namespaces,
        namespaces=_namespaces(table, tree),
        savings=_savings(table, tree, per_token),
        nodes=tuple(tree.nodes()),
        families=_families(table, per_token),
        history=history,
        sessions=tuple(sessions[:MOST_SESSIONS]),
        session_count=len(sessions),
        session_bytes=int(stats["sessions"]["bytes"]),
        check=store.check(deep=deep),
        lost=tuple(lost_at_open(store.stats()["counters"])),
        deep=deep,
    )


def _facts(store: KVStore) -> tuple[tuple[str, str], ...]:
    layout, fields = store.identity.layout, store.identity.fields()
    kinds = sorted({layer.kind for layer in layout.layers} | ({"state"} if layout.states else set()))
    named = ("weights", "tokenizer", "codec_family", "shard")
    return (
        *((name.replace("_", " "), str(fields[name])) for name in named if fields[name]),
        ("layers", f"{len(layout.layers)} ({', '.join(kinds)}, {layout.dtype})"),
        ("raw bytes a token", f"{layout.bytes_per_token:,}"),
        ("tokens a block", f"{store.config.block_tokens:,}"),
    )


def _space(path: str, disk: dict[str, float], session_bytes: int) -> tuple[Part, ...]:
    live, files, catalog = int(disk["bytes"]), int(disk["file_bytes"]), int(disk["catalog_bytes"])
    profiles = stored_bytes(os.path.join(path, "profiles"))
    named, inside = files + catalog + profiles, min(catalog, session_bytes)
    return (
        Part("blocks", live, "records that a get can find"),
        Part(
            "free in segments",
            max(0, files - live),
            "not filled yet, or left by what was evicted or replaced; written again",
        ),
        Part("catalog: sessions", inside, "tokens and metadata of the sessions"),
        Part("catalog: the rest", catalog - inside, "where each record lies, its tokens, holes, traffic, history"),
        Part("profiles", profiles, "numbers that were fitted to the model, for codecs that need them"),
        Part("other", max(0, int(disk["used_bytes"]) - named), "superblock, locks, folders"),
    )


def _segments(table: BlockTable, count: int, segment_bytes: int) -> tuple[int, ...]:
    live = table.segment_bytes()
    tenths = Counter(min(10, 10 * nbytes // segment_bytes) for nbytes in live.values())
    tenths[0] += max(0, count - len(live))
    return tuple(tenths[tenth] for tenth in range(11))


def _codecs(table: BlockTable, per_token: int) -> tuple[CodecRow, ...]:
    found, labels = [], table.labels
    for label in np.unique(labels).tolist():
        for is_member in (False, True):
            rows = table.rows[(labels == label) & (table.rows["is_member"] == is_member)]
            if len(rows):
                tokens = int(rows["count"].sum(dtype=np.int64))
                found.append(
                    CodecRow(label, is_member, len(rows), tokens, tokens * per_token, int(rows["bytes"].sum()))
                )
    return tuple(sorted(found, key=lambda row: -row.bytes))


def _namespaces(table: BlockTable, tree: PrefixTree) -> tuple[NamespaceRow, ...]:
    found = []
    for number, digest in enumerate(table.namespaces):
        here = table.rows["namespace"] == number
        rows = table.rows[here]
        tokens, nbytes = int(rows["count"].sum(dtype=np.int64)), int(rows["bytes"].sum())
        found.append(NamespaceRow(digest, int(tree.is_last[here].sum()), len(rows), tokens, nbytes))
    return tuple(sorted(found, key=lambda row: -row.bytes))


def _savings(table: BlockTable, tree: PrefixTree, per_token: int) -> Savings:
    rows, members = table.rows, table.rows["is_member"]
    raw = rows["count"].astype(np.int64) * per_token
    stored, alone, raw_alone = int(rows["bytes"].sum()), int(rows["bytes"][~members].sum()), int(raw[~members].sum())
    share = alone / raw_alone if raw_alone else 1.0
    return Savings(
        alone=tree.sequence_tokens * per_token,
        shared=int(raw.sum()),
        coded=alone + int(share * int(raw[members].sum())),
        stored=stored,
    )


def _families(table: BlockTable, per_token: int) -> tuple[Family, ...]:
    place = {record: i for i, record in enumerate(table.rows["record"].tolist())}
    members: dict[int, list[int]] = {}
    for member, donors in table.donors.items():
        for donor in set(donors):
            if member in place and donor in place:
                members.setdefault(donor, []).append(place[member])
    ends = np.cumsum(table.rows["count"], dtype=np.int64)
    found = []
    for donor, rows in sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))[:MOST_FAMILIES]:
        row, end = table.rows[place[donor]], int(ends[place[donor]])
        begins = tuple(table.tokens[end - int(row["count"]) : end][:6].tolist())
        raw = int(table.rows["count"][rows].sum(dtype=np.int64)) * per_token
        nbytes = int(table.rows["bytes"][rows].sum())
        found.append(Family(donor, int(row["start"]), begins, len(rows), raw, nbytes))
    return tuple(found)
