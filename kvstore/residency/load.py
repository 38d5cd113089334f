"""Fills the index from the catalog when a store is opened, and notes the traffic in it when the store is closed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.config import PAGE_BYTES
from kvstore.core.explanation import Reason
from kvstore.core.heap import give_back_freed
from kvstore.core.record import FLAG_CUT, FLAG_PINNED, FLAG_STATES
from kvstore.metrics import Metric
from kvstore.residency.disk_order import Durable
from kvstore.residency.donor_rule import may_be_donor
from kvstore.residency.history import Recorder
from kvstore.residency.residency import Residency
from kvstore.tiers.disk.entry import FLAG_HOLE, Scan, parents_of
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.tier import DiskTier

_MANY = 10_000  # records: the arrays that they were read into take megabytes


class Loaded(NamedTuple):
    """What opening must know beside the index.

    Attributes:
        next_record: the next free record number; 1 for a store without a disk tier.
        coded: the records in the codec that was asked for.
    """

    next_record: int
    coded: tuple[int, ...] = ()


def load_index(residency: Residency, keep_tails: bool = False, codec: int | None = None) -> Loaded:
    """Fill an empty index, and what is known of its records, from the catalog.

    Entries that cannot be placed, because what comes before them is gone, are counted and removed from the catalog; so
    are holes that nothing is behind.

    Args:
        keep_tails: the layout has windows, so that a tail may hold tokens which the longer record of its block lacks.
        codec: the number of one whose records are to be named; None: of none.
    """
    if residency.disk is None:
        return Loaded(1)
    loaded = _load_all(residency, residency.disk, keep_tails, codec)
    if residency.index.stats()["records"] >= _MANY:
        give_back_freed()  # what was read of the catalog
    return loaded


def _load_all(residency: Residency, disk: DiskTier, keep_tails: bool, codec: int | None) -> Loaded:
    scan = disk.take_scan()
    last_record = scan.last_record
    names, scan, which, unknown = _by_namespace(disk, scan)
    dropped = _restore(residency, disk, scan, names, which, keep_tails)
    _load_lives(residency, scan, dropped)
    lost, gone = _load_families(residency, scan)
    holes = set(scan.holes["record"].tolist())
    unreachable = [*unknown, *lost, *(record for record in dropped if record not in holes)]
    parents = parents_of(scan.entries)
    if residency.orders_disk and not disk.read_only:  # a reader evicts nothing
        durable = ~np.isin(scan.entries["record"], unreachable)
        digests = (names[number] for number in which[durable].tolist())
        _load_order(residency, scan.entries[durable], parents[durable], digests)
    # Recency is by number after a restore, and donors are older than their members, which they must outlive.
    residency.use_donors({donor for donors in scan.donors.values() for donor in donors})
    _load_content(residency, scan, names, which, parents, [*dropped, *lost])
    if unreachable:
        residency.metrics.add(Metric.UNREACHABLE_RECORDS, len(unreachable))
    _remove(residency, disk, [*unknown, *dropped, *gone])
    coded = scan.entries["record"][scan.entries["codec"] == codec].tolist() if codec is not None else ()
    return Loaded(last_record + 1, tuple(coded))


def save_traffic(residency: Residency, recorder: Recorder) -> None:
    """Note in the catalog how often each record was used, so that the next life of the store knows it, and the last
    part of the history.

    Durable on return. A failure is counted, and nothing is noted. Does nothing without a disk tier.
    """
    if residency.disk is None:
        return
    try:
        residency.disk.remove([])  # holes that are still to go
        columns = residency.index.counts(), residency.index.holes()
        records, counts = np.concatenate([c[0] for c in columns]), np.concatenate([c[1] for c in columns])
        order = np.argsort(records)
        residency.disk.save_traffic(records[order], counts[order], recorder.last())
    except CatalogError as error:
        residency.metrics.add(Metric.CATALOG_ERRORS, because=error)


def _load_order(
    residency: Residency, rows: npt.NDArray[np.void], parents: npt.NDArray[np.uint64], digests: Iterable[bytes]
) -> None:
    """Tells the policy what is durable: which block each record is, what comes before it, and how often it was used."""
    indexed, counts = residency.index.counts()
    uses = dict(zip(indexed.tolist(), counts.tolist(), strict=True))
    residency.savings.load(*(rows[column].tolist() for column in ("record", "tag", "start", "count")))
    columns = zip(rows["record"].tolist(), parents.tolist(), rows["pages"].tolist(), strict=True)
    residency.load_order(
        (Durable(record, parent, pages * PAGE_BYTES, uses.get(record, 1)) for record, parent, pages in columns), digests
    )


def _by_namespace(disk: DiskTier, scan: Scan) -> tuple[list[bytes], Scan, npt.NDArray[np.intp], list[int]]:
    """(digests of the namespaces, the entries of these, which of them each is in, records of unknown namespaces)."""
    names = sorted(disk.namespaces, key=lambda digest: disk.namespaces[digest])
    rows = scan.entries
    which, known = _which(disk, names, rows)
    return names, scan.subset(known), which[known], rows["record"][~known].tolist()


def _which(
    disk: DiskTier, names: list[bytes], rows: npt.NDArray[np.void]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """(in which of the namespaces each entry is, whether it is in one of them)."""
    numbers = np.array([disk.namespaces[digest] for digest in names], np.uint32)
    which = np.searchsorted(numbers, rows["namespace"])
    known = which < len(numbers)
    known[known] = numbers[which[known]] == rows["namespace"][known]
    return which, known


def _restore(
    residency: Residency,
    disk: DiskTier,
    scan: Scan,
    names: list[bytes],
    which: npt.NDArray[np.intp],
    keep_tails: bool,
) -> list[int]:
    """Fills the trie; returns the records that have no place in it, for what comes before them is gone, and the holes
    that nothing is behind."""
    rows, token_at = scan.entries, scan.token_at
    unknown: list[int] = []
    if len(scan.holes):
        of_holes, known = _which(disk, names, scan.holes)  # the records are of these namespaces
        unknown = scan.holes["record"][~known].tolist()
        rows = np.concatenate([rows, scan.holes[known]])
        token_at = np.concatenate([token_at, scan.hole_token_at[known]])
        which = np.concatenate([which, of_holes[known]])
    try:
        traffic = disk.traffic(np.ascontiguousarray(rows["record"]))
    except CatalogError as error:
        residency.metrics.add(Metric.CATALOG_ERRORS, because=error)
        traffic = np.zeros(len(rows), np.uint32)
    dropped: list[int] = residency.index.restore(
        names,
        which.astype(np.uint32),
        np.ascontiguousarray(rows["record"]),
        np.ascontiguousarray(rows["start"]),
        np.ascontiguousarray(rows["count"]),
        np.ascontiguousarray(rows["tag"]),
        np.ascontiguousarray(rows["parent_tag"]),
        np.ascontiguousarray(rows["bits"]),
        scan.tokens,
        _pinned(rows).astype(np.uint8),
        traffic,
        (rows["flags"] & FLAG_HOLE).astype(np.uint8),
        keep_tails,
        token_at,
    ).tolist()
    return dropped + unknown


def _load_lives(residency: Residency, scan: Scan, dropped: list[int]) -> None:
    """Pins, and ends of life."""
    rows, pinned, without = scan.entries, _pinned(scan.entries), set(dropped)
    residency.load(
        pinned=[record for record in rows["record"][pinned].tolist() if record not in without],
        sizes=_sizes(scan) if pinned.any() else None,
        covers=_covers(scan),
        expiry={int(rows["record"][i]): float(rows["expiry"][i]) for i in np.flatnonzero(rows["expiry"]).tolist()},
    )


def _covers(scan: Scan) -> list[tuple[int, int, bool]]:
    """(record, cut, whether it has states) of the records that have one or the other."""
    rows = scan.entries
    marked = rows[(rows["flags"] & (FLAG_CUT | FLAG_STATES)) != 0]
    with_states = ((marked["flags"] & FLAG_STATES) != 0).tolist()
    records = marked["record"].tolist()
    return [(record, scan.cuts.get(record, 0), has) for record, has in zip(records, with_states, strict=True)]


def _load_families(residency: Residency, scan: Scan) -> tuple[list[int], list[int]]:
    """Who needs whom; returns the members whose donors are gone, or are members themselves, for nobody can read them;
    and whose entries are to go with that."""
    lost = [
        member
        for member, donors in scan.donors.items()
        if member in residency.index  # else it is among the lost already
        and any(donor not in residency.index or donor in scan.donors for donor in donors)
    ]
    kept = scan.donors.keys() - set(lost)
    residency.load(donors={member: scan.donors[member] for member in kept if member in residency.index})
    if not lost:
        return [], []
    residency.metrics.add(Metric.LOST_MEMBERS, len(lost))
    return lost, residency.forget(lost, Reason.DAMAGED)


def _load_content(
    residency: Residency,
    scan: Scan,
    names: list[bytes],
    which: npt.NDArray[np.intp],
    parents: npt.NDArray[np.uint64],
    dropped: list[int],
) -> None:
    """Enters the blocks that others may be coded against in the content index: see `DonorMatcher`."""
    if residency.content is None:
        return
    rows = scan.entries
    serves = may_be_donor(
        record=rows["record"],
        parent=parents,
        tokens=rows["count"],
        block_tokens=residency.config.block_tokens,
        expiry=rows["expiry"],
        is_member=np.isin(rows["record"], np.fromiter(scan.donors, np.uint64, len(scan.donors))),
        is_indexed=~np.isin(rows["record"], np.array(dropped, np.uint64)),
    )
    residency.load_content(
        names,
        which[serves].astype(np.uint32),
        np.ascontiguousarray(rows["record"][serves]),
        np.ascontiguousarray(parents[serves]),
        np.ascontiguousarray(rows["count"][serves]),
    )


def _sizes(scan: Scan) -> dict[int, int]:
    rows = scan.entries
    return dict(zip(rows["record"].tolist(), (rows["pages"].astype(np.int64) * PAGE_BYTES).tolist(), strict=True))


def _pinned(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    return np.asarray((rows["flags"] & FLAG_PINNED) != 0)


def _remove(residency: Residency, disk: DiskTier, records: list[int]) -> None:
    if disk.read_only or not records:
        return
    try:
        disk.remove(records)
    except CatalogError as error:
        residency.metrics.add(Metric.CATALOG_ERRORS, because=error)
