"""What records hold of layers that do not keep all tokens: what they lack in windows, and which have states."""

from __future__ import annotations


class Coverage:
    """The cut of each record that has one (`core.windows`), and the records with the states at their end.

    Guarded by the lock of `Residency`; `cut` and `has_states` are single look-ups, which need no lock.

    Example:
        >>> coverage = Coverage()
        >>> coverage.set(7, cut=1500, has_states=True)
        >>> coverage.cut(7), coverage.cut(8), coverage.has_states(7)
        (1500, 0, True)
    """

    def __init__(self) -> None:
        self._cuts: dict[int, int] = {}
        self._states: set[int] = set()

    def __len__(self) -> int:
        return len(self._cuts)

    def set(self, record: int, cut: int, has_states: bool) -> None:
        """cut: 0 for a record that lacks nothing."""
        if cut:
            self._cuts[record] = cut
        if has_states:
            self._states.add(record)

    def cut(self, record: int) -> int:
        """Return the record's cut; 0 if it lacks nothing, or is unknown."""
        return self._cuts.get(record, 0)

    def has_states(self, record: int) -> bool:
        """Return whether the record has the states at its end."""
        return record in self._states

    def remove(self, record: int) -> None:
        """Forget a record that left."""
        self._cuts.pop(record, None)
        self._states.discard(record)
