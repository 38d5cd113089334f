"""Copies stored sequences and sessions from one open store into another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from kvstore.core.explanation import Reason
from kvstore.core.results import Hit
from kvstore.core.tokens import Tokens
from kvstore.errors import IdentityMismatch
from kvstore.residency.inventory import SequenceInfo

if TYPE_CHECKING:
    from kvstore.store import KVStore

Progress = Callable[[str, int, int], None]
# Why a get ends earlier than the source had said, where a program took the rest away, and nothing is wrong.
_TAKEN = {Reason.DELETED, Reason.EVICTED, Reason.EXPIRED, Reason.GONE, Reason.NEVER_PUT, Reason.TOKENS_DIFFER}
_TAKEN |= {Reason.OTHER_NAMESPACE, Reason.NO_WINDOW, Reason.NO_STATE}


@dataclass(frozen=True)
class Choice:
    """What to copy; all of it if nothing is named.

    Attributes:
        sessions: names of sessions; each comes with its tokens and its cache.
        prefixes: sequences that begin with one of these, `[n]` uint32 each.
        namespace: only of this one; None for all.

    Example:
        >>> Choice(sessions=("alice",)).is_all
        False
    """

    sessions: tuple[str, ...] = ()
    prefixes: tuple[Tokens, ...] = ()
    namespace: bytes | None = None

    @property
    def is_all(self) -> bool:
        """Whether neither sessions nor prefixes are named."""
        return not self.sessions and not self.prefixes

    def takes(self, sequence: SequenceInfo) -> bool:
        """Return whether a sequence is to be copied for its own sake, and not as that of a session."""
        if self.namespace is not None and sequence.namespace != self.namespace:
            return False
        starts = (np.array_equal(sequence.tokens[: len(prefix)], prefix) for prefix in self.prefixes)
        return self.is_all or any(starts)


@dataclass
class CopyReport:
    """What was copied. Mutable while the copy goes on.

    Attributes:
        sequences: how many were looked at; that of a session counts once, also where it is copied for its own sake.
        tokens: of these.
        new_tokens: tokens that the target did not have.
        left: sequences of which a part left the source while the copy went on; the rest is copied.
        short: sequences of which a part could not be read otherwise; the rest is copied.
        dropped_blocks: blocks that the target could not take.
        sessions: how many were copied.
        missing: named sessions that do not exist.
    """

    sequences: int = 0
    tokens: int = 0
    new_tokens: int = 0
    left: int = 0
    short: int = 0
    dropped_blocks: int = 0
    sessions: int = 0
    missing: list[str] = field(default_factory=list)


def copy_store(
    source: KVStore, target: KVStore, choice: Choice | None = None, progress: Progress | None = None
) -> CopyReport:
    """Copy sequences with their caches, pins and ends of life, and sessions. Durable on return.

    What the target has already is not read. Every cache passes the checks of a get; what fails them is counted and left
    out. The source may be open for reading beside its writer. Log-probabilities of tokens are not copied. A lossy store
    codes the caches once more.

    Args:
        source, target: open stores of one identity; the target for writing. No more than one sequence is in memory.
        choice: what to copy.
        progress: called with (what, done, total).

    Raises:
        IdentityMismatch: they are stores of two models. Nothing is changed.
        ReadOnlyStore, DiskError: of the target.
    """
    difference = target.identity.difference(source.identity.fields())
    if difference:
        raise IdentityMismatch(
            f"{target.path} holds caches of another identity ({difference}); name another folder for these"
        )
    choice, report = choice or Choice(), CopyReport()
    sessions = [each for each in source.sessions() if _is_chosen(choice, each.id, each.namespace)]
    report.missing = sorted(set(choice.sessions) - {session.id for session in sessions})
    there = source.inventory()
    sequences = [sequence for sequence in (*there.sequences, *there.ends) if choice.takes(sequence)]
    total, counted = len(sequences) + len(sessions), set[tuple[bytes, bytes]]()
    for done, sequence in enumerate(sequences):
        _tell(progress, done, total)
        options = {"ttl": _left(sequence.expires), "pin": sequence.pinned}
        _count(report, counted, sequence.tokens, sequence.namespace)
        _copy(source, target, report, sequence.tokens, sequence.namespace, options)
    for done, session in enumerate(sessions, len(sequences)):
        _tell(progress, done, total)
        tokens = source.session(session.id, namespace=session.namespace).tokens
        if len(tokens):
            # Its last token may never have had a cache, and parts of its cache may have left long ago.
            stored = tokens[: source.contains(tokens, namespace=session.namespace)]
            if len(stored):
                _count(report, counted, stored, session.namespace)
                _copy(source, target, report, stored, session.namespace, {})
            copied = target.session(session.id, namespace=session.namespace)
            copied.point_to(tokens, ttl=_left(session.expires), metadata=session.metadata)
            report.sessions += 1
    _tell(progress, total, total)
    report.dropped_blocks += target.flush().dropped_blocks
    return report


def _is_chosen(choice: Choice, name: str, namespace: bytes) -> bool:
    fits = choice.namespace is None or namespace == choice.namespace
    return fits and (choice.is_all or name in choice.sessions)


def _left(expires: float) -> float | None:
    """Seconds until then, None for 0, which is never."""
    return max(1e-3, expires - time.time()) if expires else None


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None and total:
        progress("sequences and sessions", done, total)


def _count(report: CopyReport, counted: set[tuple[bytes, bytes]], tokens: Tokens, namespace: bytes) -> None:
    name = namespace, xxhash.xxh3_128_digest(tokens.tobytes())
    if name not in counted:
        counted.add(name)
        report.sequences += 1
        report.tokens += len(tokens)


def _copy(
    source: KVStore, target: KVStore, report: CopyReport, tokens: Tokens, namespace: bytes, options: dict[str, Any]
) -> None:
    kept = any(options.values())
    if target.contains(tokens, namespace=namespace) == len(tokens) and not kept:
        return
    hit = source.get(tokens, namespace=namespace, reserve=0)
    if hit is None or hit.tokens < len(tokens):
        is_taken = source.explain(tokens, namespace=namespace).reason in _TAKEN
        report.left += is_taken
        report.short += not is_taken
    if hit is not None:
        done = target.put(tokens[: hit.tokens], _cache_of(target, hit), namespace=namespace, **options)
        report.new_tokens += done.new_tokens
        report.dropped_blocks += done.dropped_blocks


def _cache_of(store: KVStore, hit: Hit) -> Any:
    """What `put` takes: states need the cache of the model's library, all else does not."""
    layout = store.identity.layout
    return hit.cache() if layout.states or layout.model_layers else hit.layers
