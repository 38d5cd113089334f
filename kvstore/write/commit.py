"""Writes groups of puts to disk, each in one commit, and says what became of each block."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvstore.core.results import FlushResult
from kvstore.metrics import Metric
from kvstore.residency.residency import Residency
from kvstore.residency.sessions import SessionTable
from kvstore.tiers.disk.writes import GroupWrite, SealedRecord
from kvstore.write.aging import Ager
from kvstore.write.queue import WriteBatch


@dataclass(frozen=True)
class GroupCommit:
    """Writes groups of puts, one after the other. For one thread.

    Attributes:
        ager: codes with loss what the groups leave behind; None if nothing is.
    """

    residency: Residency
    sessions: SessionTable
    ager: Ager | None = None

    def exclusive(self) -> AbstractContextManager[object]:
        """Return a context in which nobody else writes to the disk; groups are begun and finished in it."""
        disk = self.residency.disk
        return contextlib.nullcontext() if disk is None else disk.paused()

    def begin(self, sealed: Sequence[SealedRecord], beside: bool) -> GroupWrite:
        """Begin to write the records of a group; see `DiskTier.begin`."""
        disk = self.residency.disk
        return GroupWrite() if disk is None else disk.begin(sealed, beside)

    def finish(self, group: Sequence[WriteBatch], begun: GroupWrite) -> FlushResult:
        """Commit a group; afterwards its blocks are no longer queued.

        A full or failing disk drops blocks, which is counted.

        Args:
            group: the batches, the oldest first.
            begun: the records of those of their blocks that are still wanted.

        Returns:
            How many blocks are durable, and how many were dropped.
        """
        residency = self.residency
        sessions = [session for batch in group for session in batch.sessions]
        written: set[int] = set()
        if residency.disk is not None:
            on_disk = residency.disk.finish(
                begun,
                superseded=[residency.replaced_by(batch.blocks) for batch in group],
                changed=[change for batch in group for change in batch.changed],
                sessions=sessions,
            )
            if on_disk is None:
                residency.metrics.add(Metric.DROPPED_SESSIONS, len(sessions))
                self.sessions.dropped(sessions)
            else:
                written = on_disk
                self.sessions.written(sessions)
        elif sessions:
            residency.metrics.add(Metric.EVICTED_SESSIONS, self.sessions.written(sessions))
        dropped = sum(residency.written(batch.blocks, written) for batch in group)
        return FlushResult(len(written), dropped)

    def age(self, records: Sequence[int]) -> None:
        """Code with loss what a group left behind."""
        if self.ager is not None:
            self.ager.age(records)
