"""Writes a group of puts to disk in one commit, and says what became of each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.results import FlushResult
from kvstore.metrics import Metric
from kvstore.residency.residency import Residency
from kvstore.residency.sessions import SessionTable
from kvstore.tiers.disk.writes import SealedRecord
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

    def commit(self, group: Sequence[WriteBatch], sealed: Sequence[SealedRecord]) -> FlushResult:
        """Write a group with one commit; afterwards its blocks are no longer queued.

        A full or failing disk drops blocks, which is counted.

        Args:
            group: the batches, the oldest first.
            sealed: the records of those of their blocks that are still wanted.

        Returns:
            How many blocks are durable, and how many were dropped.
        """
        residency = self.residency
        sessions = [session for batch in group for session in batch.sessions]
        written: set[int] = set()
        if residency.disk is not None:
            on_disk = residency.disk.write(
                sealed,
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
        aged = [record for batch in group for record in batch.aged]
        if aged and self.ager is not None:
            self.ager.age(aged)
        return FlushResult(len(written), dropped)
