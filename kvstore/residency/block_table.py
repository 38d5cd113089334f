"""Every block on disk as a row of numbers, for whoever wants to see the whole of a store."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.codecs.registry import codec_label
from kvstore.config import PAGE_BYTES
from kvstore.core.distinct import distinct
from kvstore.core.keys import NamespaceDigest
from kvstore.core.tokens import Tokens
from kvstore.residency.residency import Residency
from kvstore.tiers.disk.entry import parents_of

ROW = np.dtype(
    [
        ("record", "<u8"),
        ("parent", "<u8"),
        ("start", "<u4"),
        ("count", "<u4"),
        ("bytes", "<i8"),
        ("bits", "<f4"),
        ("uses", "<u4"),
        ("segment", "<u4"),
        ("namespace", "<u4"),
        ("codec", "<u2"),
        ("is_member", "?"),
    ]
)


@dataclass(frozen=True)
class BlockTable:
    """What `KVStore.blocks` returns. Immutable.

    Attributes:
        rows: by rising record number: record; parent, the number of the block before it (0: it is the first, or that is
            not on disk); start and count, of its tokens; bytes that it takes, whole pages; bits, -log2 P of its tokens
            by the model; uses, how often it was put or got (a store that is only read knows them as of the last close
            of its writer); segment, the file that it lies in; namespace, its place in `namespaces`; codec, its number;
            is_member, whether it is coded against others.
        tokens: of all rows, one after the other, uint32.
        namespaces: digests.
        donors: by member, the records that it is coded against.

    Example:
        >>> table = BlockTable(np.zeros(2, ROW), np.zeros(0, np.uint32))
        >>> table.labels.tolist()
        ['raw', 'raw']
    """

    rows: npt.NDArray[np.void]
    tokens: Tokens
    namespaces: tuple[NamespaceDigest, ...] = ()
    donors: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def labels(self) -> npt.NDArray[np.str_]:
        """The name of each row's codec."""
        numbers, which = distinct(self.rows["codec"])
        return np.array([codec_label(number) for number in numbers.tolist()], np.str_)[which]

    def segment_bytes(self) -> dict[int, int]:
        """Return the bytes of the blocks in each segment that has any, by its number."""
        numbers, which = distinct(self.rows["segment"])
        sums = np.bincount(which, weights=self.rows["bytes"], minlength=len(numbers))
        return dict(zip(numbers.tolist(), map(int, sums.tolist()), strict=True))


def block_table_of(residency: Residency) -> BlockTable:
    """Return the table of the catalog as it is now. Raises `CatalogError`."""
    disk = residency.disk
    if disk is None:
        return BlockTable(np.zeros(0, ROW), np.zeros(0, np.uint32))
    scan = disk.catalog.scan()
    entries = scan.entries
    rows = np.zeros(len(entries), ROW)
    for name in ("record", "start", "count", "bits", "segment", "codec"):
        rows[name] = entries[name]
    rows["bytes"] = entries["pages"].astype(np.int64) * PAGE_BYTES
    parents = parents_of(entries)
    rows["parent"] = np.where(np.isin(parents, entries["record"]), parents, 0)
    rows["uses"] = _uses(residency, entries["record"])
    rows["is_member"] = np.isin(entries["record"], np.fromiter(scan.donors, np.uint64, len(scan.donors)))
    names, rows["namespace"] = _namespaces(disk.catalog.namespaces(), entries)
    return BlockTable(rows, scan.tokens_in_order(), names, scan.donors)


def _uses(residency: Residency, records: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """What the index counted of each record; 0 if it does not have it."""
    known, counts = residency.index.counts()
    if not len(known):
        return np.zeros(len(records), np.uint32)
    at = np.minimum(np.searchsorted(known, records), len(known) - 1)
    return np.where(known[at] == records, counts[at], 0).astype(np.uint32)


def _namespaces(
    numbers: dict[bytes, int], entries: npt.NDArray[np.void]
) -> tuple[tuple[NamespaceDigest, ...], npt.NDArray[np.uint32]]:
    """(digests, the place of each entry's among them); those that the catalog does not know have a digest of zeros."""
    digests = {number: digest for digest, number in numbers.items()}
    found, which = distinct(entries["namespace"])
    names = tuple(NamespaceDigest(digests.get(number, bytes(32))) for number in found.tolist())
    return names, which.astype(np.uint32)
