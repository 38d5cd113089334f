"""Fills the index from the catalog: when a store is opened, and when a reader follows a writer process."""

from __future__ import annotations

import numpy as np

from kvstore.record import FLAG_PINNED
from kvstore.residency import Residency
from kvstore.tiers.disk.catalog import CatalogError, Scan


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
    ).tolist()
    lost += dropped
    residency.pinned.update(rows["record"][pinned].tolist())
    residency.pinned.difference_update(dropped)
    for i in np.flatnonzero(rows["expiry"]).tolist():
        residency.set_expiry(int(rows["record"][i]), float(rows["expiry"][i]))
    if lost:
        residency.metrics.add("unreachable_records", len(lost))
        if not disk.read_only:
            try:
                disk.remove(lost)
            except CatalogError:
                residency.metrics.add("catalog_errors")
    disk.last_record = int(rows["record"].max(initial=0))
    return max(disk.last_record, max(lost, default=0)) + 1


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
        residency.metrics.add("catalog_errors")
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
                residency.metrics.add("unreachable_records")
                continue
            _, before = residency.index.path(parent)
            if len(before) != start:
                residency.metrics.add("unreachable_records")
                continue
            tokens = np.concatenate([before, tokens])
        if digest is None or record in residency.index:
            continue
        end = np.array([len(tokens)], np.uint32)
        ids = np.array([record], np.uint64)
        per_token = float(row["bits"]) / max(1, int(row["count"]))
        residency.index.insert(digest, np.ascontiguousarray(tokens), end, ids, bits=per_token)
        residency.set_expiry(record, float(row["expiry"]))
