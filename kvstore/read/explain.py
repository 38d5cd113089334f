"""Why a get of these tokens ends where it ends. Looks at the index, the tiers and the log of what left; reads no
payload, changes no recency, and counts nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvstore.codecs.registry import codec_label, is_delta, is_known, may_need_profile
from kvstore.config import PAGE_BYTES
from kvstore.core.explanation import BlockExplanation, Explanation, Reason
from kvstore.core.keys import chain_keys
from kvstore.core.record import DamagedRecord, RecordHeader, header_bytes, padded, parse
from kvstore.core.tokens import Tokens
from kvstore.read.lookup import Lookup
from kvstore.read.remote import RemoteReader, RemoteRequest
from kvstore.read.remote_resume import RemoteResumer
from kvstore.read.worth import Worth
from kvstore.tiers.base import Source, StorageTier
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.profiles import Profiles
from kvstore.tiers.remote.record import TIER


@dataclass(frozen=True)
class Explainer:
    """Thread-safe: has no state of its own. A put, a delete or an eviction may come between two of its looks."""

    lookup: Lookup
    profiles: Profiles
    pool: BufferPool
    worth: Worth
    remote: RemoteReader | RemoteResumer | None = None

    def explain(self, namespace: bytes, tokens: Tokens, returned: int | None = None) -> Explanation:
        """See `KVStore.explain`. namespace: its digest. returned: how many tokens a get has just returned."""
        self.lookup.refresh()
        query = _Query(self.lookup, namespace, tokens)
        rows: list[BlockExplanation] = []
        first = (returned or 0) // query.size
        with self._located(query.records[first:]) as found:
            for index, start in enumerate(range(first * query.size, len(tokens), query.size), first):
                covered = query.covered(index)
                if covered > start:
                    rows.append(self._known(query, index, covered, found[index - first]))
                if covered < query.stop(start):
                    rows.append(query.missing(index, max(start, covered)))
        if self.lookup.layout.is_grouped:
            end = self.lookup.depth(namespace, tokens)
            rows = list(_cut_at(rows, end, self.lookup.limit(namespace, tokens, end)))
        stored = next((row.start for row in rows if row.reason is not Reason.STORED), len(tokens))
        end = self.worth.end(rows, stored, len(tokens)) if not returned else stored
        if end < stored:
            rows = list(_cut_at(rows, end, Reason.NOT_WORTH))
        elif self.remote is not None and returned is not None:
            rows = [_not_remote(row) for row in rows]
        elif self.remote is not None and stored < len(tokens):
            wanted = RemoteRequest(self.lookup.root(namespace), namespace, tokens, stored, len(tokens))
            rows = _with_remote(rows, stored // query.size * query.size, self.remote.end(wanted), query.size)
        return Explanation.of(len(tokens), rows)

    def _known(self, query: _Query, index: int, end: int, copies: Sequence[Source]) -> BlockExplanation:
        """The part of a block that a record of the index covers."""
        residency, record = self.lookup.residency, query.records[index]
        start = index * query.size
        if not copies:
            nowhere = Reason.EVICTED if self.lookup.follower is not None else Reason.DAMAGED
            if residency.may_be_there(record):
                nowhere = Reason.UNREACHABLE
            return query.missing(index, start, end, nowhere)
        reason, detail = self._trouble(record, copies[0]) or (Reason.STORED, "")
        if residency.is_expired(record):
            reason, detail = Reason.EXPIRED, ""
        codes = [number for number in (copy.codec_id for copy in copies) if number is not None]
        return BlockExplanation(
            start,
            end,
            reason,
            record=record,
            tiers=tuple(copy.tier for copy in copies),
            codec=codec_label(codes[0]) if codes else None,
            donors=residency.donors_of(record),
            bytes=copies[0].nbytes,
            expires=residency.expiry(record),
            pinned=residency.is_kept(record),
            detail=detail,
        )

    @contextlib.contextmanager
    def _located(self, records: Sequence[int]) -> Iterator[list[list[Source]]]:
        """Every copy of each record, the nearest first, held meanwhile."""
        residency = self.lookup.residency
        found: list[list[Source]] = []
        for record in records:
            near = (residency.device.get(record), residency.queued(record), residency.host.get(record))
            found.append([source for source in near if source is not None])
        held: list[tuple[StorageTier[Any], list[Any]]] = []
        try:
            for tier in residency.storage.values():
                sources = tier.locate(records)
                held.append((tier, [source for source in sources if source is not None]))
                for copies, source in zip(found, sources, strict=True):
                    copies += [source] if source is not None else []
            yield found
        finally:
            for tier, sources in held:
                tier.release(sources)

    def _trouble(self, record: int, source: Source) -> tuple[Reason, str] | None:
        """Why a copy cannot be decoded here, as far as that is known without its payload."""
        number = source.codec_id
        if number is None:
            return None
        name = codec_label(number)
        if not is_known(number):
            return Reason.UNREADABLE, f"is stored by {name}, which this version does not know"
        if not may_need_profile(number):
            return None
        try:
            header = source.sealed.header if source.sealed is not None else self._header(source)
        except (OSError, DamagedRecord) as error:
            return Reason.DAMAGED, f"is damaged: its header cannot be read ({error})"
        if not self.profiles.knows(number, header.profile):
            return Reason.UNREADABLE, f"is stored by {name}, and its profile {header.profile.hex()} is not here"
        return self._donor_trouble(record) if is_delta(number) else None

    def _donor_trouble(self, record: int) -> tuple[Reason, str] | None:
        donors = self.lookup.residency.donors_of(record)
        with self._located(donors) as found:
            for donor, copies in zip(donors, found, strict=True):
                if not copies:
                    return Reason.DAMAGED, f"is coded against record {donor}, which is gone"
                trouble = self._trouble(donor, copies[0])
                if trouble is not None:
                    return trouble[0], f"is coded against record {donor}, which {trouble[1]}"
        return None

    def _header(self, source: Source) -> RecordHeader:
        """Reads the first pages of a record. Raises `OSError`, `DamagedRecord`."""
        tier = self.lookup.residency.storage[source.tier]
        buffer = self.pool.take(min(PAGE_BYTES, source.nbytes))
        tier.read([source], [buffer])
        needed = min(padded(header_bytes(buffer.view.tobytes())), source.nbytes)
        if needed > len(buffer.view):
            buffer = self.pool.take(needed)
            tier.read([source], [buffer])
        return parse(buffer.view, source.nbytes)


def _cut_at(rows: Sequence[BlockExplanation], end: int, reason: Reason) -> Iterator[BlockExplanation]:
    """The same rows; what is stored behind `end` cannot be used for this reason."""
    for row in rows:
        if row.reason is not Reason.STORED or row.end <= end:
            yield row
            continue
        if row.start < end:
            yield replace(row, end=end)
        yield replace(row, start=max(row.start, end), reason=reason)


def _halves(row: BlockExplanation, end: int) -> Iterator[BlockExplanation]:
    """A row, in two if `end` lies inside of it."""
    if row.start < end < row.end:
        yield replace(row, end=end)
        row = replace(row, start=end)
    yield row


def _with_remote(rows: Sequence[BlockExplanation], start: int, end: int, size: int) -> list[BlockExplanation]:
    """The same rows; blocks from `start` to `end` are in the remote tier, which a get goes on with."""
    if end <= start:
        return list(rows)
    rows = [part for row in rows for part in _halves(row, end)]
    first, last = [row for row in rows if row.end <= start], [row for row in rows if row.start >= end]
    there = [BlockExplanation(at, min(at + size, end), Reason.STORED, tiers=(TIER,)) for at in range(start, end, size)]
    return [*first, *there, *_cut_at(last, end, Reason.GONE)]


def _not_remote(row: BlockExplanation) -> BlockExplanation:
    """The same row, of a block that a get did not get from the remote tier."""
    if row.reason is not Reason.NEVER_PUT:
        return row
    return replace(row, detail="is not stored here, and did not come from the remote tier")


class _Query:
    """The sequence that is explained, and what the index says of it."""

    def __init__(self, lookup: Lookup, namespace: bytes, tokens: Tokens) -> None:
        self.lookup = lookup
        self.namespace = namespace
        self.tokens = tokens
        self.size = lookup.block_tokens
        index = lookup.residency.index
        match = index.match(namespace, tokens, touch=False)
        self._match = match
        self.depth = match.depth
        self.records: list[int] = match.records.tolist()
        self._ends: list[int] = match.ends.tolist()
        self._root = lookup.root(namespace)

    @cached_property
    def _parents(self) -> list[bytes]:
        """The parent's key of each block."""
        return [self._root, *chain_keys(self._root, self.tokens, self.size)]

    @cached_property
    def _elsewhere(self) -> list[int]:
        """How many leading tokens are stored in each other namespace."""
        index = self.lookup.residency.index
        return [index.longest_prefix(name, self.tokens) for name in index.namespaces if name != self.namespace]

    def stop(self, start: int) -> int:
        """Where the block that begins at `start` ends, or the sequence does."""
        return min(start + self.size, len(self.tokens))

    def covered(self, index: int) -> int:
        """How far the record of a block goes, in tokens of the sequence; the block's start where there is none."""
        start = index * self.size
        end = self._ends[index] if index < len(self._ends) else 0
        return max(start, min(end, self.depth, self.stop(start)))

    def missing(
        self, index: int, start: int, end: int | None = None, otherwise: Reason | None = None
    ) -> BlockExplanation:
        """What no record has of a block: from `start` to `end`, its last token by default. otherwise: the reason where
        nothing is known of it."""
        residency, first = self.lookup.residency, index * self.size
        end = self.stop(first) if end is None else end
        here = self.tokens[first:end]
        reason = otherwise
        if len(residency.departures):
            known = residency.departures.why(self._parents[index], self.namespace, first, here, start - first)
            reason = known or otherwise
        if reason is Reason.EVICTED and self.lookup.follower is not None:
            return BlockExplanation(start, end, reason, detail="was removed by the writer process")
        if reason is not None:
            return BlockExplanation(start, end, reason)
        if self.lookup.is_hole(self._match, first):
            return BlockExplanation(start, end, Reason.GONE)
        others = sum(depth >= end for depth in self._elsewhere)
        if others:
            where = f"{others} other namespace{'s' if others > 1 else ''}"
            detail = f"is not stored in this namespace, but in {where}"
            return BlockExplanation(start, end, Reason.OTHER_NAMESPACE, detail=detail)
        if 0 < start == self.depth and self._goes_on():
            detail = f"is not stored: another sequence goes on differently from token {start}"
            return BlockExplanation(start, end, Reason.TOKENS_DIFFER, detail=detail)
        return BlockExplanation(start, end, Reason.NEVER_PUT)

    def _goes_on(self) -> bool:
        """Whether a stored sequence continues what matched."""
        record, end = self.records[-1], self._ends[-1]
        if end != self.depth:
            return end > self.depth
        index = self.lookup.residency.index
        return record in index and index.leaf(record) is None
