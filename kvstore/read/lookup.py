"""From tokens to the stored blocks of their longest prefix, and where each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_key, chain_keys, chain_root
from kvstore.core.layout import KVLayout
from kvstore.core.tokens import Tokens
from kvstore.core.windows import lacks_more, usable_end
from kvstore.metrics import Metric
from kvstore.read.block_read import BlockRead
from kvstore.residency.departures import BlockName
from kvstore.residency.follow import Follower
from kvstore.residency.residency import Residency
from kvstore.trie import Match


@dataclass(frozen=True)
class Lookup:
    """Finds the stored prefix of a sequence. Thread-safe.

    Attributes:
        digest: stands for the identity with which the store was made.
        follower: before each look, it takes in what a writer process did; None in the writer itself.
        layout: of the caches; where it has windows, not every stored prefix can be used.
    """

    residency: Residency
    digest: bytes
    block_tokens: int
    follower: Follower | None
    layout: KVLayout
    _roots: dict[bytes, bytes] = field(default_factory=dict)

    def root(self, namespace: bytes) -> bytes:
        """Return the key before the first block of a namespace, which is given by its digest."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = chain_root(self.digest, namespace, self.block_tokens)
        return root

    def depth(self, namespace: bytes, tokens: Tokens) -> int:
        """Return how many leading tokens can be had, by the index alone; counts as no use."""
        self.refresh()
        size, records, end = self.block_tokens, list[int](), len(tokens)
        while True:  # once, but where layers with windows need what has expired
            records, end = self.place(namespace, tokens[:end], touch=False)
            over = next((i for i, record in enumerate(records) if self.residency.is_expired(record)), None)
            if over is None:
                return end
            end = over * size
            if not self.layout.is_grouped:
                return end

    def place(self, namespace: bytes, tokens: Tokens, touch: bool) -> tuple[list[int], int]:
        """Return the records of the longest prefix that can be used, and how many tokens it has."""
        index, size = self.residency.index, self.block_tokens
        match = index.match(namespace, tokens, touch=touch)
        end = match.usable(size) if len(match.records) else 0
        records: list[int] = match.records[: -(-end // size)].tolist()
        if self.layout.is_grouped and records:
            return self._with_windows(namespace, tokens, records, match.ends[: len(records)].tolist(), end)
        return records, end

    def _with_windows(
        self, namespace: bytes, tokens: Tokens, records: list[int], ends: list[int], stored: int
    ) -> tuple[list[int], int]:
        """What `place` returns, if layers with windows may lack some of the `stored` tokens. A tail inside of the
        longer record of its block may be the one that has them."""
        size, coverage = self.block_tokens, self.residency.coverage
        cuts = [coverage.cut(record) for record in records]
        tails = [(end, record) for record, end in self.residency.index.tails(namespace, tokens[:stored])]
        best, places, record = 0, tails, 0
        if self.layout.states:  # only the ends that have them
            both = zip(ends, records, strict=True)
            whole = [(end, record) for end, record in both if end <= stored and not end % size]
            places = sorted((place for place in {*tails, *whole} if coverage.has_states(place[1])), reverse=True)
        else:
            best = usable_end(self.layout, size, cuts, ends, stored)
            if best < stored:
                best, record = self._with_another_cover(namespace, tokens[:stored], ends, cuts, best)
        for end, tail in places:
            i = (end - 1) // size
            if end <= best:
                break
            if usable_end(self.layout, size, [*cuts[:i], coverage.cut(tail)], [*ends[:i], end], end) == end:
                best, record = end, tail
                break
        used = records[: -(-best // size)]
        return ([*used[:-1], record] if record else used), best

    def _with_another_cover(
        self, namespace: bytes, tokens: Tokens, ends: list[int], cuts: list[int], best: int
    ) -> tuple[int, int]:
        """How many of `tokens` can be used if another record may take the place of the last one of those, and which;
        `best` and 0 if none helps. Sequences that part inside of a block have a record each, which begin alike and
        lack different tokens."""
        coverage, covers, size = self.residency.coverage, self.residency.index.covers, self.block_tokens
        for i in range(len(cuts) - 1, best // size - 1, -1):
            start = i * size
            failed = {cuts[i]}  # what fails for a prefix fails for shorter ones that end in the block
            if failed.issuperset(coverage.cut(record) for record, _ in covers(namespace, tokens[: start + 1])):
                continue
            for count in range(min(len(tokens), start + size - 1), max(start, best), -1):
                for record, end in covers(namespace, tokens[:count]):
                    cut = coverage.cut(record)
                    if cut in failed:
                        continue
                    if usable_end(self.layout, size, [*cuts[:i], cut], [*ends[:i], end], count) == count:
                        return count, record
                    failed.add(cut)
        return best, 0

    def use(self, namespace: bytes, tokens: Tokens) -> int:
        """Count the stored prefix as used, and return how many tokens it has."""
        reads = self.reads(namespace, tokens)
        self.residency.release([read.source for read in reads])
        return reads[-1].end if reads else 0

    def reads(self, namespace: bytes, tokens: Tokens) -> list[BlockRead]:
        """Return the blocks of the stored prefix with their sources, up to the first that is nowhere.

        Counts as a use. The sources must be released: `Fetcher.fetch` does so, `Residency.release` if they are not
        fetched.
        """
        self.refresh()
        while True:
            reads, end = self._reads(namespace, tokens)
            got = reads[-1].end if reads else 0
            if got == end or not self.layout.is_grouped:
                return reads
            self.residency.release([read.source for read in reads])
            tokens = tokens[:got]  # what is left may end before the tokens that its windows need
            if not got:
                return []

    def _reads(self, namespace: bytes, tokens: Tokens) -> tuple[list[BlockRead], int]:
        """The blocks up to the first that is nowhere, and how many tokens they would be without that."""
        residency, size = self.residency, self.block_tokens
        records, usable = self.place(namespace, tokens, touch=True)
        if not records:
            return [], 0
        residency.use(records, usable)
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
            key = parents[i + 1] if len(here) == size else None
            reads.append(BlockRead(record, start, here, parents[i], source, key))
        return reads, usable

    def parts(self, namespace: bytes, tokens: Tokens, cuts: Sequence[int]) -> dict[int, BlockRead]:
        """Return blocks of a sequence that are here, by their index, but not its last: those that lack no more tokens
        of windows than records with these cuts do. The sources must be released."""
        size, coverage, residency = self.block_tokens, self.residency.coverage, self.residency
        match = residency.index.match(namespace, tokens, touch=False)
        parents = [self.root(namespace), *chain_keys(self.root(namespace), tokens, size)]
        here: list[tuple[int, int]] = []
        for i, record in enumerate(match.records.tolist()[: len(cuts) - 1]):
            there = record and min(int(match.ends[i]), match.depth) >= (i + 1) * size
            if there and not lacks_more(self.layout, coverage.cut(record), cuts[i], i * size, size):
                here.append((i, record))
        sources = residency.find([record for _, record in here])
        found: dict[int, BlockRead] = {}
        for (i, record), source in zip(here, sources, strict=True):
            if source is None or residency.is_expired(record):
                residency.release([source])
                continue
            found[i] = BlockRead(record, i * size, tokens[i * size : (i + 1) * size], parents[i], source)
        return found

    def stored(self, namespace: bytes, tokens: Tokens) -> int:
        """Return how many leading tokens are stored, whether they can be used or not, by the index alone."""
        match = self.residency.index.match(namespace, tokens, touch=False)
        return match.usable(self.block_tokens) if len(match.records) else 0

    def nbytes(self, namespace: bytes, tokens: Tokens) -> int:
        """Return what the blocks take that hold the longest prefix that can be used."""
        records, _ = self.place(namespace, tokens, touch=False)
        return sum(map(self.residency.size_of, records))

    def limit(self, namespace: bytes, tokens: Tokens, end: int) -> Reason:
        """Return why what is stored behind `end`, the longest prefix that can be used, cannot be: for want of windows,
        or of states."""
        index, size = self.residency.index, self.block_tokens
        match = index.match(namespace, tokens, touch=False)
        if not self.layout.states:
            return Reason.NO_WINDOW
        stored = match.usable(size) if len(match.records) else 0
        records: list[int] = match.records[: -(-stored // size)].tolist()
        cuts = [self.residency.coverage.cut(record) for record in records]
        by_windows = usable_end(self.layout, size, cuts, match.ends[: len(records)].tolist(), stored)
        return Reason.NO_STATE if by_windows > end else Reason.NO_WINDOW

    def why_short(self, namespace: bytes, tokens: Tokens, reads: Sequence[BlockRead], good: int) -> Reason:
        """Why less than `tokens` comes back, of which the first `good` of `reads` could be read."""
        residency, size = self.residency, self.block_tokens
        if good < len(reads):
            bad = reads[good]
            if bad.record in residency.index:
                return Reason.UNREADABLE  # what is damaged is removed; what only needs something else stays
            why = residency.departures.why(bad.parent_key, namespace, bad.start, bad.tokens)
            return why or Reason.EVICTED  # it was there a moment ago
        if self._is_unreachable(namespace, tokens, reads[-1].end if reads else 0):
            return Reason.UNREACHABLE
        if self.layout.is_grouped and self.stored(namespace, tokens) > (reads[-1].end if reads else 0):
            return self.limit(namespace, tokens, reads[-1].end if reads else 0)
        parent, end = self.root(namespace), 0
        if reads:
            last = reads[-1]
            parent, end = last.parent_key, last.end
            if end % size == 0:
                parent = chain_key(parent, last.tokens)
        start = end // size * size
        why = None
        if len(residency.departures):
            why = residency.departures.why(parent, namespace, start, tokens[start : start + size], end - start)
        if why is None and residency.index.stats()["holes"]:
            match = residency.index.match(namespace, tokens, touch=False)
            why = Reason.GONE if self.is_hole(match, start) else None
        return why or Reason.NEVER_PUT

    def is_hole(self, match: Match, start: int) -> bool:
        """Return whether the block at `start` was stored once, whole, and what is behind it still is."""
        index, end = start // self.block_tokens, start + self.block_tokens
        return index < len(match.records) and not match.records[index] and match.depth >= end

    def _is_unreachable(self, namespace: bytes, tokens: Tokens, end: int) -> bool:
        """Whether a record goes on at `end` that only the catalog could have found."""
        residency = self.residency
        if not residency.metrics[Metric.CATALOG_ERRORS]:
            return False
        match, at = residency.index.match(namespace, tokens, touch=False), end // self.block_tokens
        if at >= len(match.records) or not match.records[at] or min(int(match.ends[at]), match.depth) <= end:
            return False
        if not self.layout.is_grouped:
            return True
        sources = residency.find([int(match.records[at])])  # windows may be what is missing
        residency.release(sources)
        return sources == [None]

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
