"""What a store's learner did, for `stats()` and `kvstore learn`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

OFF, UNSUITED, WAITING, LEARNING = "off", "unsuited", "waiting", "learning"
NOT_WORTH, RECODING, ADOPTED, FAILED = "not worth it", "recoding", "adopted", "failed"
_STATES = (OFF, UNSUITED, WAITING, LEARNING, NOT_WORTH, RECODING, ADOPTED, FAILED)
_REPORTED = ("blocks", "held_out", "before", "after")
REPORT = "learned"  # the key of what was learned in the report of a profile


@dataclass(frozen=True)
class LearningStatus:
    """How far learning has come. Immutable.

    Attributes:
        state: "off" by the settings; "unsuited": there is nothing to learn, `why` says it; "waiting" for blocks and for
            idle time; "learning"; "not worth it": tried, and tried again when there are twice as many blocks;
            "recoding" with what was learned; "adopted": all of that is done; "failed", until the store is opened again.
        why: in words, for people.
        blocks: that the last trial was fitted to.
        held_out: blocks that it was measured on.
        before, after: raw bytes / payload bytes of these, as the disk coded before, and with what was learned.
        adopted_at: unix seconds; 0 if nothing was adopted.
        profile_bytes: of what was adopted, on disk.

    Example:
        >>> LearningStatus(WAITING).numbers()["waiting"]
        1
    """

    state: str
    why: str = ""
    blocks: int = 0
    held_out: int = 0
    before: float = 0.0
    after: float = 0.0
    adopted_at: int = 0
    profile_bytes: int = 0

    @classmethod
    def of_report(cls, report: Mapping[str, Any], nbytes: int, adopted_at: int) -> LearningStatus | None:
        """Return what the report of a profile of `nbytes` says; None if it was not learned from a store."""
        found = report.get(REPORT)
        if not isinstance(found, Mapping):
            return None
        numbers = {name: found.get(name, 0) for name in _REPORTED}
        if not all(isinstance(number, int | float) for number in numbers.values()):
            return None
        return cls(ADOPTED, profile_bytes=nbytes, adopted_at=adopted_at, **numbers)

    def now(self, state: str, why: str = "") -> LearningStatus:
        """Return the same in another state."""
        return replace(self, state=state, why=why)

    def as_report(self) -> dict[str, Any]:
        """Return what `of_report` reads. Equal blocks give equal reports: it does not say when."""
        return {REPORT: {name: getattr(self, name) for name in _REPORTED}}

    def numbers(self) -> dict[str, int | float]:
        """Return all of it as plain numbers: 1 for the state that it is in, 0 for the others."""
        numbers = {name: value for name, value in asdict(self).items() if not isinstance(value, str)}
        return {**{state.replace(" ", "_"): int(state == self.state) for state in _STATES}, **numbers}
