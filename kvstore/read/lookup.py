"""From tokens to the stored blocks of their longest prefix, and where each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_key, chain_keys, chain_root
from kvstore.core.tokens import Tokens
from kvstore.read.block_read import BlockRead
from kvstore.residency.departures import BlockName
from kvstore.residency.follow import Follower
from kvstore.residency.residency import Residency


@dataclass(frozen=True)
class Lookup:
    """Finds the stored prefix of a sequence. Thread-safe.

    Attributes:
        digest: stands for the identity with which the store was made.
        follower: before each look, it takes in what a writer process did; None in the writer itself.
    """

    residency: Residency
    digest: bytes
    block_tokens: int
    follower: Follower | None
    _roots: dict[bytes, bytes] = field(default_factory=dict)

    def root(self, namespace: bytes) -> bytes:
        """Return the key before the first block of a namespace, which is given by its digest."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = chain_root(self.digest, namespace, self.block_tokens)
        return root

    def depth(self, namespace: bytes, tokens: Tokens) -> int:
        """Return how many leading tokens are stored, by the index alone; counts as no use."""
        self.refresh()
        match = self.residency.index.match(namespace, tokens, touch=False)
        usable = match.usable(self.block_tokens) if len(match.records) else 0
        for i, record in enumerate(match.records[: -(-usable // self.block_tokens)].tolist()):
            if self.residency.is_expired(record):
                return i * self.block_tokens
        return usable

    def reads(self, namespace: bytes, tokens: Tokens) -> list[BlockRead]:
        """Return the blocks of the stored prefix with their sources, up to the first that is nowhere.

        Counts as a use. The sources must be released: `Fetcher.fetch` does so, `Residency.release` if they are not
        fetched.
        """
        self.refresh()
        residency, size = self.residency, self.block_tokens
        match = residency.index.match(namespace, tokens, touch=True)
        usable = match.usable(size) if len(match.records) else 0
        records: list[int] = match.records[: -(-usable // size)].tolist()
        if not records:
            return []
        residency.touch(records)
        residency.use_donors_of(records)
        sources = residency.find(records)
        parents = [self.root(namespace), *chain_keys(self.root(namespace), tokens[: len(records) * size], size)]
        reads = []
        for i, (record, source) in enumerate(zip(records, sources, strict=True)):
            start = i * size
            here = tokens[start : min(start + size, usable)]
            if source is None or residency.is_expired(record):
                residency.release(sources[i:])
                name = BlockName.of(parents[i + 1], parents[i], namespace, start, here)
                residency.own.run(self._note_gone, record, name)
                break
            reads.append(BlockRead(record, start, here, parents[i], source))
        return reads

    def why_short(self, namespace: bytes, tokens: Tokens, reads: Sequence[BlockRead], good: int) -> Reason:
        """Why less than `tokens` comes back, of which the first `good` of `reads` could be read."""
        residency, size = self.residency, self.block_tokens
        if good < len(reads):
            bad = reads[good]
            if bad.record in residency.index:
                return Reason.UNREADABLE  # what is damaged is removed; what only needs something else stays
            why = residency.departures.why(bad.parent_key, namespace, bad.start, bad.tokens)
            return why or Reason.EVICTED  # it was there a moment ago
        if not len(residency.departures):
            return Reason.NEVER_PUT
        parent, end = self.root(namespace), 0
        if reads:
            last = reads[-1]
            parent, end = last.parent_key, last.end
            if end % size == 0:
                parent = chain_key(parent, last.tokens)
        start = end // size * size
        why = residency.departures.why(parent, namespace, start, tokens[start : start + size], end - start)
        return why or Reason.NEVER_PUT

    def _note_gone(self, record: int, name: BlockName) -> None:
        """A record that the index knows cannot be had: its time is over, or it is nowhere."""
        residency = self.residency
        if residency.is_expired(record):
            residency.departures.add(name, Reason.EXPIRED)
            residency.drop_if_nowhere(record, Reason.EXPIRED)
        elif record in residency.index:  # else whoever removed it says why
            # A writer process removed it, or else nobody did.
            reason = Reason.EVICTED if self.follower is not None else Reason.DAMAGED
            if residency.drop_if_nowhere(record, reason):
                residency.departures.add(name, reason)

    def in_memory(self, records: Sequence[int]) -> list[bool]:
        """Return, for each record, whether it is in memory."""
        residency = self.residency
        return [r in residency.host or r in residency.device or residency.queued(r) is not None for r in records]

    def refresh(self) -> None:
        """Take in what a writer process did since, if there may be one."""
        if self.follower is not None:
            self.follower.follow()
