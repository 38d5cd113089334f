"""Where a store tells of its calls one by one, if somebody asked for it: `kvstore.tracing` does."""

from __future__ import annotations

from typing import Protocol

from kvstore.timing import Where


class CallSpan(Protocol):
    """A call that began."""

    def end(self, result: object, error: BaseException | None) -> None:
        """Note that the call returned `result`, or raised `error`. Must not raise."""


class Spans(Protocol):
    """Takes note of calls and of their parts. Thread-safe; no method may raise."""

    def begin(self, call: str) -> CallSpan:
        """Note that a call of the store begins in this thread."""

    def here(self) -> object:
        """Return what stands for the call under way in this thread, for parts that other threads do."""

    def done(self, part: str, seconds: float, tokens: int, where: Where, within: object) -> None:
        """Note that a part ended now and took so long; within: what `here` returned for its call."""
