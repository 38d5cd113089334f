"""What `KVStore.explain` returns: why a get ends where it ends, block by block. Pure: no I/O, no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from kvstore.metrics import Metric


class Reason(Enum):
    """Why a block is returned by a get, or is not.

    `words` says it of a block; `metric` is the counter of gets that ended at such a block, None for a stored one.

    Example:
        >>> Reason.EVICTED.words, Reason.EVICTED.metric.value
        ('was evicted to make room', 'short_evicted')
    """

    words: str
    metric: Metric | None

    def __new__(cls, name: str, words: str, metric: Metric | None) -> Reason:
        member = object.__new__(cls)
        member._value_ = name
        member.words = words
        member.metric = metric
        return member

    STORED = "stored", "is stored", None
    NEVER_PUT = (
        "never put",
        "is not stored, and nothing is known of it since the store was opened",
        Metric.SHORT_NEVER_PUT,
    )
    EVICTED = "evicted", "was evicted to make room", Metric.SHORT_EVICTED
    EXPIRED = "expired", "expired: its time to live is over", Metric.SHORT_EXPIRED
    DELETED = "deleted", "was deleted", Metric.SHORT_DELETED
    DAMAGED = "damaged", "was damaged, or a block that it needs was", Metric.SHORT_DAMAGED
    DROPPED = "dropped", "could not be written, and memory did not keep it", Metric.SHORT_DROPPED
    UNREADABLE = "unreadable", "is stored, and cannot be decoded here and now", Metric.SHORT_UNREADABLE
    UNREACHABLE = "unreachable", "is stored, but the catalog cannot be read now", Metric.SHORT_UNREACHABLE
    GONE = (
        "gone",
        "was stored once; why it left is not remembered since the store was opened",
        Metric.SHORT_GONE,
    )
    REMOTE_LATE = "remote late", "is in the remote tier, which did not give it in time", Metric.SHORT_REMOTE
    REMOTE_FAILED = "remote failed", "is in the remote tier, which could not be read", Metric.SHORT_REMOTE
    REMOTE_REFUSED = "remote refused", "is in the remote tier, and not as it must be", Metric.SHORT_REMOTE
    REMOTE_EXPIRED = "remote expired", "is in the remote tier, and past its time there", Metric.SHORT_REMOTE
    REMOTE_PROFILE = (
        "remote profile",
        "is in the remote tier, and the profile that it was coded with is not",
        Metric.SHORT_REMOTE,
    )
    REMOTE_GONE = "remote gone", "was in the remote tier a moment ago", Metric.SHORT_NEVER_PUT
    NO_WINDOW = (
        "no window",
        "is stored, but layers with windows cannot go on from its end; see StoreConfig.state_every",
        Metric.SHORT_NO_WINDOW,
    )
    NO_STATE = (
        "no state",
        "is stored, but without the states at its end; see StoreConfig.state_every",
        Metric.SHORT_NO_STATE,
    )
    NOT_WORTH = (
        "not worth loading",
        "is stored, but loading it is expected to take longer than computing it",
        Metric.SHORT_NOT_WORTH,
    )
    OTHER_NAMESPACE = "other namespace", "is stored in another namespace only", Metric.SHORT_NEVER_PUT
    TOKENS_DIFFER = (
        "tokens differ",
        "is not stored: a stored sequence goes on with other tokens",
        Metric.SHORT_NEVER_PUT,
    )


@dataclass(frozen=True)
class BlockExplanation:
    """What became of positions [start, end) of the sequence, which lie in one block.

    Attributes:
        start, end: positions in the sequence.
        reason: `Reason.STORED` where a get can read the block; else why it cannot.
        record: number of the record that holds the tokens, None where none does.
        tiers: where the record is: "device", "queue", "host", "disk"; the nearest first.
        codec: name of the codec of the nearest coded copy, None where only tensors are held.
        donors: numbers of the records that this one is coded against.
        bytes: what the nearest copy takes.
        expires: end of its life in unix seconds, 0 for never.
        pinned: whether it is kept from eviction.
        detail: what else there is to say, in words; may be "".

    Example:
        >>> BlockExplanation(0, 64, Reason.STORED, record=1, tiers=("disk",), codec="raw", bytes=8192).tokens
        64
    """

    start: int
    end: int
    reason: Reason
    record: int | None = None
    tiers: tuple[str, ...] = ()
    codec: str | None = None
    donors: tuple[int, ...] = ()
    bytes: int = 0
    expires: float = 0.0
    pinned: bool = False
    detail: str = ""

    @property
    def tokens(self) -> int:
        """How many tokens it covers."""
        return self.end - self.start


@dataclass(frozen=True)
class Explanation:
    """Why a get of a sequence returns what it returns; `print` shows it as a table.

    Attributes:
        asked: length of the sequence.
        tokens: leading tokens that a get returns now, as far as that is known without reading payloads.
        blocks: what became of each block, in order. A block of which a part is stored gives two.
        why: why the get ends there, in one sentence.
        reason: the same as a `Reason`; STORED where everything is.

    Example:
        >>> stored = BlockExplanation(0, 64, Reason.STORED, record=1, tiers=("disk",), codec="raw", bytes=8192)
        >>> print(Explanation.of(100, [stored, BlockExplanation(64, 100, Reason.EVICTED)]))
        A get returns 64 of 100 tokens: what follows them was evicted to make room.
        tokens  blocks  reason   tiers  codec  bytes  more
        0-63    1       stored   disk   raw    8192
        64-99   1       evicted
    """

    asked: int
    tokens: int
    blocks: tuple[BlockExplanation, ...]
    why: str
    reason: Reason

    @classmethod
    def of(cls, asked: int, blocks: list[BlockExplanation]) -> Explanation:
        """The explanation of `asked` tokens whose blocks are these, in order and without a gap."""
        first = next((block for block in blocks if block.reason is not Reason.STORED), None)
        if first is None:
            return cls(asked, asked, tuple(blocks), f"A get returns all {asked} tokens.", Reason.STORED)
        why = why_short(first.start, asked, first.detail or first.reason.words)
        return cls(asked, first.start, tuple(blocks), why, first.reason)

    def __str__(self) -> str:
        rows = [("tokens", "blocks", "reason", "tiers", "codec", "bytes", "more"), *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.why, *lines])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """One for each run of blocks that have everything but record and size in common."""
        for shared, group in groupby(self.blocks, lambda b: (b.reason, b.tiers, b.codec, b.detail, _remarks(b))):
            run = list(group)
            reason, tiers, codec, _, remarks = shared
            nbytes = sum(block.bytes for block in run)
            span = f"{run[0].start}-{run[-1].end - 1}"
            yield span, str(len(run)), reason.value, ", ".join(tiers), codec or "", str(nbytes or ""), remarks


def why_short(tokens: int, asked: int, reason: str) -> str:
    """Return the sentence that says why a get returns only `tokens` of the tokens it was asked for.

    Example:
        >>> why_short(64, 100, Reason.EVICTED.words)
        'A get returns 64 of 100 tokens: what follows them was evicted to make room.'
    """
    subject = "what follows them" if tokens else "its first block"
    return f"A get returns {tokens or 'none'} of {asked} tokens: {subject} {reason}."


def _remarks(block: BlockExplanation) -> str:
    found = [f"coded against {', '.join(map(str, block.donors))}"] if block.donors else []
    found += [f"expires in {max(0, round(block.expires - time.time()))} s"] if block.expires else []
    found += ["pinned"] if block.pinned else []
    return "; ".join(found)
