"""The states of a record: where it may be in each of them, and which follows which.

| state     | index | queue | disk  | memory | member | pinned, expires | comes from; is followed by |
|-----------|-------|-------|-------|--------|--------|-----------------|----------------------------------------------|
| QUEUED    | yes   | yes   | maybe | maybe  | maybe  | maybe           | put, recoding; all but LEAVING |
| DURABLE   | yes   | no    | yes   | maybe  | maybe  | maybe           | commit, opening; REPLACED, LEAVING, GONE |
| UNWRITTEN | yes   | no    | no    | yes    | no     | maybe           | failed write; REPLACED (put again), GONE |
| IN_MEMORY | yes   | no    | no    | yes    | no     | maybe           | no disk: out of the queue; GONE |
| REPLACED  | no    | no    | maybe | no     | no     | no              | a newer record, unwritten; LEAVING, GONE |
| LEAVING   | no    | no    | yes   | no     | no     | no              | evicted, expired, deleted, damaged; GONE |
| GONE      | no    | no    | no    | no     | no     | no              | its number is never given again |

QUEUED and on disk: its group is committed, and it is about to leave the queue. A member is coded against donors; which
record may be one says `donor_rule`. Reopening a store knows nothing of REPLACED and LEAVING: such a record is found
again, unless a longer one holds its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """What a record is to its store. See the table above."""

    QUEUED = "queued"
    DURABLE = "durable"
    UNWRITTEN = "unwritten"
    IN_MEMORY = "in memory"
    REPLACED = "replaced"
    LEAVING = "leaving"
    GONE = "gone"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.DURABLE, State.UNWRITTEN, State.IN_MEMORY, State.REPLACED, State.GONE}),
    State.DURABLE: frozenset({State.REPLACED, State.LEAVING, State.GONE}),
    State.UNWRITTEN: frozenset({State.REPLACED, State.GONE}),
    State.IN_MEMORY: frozenset({State.GONE}),
    State.REPLACED: frozenset({State.LEAVING, State.GONE}),
    State.LEAVING: frozenset({State.GONE}),
    State.GONE: frozenset(),
}


@dataclass(frozen=True)
class Marks:
    """Where a record is, and what is known of it.

    Attributes:
        indexed: the index names it.
        queued: it waits to be written.
        on_disk: the catalog names it.
        in_memory: it is in the device or the host tier.
        unwritten: its write failed.
        replaced: a newer record takes its place.
        member: it is coded against others.
        pinned: it, or one that continues it, is pinned.
        expires: it has an end of life.

    Example:
        >>> Marks(indexed=True, on_disk=True).state(has_disk=True)
        <State.DURABLE: 'durable'>
    """

    indexed: bool = False
    queued: bool = False
    on_disk: bool = False
    in_memory: bool = False
    unwritten: bool = False
    replaced: bool = False
    member: bool = False
    pinned: bool = False
    expires: bool = False

    def state(self, has_disk: bool) -> State:
        """Return the state that these marks name. `problems` finds out whether they contradict each other."""
        if self.replaced:
            return State.REPLACED
        if self.queued:
            return State.QUEUED
        if self.on_disk:
            return State.DURABLE if self.indexed else State.LEAVING
        if self.unwritten:
            return State.UNWRITTEN
        held = self.indexed or self.in_memory
        return (State.UNWRITTEN if has_disk else State.IN_MEMORY) if held else State.GONE


@dataclass(frozen=True)
class _Allowed:
    """What a state requires (True), forbids (False) or leaves open (None)."""

    indexed: bool | None
    queued: bool | None
    on_disk: bool | None
    in_memory: bool | None
    unwritten: bool | None
    member: bool | None
    pinned: bool | None
    expires: bool | None


ALLOWED = {
    State.QUEUED: _Allowed(True, True, None, None, False, None, None, None),
    State.DURABLE: _Allowed(True, False, True, None, False, None, None, None),
    State.UNWRITTEN: _Allowed(True, False, False, True, True, False, None, None),
    State.IN_MEMORY: _Allowed(True, False, False, True, False, False, None, None),
    State.REPLACED: _Allowed(False, False, None, False, False, False, False, False),
    State.LEAVING: _Allowed(False, False, True, False, False, False, False, False),
    State.GONE: _Allowed(False, False, False, False, False, False, False, False),
}
_WORDS = {
    "indexed": "in the index",
    "queued": "in the write queue",
    "on_disk": "on disk",
    "in_memory": "in a memory tier",
    "unwritten": "marked as unwritten",
    "member": "a member of a family",
    "pinned": "pinned",
    "expires": "marked with an end of life",
}


def problems(record: int, marks: Marks, has_disk: bool) -> list[str]:
    """Return what is wrong with a record's marks, in words; [] if they fit its state.

    Example:
        >>> problems(7, Marks(indexed=True, on_disk=True, unwritten=True), has_disk=True)
        ['record 7 (durable) is marked as unwritten']
    """
    state = marks.state(has_disk)
    found = []
    for name, words in _WORDS.items():
        wanted = getattr(ALLOWED[state], name)
        if wanted is not None and wanted != getattr(marks, name):
            found.append(f"record {record} ({state.value}) is {'not ' if wanted else ''}{words}")
    return found
