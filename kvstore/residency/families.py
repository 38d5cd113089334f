"""Which records are coded against which: members, and the donors they need, which are no members themselves."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Families:
    """Thread-safe. Records by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._donors: dict[int, tuple[int, ...]] = {}
        self._members: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """How many members there are."""
        return len(self._donors)

    def add(self, member: int, donors: Sequence[int]) -> None:
        """The member needs these records from now on, and no others."""
        with self._lock:
            self._leave(member)
            self._donors[member] = tuple(donors)
            for donor in donors:
                self._members.setdefault(donor, set()).add(member)

    def remove(self, record: int) -> None:
        """The record, a member or not, needs nothing any more. What needs it still does."""
        if record in self._donors:
            with self._lock:
                self._leave(record)

    def donors(self, member: int) -> tuple[int, ...]:
        """What a record is coded against, in the order of its own table; () for one that stands alone."""
        return self._donors.get(member, ())

    def members(self, donor: int) -> list[int]:
        """What is coded against a record, by number."""
        if donor not in self._members:
            return []
        with self._lock:
            return sorted(self._members.get(donor, ()))

    def stats(self) -> dict[str, int]:
        """members: records coded against others. donors: records that others need."""
        return {"members": len(self._donors), "donors": len(self._members)}

    def snapshot(self) -> tuple[dict[int, tuple[int, ...]], dict[int, frozenset[int]]]:
        """(donors by member, members by donor)."""
        with self._lock:
            return dict(self._donors), {donor: frozenset(members) for donor, members in self._members.items()}

    def _leave(self, member: int) -> None:
        for donor in self._donors.pop(member, ()):
            members = self._members.get(donor)
            if members is not None:
                members.discard(member)
                if not members:
                    del self._members[donor]
