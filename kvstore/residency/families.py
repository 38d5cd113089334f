"""Which records (members) are coded against which others (donors). No donor is a member."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Families:
    """Members by donor and donors by member, as record numbers.

    Thread-safe: `_lock` guards both tables; a look-up of one record is a single step and needs no lock.

    Example:
        >>> families = Families()
        >>> families.add(7, donors=[3, 5])
        >>> families.donors(7), families.members(3)
        ((3, 5), [7])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._donors: dict[int, tuple[int, ...]] = {}
        self._members: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """How many members there are."""
        return len(self._donors)

    def add(self, member: int, donors: Sequence[int]) -> None:
        """Note that the member needs these records from now on, and no others."""
        with self._lock:
            self._leave(member)
            self._donors[member] = tuple(donors)
            for donor in donors:
                self._members.setdefault(donor, set()).add(member)

    def remove(self, record: int) -> None:
        """Note that the record, a member or not, needs no donors any more. Its own members stay."""
        if record in self._donors:
            with self._lock:
                self._leave(record)

    def donors(self, member: int) -> tuple[int, ...]:
        """Return what a record is coded against, in the order of its own table; () if it stands alone."""
        return self._donors.get(member, ())

    def members(self, donor: int) -> list[int]:
        """Return what is coded against a record, rising."""
        if donor not in self._members:
            return []
        with self._lock:
            return sorted(self._members.get(donor, ()))

    def stats(self) -> dict[str, int]:
        """Return "members", records coded against others, and "donors", records that others need."""
        return {"members": len(self._donors), "donors": len(self._members)}

    def snapshot(self) -> tuple[dict[int, tuple[int, ...]], dict[int, frozenset[int]]]:
        """Return copies of (donors by member, members by donor)."""
        with self._lock:
            return dict(self._donors), {donor: frozenset(members) for donor, members in self._members.items()}

    def _leave(self, member: int) -> None:
        for donor in self._donors.pop(member, ()):
            members = self._members.get(donor)
            if members is not None:
                members.discard(member)
                if not members:
                    del self._members[donor]
