"""Fills the index from the catalog when a store is opened, and notes the traffic in it when the store is closed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.config import PAGE_BYTES
from kvstore.core.explanation import Reason
from kvstore.core.record import FLAG_PINNED
from kvstore.metrics import Metric
from kvstore.residency.donor_rule import may_be_donor
from kvstore.residency.residency import Residency
from kvstore.tiers.disk.catalog import CatalogError
from kvstore.tiers.disk.entry import Scan
from kvstore.tiers.disk.tier import DiskTier


def load_index(residency: Residency) -> int:
    """Fill an empty index, and what is known of its records, from the catalog.

    Entries that cannot be placed, because what comes before them is gone, are counted and removed from the catalog.

    Returns:
        The next free record number; 1 for a store without a disk tier.
    """
    disk = residency.disk
    if disk is None:
        return 1
    scan = disk.take_scan()
    names, scan, which, lost = _by_namespace(disk, scan)
    dropped = _restore(residency, disk, scan, names, which)
    _load_lives(residency, scan, dropped)
    lost += [*dropped, *_load_families(residency, scan)]
    if not disk.read_only:  # a reader evicts nothing
        durable = scan.entries[~np.isin(scan.entries["record"], lost)]
        residency.load_order(zip(durable["record"].tolist(), durable["parent"].tolist(), strict=True))
    # Recency is by number after a restore, and donors are older than their members, which they must outlive.
    residency.use_donors({donor for donors in scan.donors.values() for donor in donors})
    _load_content(residency, scan, names, which)
    if lost:
        residency.metrics.add(Metric.UNREACHABLE_RECORDS, len(lost))
        _remove(residency, disk, lost)
    return max(scan.last_record, max(lost, default=0)) + 1


def save_traffic(residency: Residency) -> None:
    """Note in the catalog how often each record was used, so that the next life of the store knows it.

    Durable on return. A failure is counted, and nothing is noted. Does nothing without a disk tier.
    """
    if residency.disk is None:
        return
    try:
        residency.disk.save_traffic(*residency.index.counts())
    except CatalogError as error:
        residency.metrics.add(Metric.CATALOG_ERRORS, because=error)


def _by_namespace(disk: DiskTier, scan: Scan) -> tuple[list[bytes], Scan, npt.NDArray[np.intp], list[int]]:
    """(digests of the namespaces, the entries of these, which of them each is in, records of unknown namespaces)."""
    names = sorted(disk.namespaces, key=lambda digest: disk.namespaces[digest])
    numbers = np.array([disk.namespaces[digest] for digest in names], np.uint32)
    rows = scan.entries
    which = np.searchsorted(numbers, rows["namespace"])
    known = which < len(numbers)
    known[known] = numbers[which[known]] == rows["namespace"][known]
    return names, scan.subset(known), which[known], rows["record"][~known].tolist()


def _restore(
    residency: Residency, disk: DiskTier, scan: Scan, names: list[bytes], which: npt.NDArray[np.intp]
) -> list[int]:
    """Fills the trie; returns the records that have no place in it, for what comes before them is gone."""
    rows = scan.entries
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
        np.ascontiguousarray(scan.tokens),
        _pinned(scan).astype(np.uint8),
        traffic,
    ).tolist()
    return dropped


def _load_lives(residency: Residency, scan: Scan, dropped: list[int]) -> None:
    """Pins, and ends of life."""
    rows, pinned = scan.entries, _pinned(scan)
    residency.load(
        pinned=rows["record"][pinned & ~np.isin(rows["record"], dropped)].tolist(),
        sizes=_sizes(scan) if pinned.any() else None,
        expiry={int(rows["record"][i]): float(rows["expiry"][i]) for i in np.flatnonzero(rows["expiry"]).tolist()},
    )


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
    """Enters the blocks that others may be coded against in the content index: see `DonorMatcher`."""
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
    residency.load_content(
        names,
        which[serves].astype(np.uint32),
        np.ascontiguousarray(rows["record"][serves]),
        np.ascontiguousarray(rows["parent"][serves]),
        np.ascontiguousarray(rows["count"][serves]),
        np.ascontiguousarray(scan.tokens[np.repeat(serves, rows["count"])]),
    )


def _sizes(scan: Scan) -> dict[int, int]:
    rows = scan.entries
    return dict(zip(rows["record"].tolist(), (rows["pages"].astype(np.int64) * PAGE_BYTES).tolist(), strict=True))


def _pinned(scan: Scan) -> npt.NDArray[np.bool_]:
    return np.asarray((scan.entries["flags"] & FLAG_PINNED) != 0)


def _remove(residency: Residency, disk: DiskTier, records: list[int]) -> None:
    if disk.read_only:
        return
    try:
        disk.remove(records)
    except CatalogError as error:
        residency.metrics.add(Metric.CATALOG_ERRORS, because=error)
