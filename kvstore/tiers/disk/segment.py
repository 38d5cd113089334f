"""One segment file as the disk tier knows it: what lives in it, who reads it, and where a record lies in it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.config import PAGE_BYTES

Space = tuple[int, int]
"""Where a space of a segment begins and ends."""


@dataclass(frozen=True)
class Extent:
    """Where a record lies on disk. Immutable.

    Attributes:
        segment: number of the segment.
        offset, nbytes: in it, whole pages.

    Example:
        >>> Extent(segment=1, offset=4096, nbytes=8192).nbytes
        8192
    """

    segment: int
    offset: int
    nbytes: int


class Hold:
    """Keeps a segment from being recycled as long as this object exists, however the read ends that needs it.

    Attributes:
        number: of the segment.
        deaths: of records in it before the read began, which the read therefore cannot know of.
    """

    __slots__ = ("__weakref__", "deaths", "number")

    def __init__(self, number: int, deaths: int) -> None:
        self.number = number
        self.deaths = deaths


@dataclass
class Segment:
    """One segment file. `Segments` guards and changes it.

    Attributes:
        number: of the file.
        end: where the next record goes.
        live: bytes of records that the catalog knows in it.
        readers, writes: the holds of reads under way, and how many records are placed and not settled; until they end
            it is not recycled.
        sealed: whether a sync of it failed. Nothing is written to it again; it is unlinked when empty.
        deaths: how many of its records the catalog has given up.
        tight: `deaths` when there was no space between its records that is worth writing to; -1 for never.
        worn: whether a write to it failed. Nothing is written between its records; it is recycled when empty.
    """

    number: int
    end: int = PAGE_BYTES
    live: int = 0
    readers: set[weakref.ref[Hold]] = field(default_factory=set)
    writes: int = 0
    sealed: bool = False
    deaths: int = 0
    tight: int = -1
    worn: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be written between its records before another one dies, or before it is empty."""
        return self.sealed or self.worn or self.tight == self.deaths

    @property
    def is_left(self) -> bool:
        """Whether no read is under way that may know of a record that died: its place may be written to."""
        return all(hold is None or hold.deaths == self.deaths for hold in [reader() for reader in list(self.readers)])

    @property
    def reads(self) -> int:
        """How many holds there are."""
        return len(self.readers)


def taken(spaces: list[Space], nbytes: int) -> int | None:
    """Take bytes from the front of the first space that has them; return where they begin, None for nowhere.

    Example:
        >>> spaces = [(0, 4096), (8192, 20480)]
        >>> taken(spaces, 8192), spaces
        (8192, [(0, 4096), (16384, 20480)])
    """
    for index, (begin, end) in enumerate(spaces):
        if begin + nbytes <= end:
            spaces[index : index + 1] = [(begin + nbytes, end)] if begin + nbytes < end else []
            return begin
    return None


def runs_of(extents: Sequence[Extent]) -> list[tuple[int, int]]:
    """Return the index ranges of extents that follow each other on disk."""
    found, first = [], 0
    for i in range(1, len(extents) + 1):
        if i < len(extents):
            last, this = extents[i - 1], extents[i]
            if this.segment == last.segment and this.offset == last.offset + last.nbytes:
                continue
        found.append((first, i))
        first = i
    return found
