"""Fills the index from the catalog: when a store is opened, and when a reader follows a writer process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.core.explanation import Reason
from kvstore.core.record import FLAG_PINNED
from kvstore.metrics import Metric
from kvstore.residency.block import StoredBlock
from kvstore.residency.donor_rule import may_be_donor
from kvstore.residency.residency import Residency
from kvstore.tiers.disk.catalog import CatalogError
from kvstore.tiers.disk.entry import Scan


def load_index(residency: Residency) -> int:
    """Rebuilds the index at open; returns the next free record number.

    Entries that cannot be placed (their parents are gone) are dropped, counted, and removed from the catalog.
    """
    disk = residency.disk
    assert disk is not None
    scan, disk.scan = disk.scan, None
    assert scan is not None
    rows = scan.entries
    names = sorted(disk.namespaces, key=lambda digest: disk.namespaces[digest])
    numbers = np.array([disk.namespaces[digest] for digest in names], np.uint32)
    which = np.searchsorted(numbers, rows["namespace"])
    known = which < len(numbers)
    known[known] = numbers[which[known]] == rows["namespace"][known]
    lost = rows["record"][~known].tolist()
    scan, which = scan.subset(known), which[known]
    rows = scan.entries
    pinned = (rows["flags"] & FLAG_PINNED) != 0
    dropped = residency.index.restore(
        names,
        which.astype(np.uint32),
        np.ascontiguousarray(rows["record"]),
        np.ascontiguousarray(rows["start"]),
        np.ascontiguousarray(rows["count"]),
        np.ascontiguousarray(rows["tag"]),
        np.ascontiguousarray(rows["parent_tag"]),
        np.ascontiguousarray(rows["bits"]),
        np.ascontiguousarray(scan.tokens),
        pinned.astype(np.uint8),
        _traffic(residency, rows["record"]),
    ).tolist()
    lost += dropped
    residency.load(
        pinned=rows["record"][pinned & ~np.isin(rows["record"], dropped)].tolist(),
        expiry={int(rows["record"][i]): float(rows["expiry"][i]) for i in np.flatnonzero(rows["expiry"]).tolist()},
    )
    lost += _load_families(residency, scan)
    # Recency is by number after a restore, and donors are older than their members, which they must outlive.
    residency.use_donors({donor for donors in scan.donors.values() for donor in donors})
    _load_content(residency, scan, names, which)
    if lost:
        residency.metrics.add(Metric.UNREACHABLE_RECORDS, len(lost))
        if not disk.read_only:
            try:
                disk.remove(lost)
            except CatalogError:
                residency.metrics.add(Metric.CATALOG_ERRORS)
    disk.last_record = int(rows["record"].max(initial=0))
    return max(disk.last_record, max(lost, default=0)) + 1


def save_traffic(residency: Residency) -> None:
    """Notes in the catalog how often each record was used, for the probabilities of the next life of the store."""
    disk = residency.disk
    assert disk is not None
    try:
        disk.save_traffic(*residency.index.counts())
    except CatalogError:
        residency.metrics.add(Metric.CATALOG_ERRORS)


def _traffic(residency: Residency, records: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    assert residency.disk is not None
    try:
        return residency.disk.catalog.traffic(np.ascontiguousarray(records))
    except CatalogError:
        residency.metrics.add(Metric.CATALOG_ERRORS)
        return np.zeros(len(records), np.uint32)


def _load_families(residency: Residency, scan: Scan) -> list[int]:
    """Who needs whom; returns the members whose donors are gone, or are members themselves: nobody can read them."""
    lost = [
        member
        for member, donors in scan.donors.items()
        if member in residency.index  # else it is among the lost already
        and any(donor not in residency.index or donor in scan.donors for donor in donors)
    ]
    kept = scan.donors.keys() - set(lost)
    residency.load(donors={member: scan.donors[member] for member in kept if member in residency.index})
    if lost:
        residency.forget(lost, Reason.DAMAGED)
        residency.metrics.add(Metric.LOST_MEMBERS, len(lost))
    return lost


def _load_content(residency: Residency, scan: Scan, names: list[bytes], which: npt.NDArray[np.intp]) -> None:
    """Enters the blocks that others may be coded against in the content index: see `Matchmaker`."""
    if residency.content is None:
        return
    rows = scan.entries
    serves = may_be_donor(
        record=rows["record"],
        parent=rows["parent"],
        tokens=rows["count"],
        block_tokens=residency.config.block_tokens,
        expiry=rows["expiry"],
        is_member=np.isin(rows["record"], np.fromiter(scan.donors, np.uint64, len(scan.donors))),
        is_indexed=np.array([record in residency.index for record in rows["record"].tolist()], bool),
    )
    residency.content.insert_many(
        names,
        which[serves].astype(np.uint32),
        np.ascontiguousarray(rows["record"][serves]),
        np.ascontiguousarray(rows["parent"][serves]),
        np.ascontiguousarray(rows["count"][serves]),
        np.ascontiguousarray(scan.tokens[np.repeat(serves, rows["count"])]),
    )


def follow(residency: Residency) -> None:
    """A reader takes in what a writer process committed since; what it removed is noticed when it is looked up."""
    disk = residency.disk
    assert disk is not None
    try:
        version = disk.catalog.version()
        if version == disk.seen_version:
            return
        scan = disk.catalog.scan(after=disk.last_record)
        disk.namespaces = disk.catalog.namespaces()
    except CatalogError:
        residency.metrics.add(Metric.CATALOG_ERRORS)
        return
    disk.seen_version = version
    _insert(residency, scan)


def _insert(residency: Residency, scan: Scan) -> None:
    disk, rows = residency.disk, scan.entries
    assert disk is not None
    names = {number: digest for digest, number in disk.namespaces.items()}
    ends = np.cumsum(rows["count"])
    for i in range(len(rows)):
        row = rows[i]
        record, parent, start = int(row["record"]), int(row["parent"]), int(row["start"])
        disk.last_record = max(disk.last_record, record)
        tokens = scan.tokens[ends[i] - row["count"] : ends[i]]
        digest = names.get(int(row["namespace"]))
        if start:
            if parent not in residency.index:
                residency.metrics.add(Metric.UNREACHABLE_RECORDS)
                continue
            _, before = residency.index.path(parent)
            if len(before) != start:
                residency.metrics.add(Metric.UNREACHABLE_RECORDS)
                continue
            tokens = np.concatenate([before, tokens])
        if digest is None or record in residency.index:
            continue
        block = StoredBlock(
            record=record,
            parent=parent if start else 0,
            namespace=digest,
            start=start,
            tokens=np.ascontiguousarray(tokens[start:]),
            expiry=float(row["expiry"]),
            donors=scan.donors.get(record, ()),
        )
        residency.arrive(np.ascontiguousarray(tokens), [block], float(row["bits"]) / max(1, int(row["count"])))
