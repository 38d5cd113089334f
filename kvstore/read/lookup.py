"""From tokens to the stored blocks of their longest prefix, and where each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.identity import ModelIdentity
from kvstore.core.keys import chain_keys, chain_root
from kvstore.core.tokens import Tokens
from kvstore.read.block_read import BlockRead
from kvstore.residency.follow import Follower
from kvstore.residency.residency import Residency


@dataclass(frozen=True)
class Lookup:
    """Finds the stored prefix of a sequence. Thread-safe.

    Attributes:
        follower: before each look, it takes in what a writer process did; None in the writer itself.
    """

    residency: Residency
    identity: ModelIdentity
    block_tokens: int
    follower: Follower | None
    _roots: dict[bytes, bytes] = field(default_factory=dict)

    def root(self, namespace: bytes) -> bytes:
        """Return the key before the first block of a namespace, which is given by its digest."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = chain_root(self.identity.digest, namespace, self.block_tokens)
        return root

    def depth(self, namespace: bytes, tokens: Tokens) -> int:
        """Return how many leading tokens are stored, by the index alone; counts as no use."""
        self._refresh()
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
        self._refresh()
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
            if source is None or residency.is_expired(record):
                residency.release(sources[i:])
                residency.drop_if_nowhere(record)
                break
            start = i * size
            reads.append(BlockRead(record, start, tokens[start : min(start + size, usable)], parents[i], source))
        return reads

    def in_memory(self, records: Sequence[int]) -> list[bool]:
        """Return, for each record, whether it is in memory."""
        residency = self.residency
        return [r in residency.host or r in residency.device or residency.is_pending(r) for r in records]

    def _refresh(self) -> None:
        if self.follower is not None:
            self.follower.follow()
