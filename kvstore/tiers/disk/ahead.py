"""Reads of segments that are under way while what came before is decoded."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.tiers.base import Part
from kvstore.tiers.buffers import Buffer
from kvstore.tiers.disk import _files
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.files import SegmentFiles


class SegmentReads:
    """See `ReadsAhead`. Thread-safe. The reader of a record holds its segment until the read has ended.

    Args:
        files: the open segments, past the page cache.
        reads: of the system; see `fs.reads_ahead`.
    """

    def __init__(self, files: SegmentFiles, reads: _files.Reads) -> None:
        self._files = files
        self._reads = reads

    def begin(self, entries: Sequence[Entry], buffers: Sequence[Buffer]) -> int:
        """Begin to read records that follow each other in one segment. Raises: OSError, if it cannot be opened."""
        first = entries[0].extent
        file = self._files.get(first.segment)
        # Neither is the file closed nor does the memory go to others before the system has written into it.
        return self._reads.begin(file.fd, [buffer.view for buffer in buffers], first.offset, (file, tuple(buffers)))

    def begin_parts(self, parts: Sequence[Part], kept: object) -> Sequence[int]:
        """See `ReadsAhead`; all parts in a segment are one read."""
        apart: dict[int, list[Part]] = {}
        for part in parts:
            apart.setdefault(part.source.extent.segment, []).append(part)
        files = {number: self._files.get(number) for number in apart}
        return [
            self._reads.begin_apart(
                files[number].fd,
                [part.memory for part in here],
                [part.source.extent.offset + part.begin for part in here],
                (files[number], kept),
            )
            for number, here in apart.items()
        ]

    def settle(self, number: int) -> None:
        self._reads.settle(number)

    def wait(self, number: int) -> None:
        self._reads.wait(number)
