"""Which records of a place from the remote tier this store keeps, of a layout with windows or states."""

from __future__ import annotations

from kvstore.codecs import KVView
from kvstore.codecs.groups import GroupedView, Snapshot
from kvstore.core.layout import KVLayout
from kvstore.core.record import FLAG_STATES
from kvstore.core.states import pack
from kvstore.core.windows import lacks_more, raw_bytes
from kvstore.read.remote import Arrivals
from kvstore.residency.residency import Residency
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.remote.record import RemoteRecord


def wanted(arrivals: Arrivals, residency: Residency, layout: KVLayout) -> dict[int, RemoteRecord]:
    """Return the arrived records that this store lacks, or has with fewer tokens of windows or without states, by the
    index of their block; {} where a block before one of them is in neither.
    """
    size, coverage = residency.config.block_tokens, residency.coverage
    match = residency.index.match(arrivals.namespace, arrivals.tokens, touch=False)
    records, ends = match.records.tolist(), match.ends.tolist()
    tails = {end: record for record, end in residency.index.tails(arrivals.namespace, arrivals.tokens)}
    found: dict[int, RemoteRecord] = {}
    for arrived in arrivals.records:
        header = arrived.header
        i, stop = header.start // size, header.start + header.count
        covered = i < len(records) and records[i] and min(ends[i], match.depth) >= stop
        held = tails.get(stop, records[i] if covered and ends[i] == stop else 0) if covered else 0
        needs_states = bool(header.flags & FLAG_STATES) and not coverage.has_states(held)
        if (
            not covered
            or needs_states
            or lacks_more(layout, coverage.cut(held or records[i]), header.cut, header.start, header.count)
        ):
            found[i] = arrived
    last = -(-len(arrivals.tokens) // size)
    there = all(i in found or (i < len(records) and records[i]) for i in range(last))
    return found if there else {}


def room_for(
    layout: KVLayout, start: int, count: int, cut: int, pool: BufferPool, has_states: bool = False
) -> GroupedView:
    """Return a view to decode a record into, in memory of its own."""
    buffer = pool.take(max(1, raw_bytes(layout, cut, start, count)))
    parts: list[tuple[int, KVView | None]] = []
    address = buffer.address
    for group in layout.groups:
        missing = group.missing(cut, start, count)
        view = None
        if missing < count:
            view = KVView.packed(group.layout, count - missing, address, buffer)
            address += view.nbytes
        parts.append((missing, view))
    return GroupedView(layout, count, parts, Snapshot() if has_states else None)


def with_states(view: GroupedView) -> GroupedView:
    """Return the same view with the bytes of the states that were decoded into it."""
    if view.snapshot is None:
        return view
    return GroupedView(view.layout, view.tokens, view.parts, Snapshot(pack(view.states)))
