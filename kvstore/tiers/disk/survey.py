"""What the disk tier holds at one moment, and whether its own books agree: the part of a check that is about files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.config import PAGE_BYTES
from kvstore.core.distinct import distinct
from kvstore.tiers.disk.entry import Scan
from kvstore.tiers.disk.segment_file import segment_numbers
from kvstore.tiers.disk.segments import Segments


@dataclass(frozen=True)
class Survey:
    """The disk tier at one moment. Immutable.

    Attributes:
        scan: the catalog's entries.
        namespaces: number by digest.
        leaving: records that the index forgot and the catalog does not forget yet.
        sessions: how many there are.
        held: reads under way by segment, which keep it from being recycled.
        problems: where segments, catalog and counters contradict each other.
    """

    scan: Scan
    namespaces: dict[bytes, int]
    leaving: frozenset[int]
    sessions: int
    held: dict[int, int]
    problems: tuple[str, ...]


def segment_problems(segments: Segments, scan: Scan) -> list[str]:
    """Return what is wrong with files, live bytes and free segments. Nobody may write meanwhile."""
    found = []
    files, known = set(segment_numbers(segments.fs, segments.directory)), set(segments.by_number)
    files -= segments.leftover
    unknown = [number for number in sorted(files - known) if segments.is_ours(number)]  # others were put there by hand
    found += [f"segment {number}: the store does not know its file" for number in unknown]
    found += [f"segment {number}: its file is missing" for number in sorted(known - files)]
    rows = scan.entries
    numbers, where = distinct(rows["segment"])
    pages = np.bincount(where, rows["pages"], len(numbers)).astype(np.int64)
    live = dict(zip(numbers.tolist(), (pages * PAGE_BYTES).tolist(), strict=True))
    found += [
        f"segment {number}: the catalog names it, but the store does not know it"
        for number in sorted(set(live) - known)
    ]
    for number, segment in sorted(segments.by_number.items()):
        if segment.live != live.get(number, 0):
            found.append(f"segment {number}: counts {segment.live} live bytes, the catalog {live.get(number, 0)}")
        if segment.writes:
            found.append(f"segment {number}: {segment.writes} writes are under way")
        in_use = segment.live > 0 or segment is segments.current
        if in_use == (number in segments.free) and not segment.reads:
            found.append(f"segment {number}: is {'in use and free' if in_use else 'neither in use nor free'}")
    found += [
        f"segment {number}: is free, but the store does not know it"
        for number, segment in segments.free.items()
        if segments.by_number.get(number) is not segment
    ]
    return found + _overlaps(scan)


def _overlaps(scan: Scan) -> list[str]:
    rows = np.sort(scan.entries, order=["segment", "page"])
    ends = rows["page"].astype(np.int64) + rows["pages"]
    same = rows["segment"][1:] == rows["segment"][:-1]
    clash = np.flatnonzero(same & (rows["page"][1:] < ends[:-1]))
    return [f"records {int(rows['record'][i])} and {int(rows['record'][i + 1])} lie in the same place" for i in clash]
