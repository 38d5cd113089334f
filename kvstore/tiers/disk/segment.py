"""One segment file as the disk tier knows it: what lives in it, who reads it, and where a record lies in it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from kvstore.config import PAGE_BYTES


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
    """Keeps a segment from being recycled as long as this object exists, however the read ends that needs it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


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
    """

    number: int
    end: int = PAGE_BYTES
    live: int = 0
    readers: set[weakref.ref[Hold]] = field(default_factory=set)
    writes: int = 0
    sealed: bool = False

    @property
    def reads(self) -> int:
        """How many holds there are."""
        return len(self.readers)
