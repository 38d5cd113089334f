"""`ReferenceTrie`: the trie in obvious Python, one node per token. The oracle that tests compare
`_trie.Trie` with.

It has the same methods, arguments and results. Where the C++ keeps compressed edges, this marks the tokens
that end one (`edge_end`): recency and traffic belong to whole edges, and bits are linear inside the edge
that an insert made. tree.py is the tree; here are the probabilities, token by token, and
restoring.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from kvstore.trie.prior import UNIFORM_BITS_PER_TOKEN, mixture_bits
from kvstore.trie.reference.tree import MOST_COUNT, Node, ReferenceTree

__all__ = ["ReferenceTrie"]

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Row:
    """A record to restore: see `TrieIndex.restore`."""

    root: int
    record: int
    start: int
    block: list[int]
    tag: int
    parent_tag: int
    bits: float
    pinned: bool
    traffic: int
    hole: bool

    @property
    def end(self) -> int:
        return self.start + len(self.block)


class ReferenceTrie(ReferenceTree):
    """See `kvstore.trie._trie.Trie`. Not thread-safe, not fast."""

    # ---- probabilities ----

    def best_match(self, root: int, tokens: U32) -> tuple[int, float]:
        node = self._walk(root, tokens)
        return node.depth, self._mixed(node)

    def _mixed(self, node: Node, above: int = 0) -> float:
        """Bits of the tokens at depths (above, node.depth] of this path."""
        path = [x for x in node.up() if x.depth > above and x.parent is not None]
        steps = [(x.count, x.parent.count, x.bits - x.parent.bits) for x in path if x.parent is not None]
        return sum(mixture_bits(*step, self.concentration) for step in steps)

    def _bits(self, root: int, tokens: U32, above: int) -> float:
        """Bits of tokens[above:], where what is not stored has uniform bits and no traffic."""
        at = self._walk(root, tokens)
        totals = [at.count if i == at.depth else 0 for i in range(max(above, at.depth), len(tokens))]
        unseen = sum(mixture_bits(0, total, UNIFORM_BITS_PER_TOKEN, self.concentration) for total in totals)
        return self._mixed(at, above) + unseen

    @staticmethod
    def _shared(p: U32, q: U32) -> int:
        n = min(len(p), len(q))
        return next((i for i in range(n) if p[i] != q[i]), n)

    def bits(self, root: int, tokens: U32) -> float:
        return self._bits(root, tokens, 0)

    def shared_bits(self, root: int, p: U32, q: U32) -> float:
        return self._bits(root, p[: self._shared(p, q)], 0)

    def distance(self, root: int, p: U32, q: U32) -> float:
        shared = self._shared(p, q)
        return self._bits(root, p, shared) + self._bits(root, q, shared)

    def prune(self, root: int, max_bits: float) -> U64:
        if max_bits != max_bits:
            raise ValueError("max_bits: must not be NaN")
        nodes = [x for x in self._root(root).below() if x.record and not x.pinned() and self._mixed(x) > max_bits]
        gone = []
        for node in sorted(nodes, key=lambda x: (-x.depth, x.record)):
            gone.append(self._set(node, 0))
            self._trim(self._edge_end(node))
        return np.array(gone, np.uint64)

    def leaf(self, record_id: int) -> tuple[float, U64] | None:
        node = self._records.get(record_id)
        if node is None or not self._is_last(node):
            return None
        above = [x.record for x in node.up() if x.record and x is not node]
        return self._mixed(node), np.array(above, np.uint64)

    def near(self, record_id: int, radius_bits: float, visits: int) -> tuple[U64, F64] | None:
        """All of them, whatever `visits` says."""
        node = self._records.get(record_id)
        if node is None or not self._is_last(node):
            return None
        root, path = self.path(record_id)
        found = {}
        for other, end in self._records.items():
            at_root, tokens = self.path(other)
            if other != record_id and at_root == root and self._is_last(end):
                found[other] = self.distance(root, path, tokens)
        kept = [other for other, distance in found.items() if distance <= radius_bits]
        return np.array(kept, np.uint64), np.array([found[other] for other in kept], np.float64)

    def counts(self) -> tuple[U64, U32]:
        ids = sorted(self._records)
        return np.array(ids, np.uint64), np.array([self._records[i].count for i in ids], np.uint32)

    def holes(self) -> tuple[U64, U32]:
        ids = sorted(self._holes)
        return np.array(ids, np.uint64), np.array([self._holes[i].count for i in ids], np.uint32)

    # ---- restore ----

    def restore(
        self,
        roots: U32,
        ids: U64,
        starts: U32,
        counts: U32,
        tags: U64,
        parent_tags: U64,
        bits: npt.NDArray[np.float32],
        tokens: U32,
        pinned: U8,
        traffic: U32 | None = None,
        holes: U8 | None = None,
        keep_tails: bool = False,
    ) -> U64:
        if any(root.children for root in self._roots):
            raise ValueError("restore: the trie is not empty; restore into a new one")
        offsets = list(accumulate(counts.tolist(), initial=0))
        if offsets[-1] != len(tokens):
            raise ValueError(f"tokens: expected {offsets[-1]}, the sum of counts, found {len(tokens)}")
        passed = [0] * len(ids) if traffic is None else traffic.tolist()
        is_hole = [False] * len(ids) if holes is None else holes.astype(bool).tolist()
        kept = [bool(pin) and not hole for pin, hole in zip(pinned.tolist(), is_hole, strict=True)]
        blocks = [tokens[begin:end].tolist() for begin, end in pairwise(offsets)]
        columns = (roots, ids, starts, blocks, tags, parent_tags, bits, kept, passed, is_hole)
        listed = [column if isinstance(column, list) else column.tolist() for column in columns]
        rows = [_Row(*row) for row in zip(*listed, strict=True)]
        linked = self._linked(sorted(rows, key=lambda row: (row.start, not row.hole, row.record)))
        known = self._place(linked, keep_tails)
        self._straighten()
        for rid, node in list(self._records.items()):
            node.pins, node.count = int(known[rid].pinned), known[rid].traffic
            if known[rid].hole:
                self._set(node, 0)
                node.hole = rid
                self._holes[rid] = node
        for rid in sorted(self._records):
            for node in self._records[rid].up():
                node.stamp = max(node.stamp, rid)
        self._settle_stamps()
        self._settle_counts()
        self._clock = max([0, *self._records])
        return np.array(sorted({row.record for row in rows} - self._records.keys() - self._holes.keys()), np.uint64)

    def _linked(self, rows: list[_Row]) -> list[tuple[_Row, _Row | None]]:
        """The rows that can be, each with the row that it continues; without the holes that nothing is behind."""
        by_tag: dict[int, _Row] = {}
        above: dict[int, _Row | None] = {}
        linked: list[_Row] = []
        for row in rows:
            if row.record in above or not self._is_possible(row):
                continue
            parent = by_tag.get(row.parent_tag) if row.parent_tag else None
            if row.start and (parent is None or (parent.root, parent.end) != (row.root, row.start)):
                continue
            same = by_tag.get(row.tag) if row.tag else None
            if same is not None and (
                (same.root, same.block) != (row.root, row.block) or above[same.record] is not parent
            ):
                continue
            above[row.record] = parent
            linked.append(row)
            if row.tag:
                by_tag.setdefault(row.tag, row)
        kept: list[tuple[_Row, _Row | None]] = []
        behind: set[int] = set()
        for row in reversed(linked):
            parent = above[row.record]
            if not row.hole or row.record in behind:
                kept.append((row, parent))
                behind.update([parent.record] if parent is not None else [])
        return kept[::-1]

    def _place(self, linked: list[tuple[_Row, _Row | None]], keep_tails: bool) -> dict[int, _Row]:
        """Inserts the rows; returns them by record number."""
        known: dict[int, _Row] = {}
        ends: dict[int, Node] = {}
        followers: dict[Node, list[_Row]] = {}  # rows that start here
        for row, above in linked:
            parent = ends[above.record] if above is not None else self._roots[row.root]
            known[row.record] = row
            node = parent
            while len(row.block) > node.depth - row.start and row.block[node.depth - row.start] in node.children:
                node = node.children[row.block[node.depth - row.start]]
            fresh = row.block[node.depth - row.start :]
            node = self._grow(node, fresh, row.bits * len(fresh) / len(row.block))
            if len(row.block) % self.block_tokens:
                node.edge_end = True
            if not keep_tails:
                self._supersede_in_restore(node, known)
            self._set(node, row.record)
            ends[row.record] = node
            followers.setdefault(parent, []).append(row)
        for node, after in followers.items():  # an only child continues its parent's edge
            if len(after) > 1 or node.parent is None or known[node.record].pinned:
                continue
            if after[0].traffic == known[node.record].traffic:
                node.edge_end = False
        return known

    def _is_possible(self, row: _Row) -> bool:
        whole = len(row.block) == self.block_tokens
        return (
            0 < row.record < 1 << 63
            and 1 <= len(row.block) <= self.block_tokens
            and row.start % self.block_tokens == 0
            and row.end <= 0x7FFFFFFF
            and 0 <= row.bits <= 1e30
            and row.root < len(self._roots)
            and (whole or not row.hole)
            and bool(row.start or not row.parent_tag)
        )

    def _supersede_in_restore(self, node: Node, known: dict[int, _Row]) -> None:
        block = (node.depth - 1) // self.block_tokens * self.block_tokens
        for x in node.up():
            if block < x.depth < node.depth and x.record and not known[x.record].pinned:
                self._set(x, 0)

    def _edges(self) -> list[list[Node]]:
        ends = [x for root in self._roots for x in root.below() if x.edge_end]
        return [self._edge(end) for end in ends]

    def _straighten(self) -> None:
        """Makes the bits linear inside every edge."""
        for edge in self._edges():
            below = edge[-1].parent.bits if edge[-1].parent is not None else 0.0
            step = (edge[0].bits - below) / len(edge)
            for i, node in enumerate(reversed(edge[1:])):
                node.bits = below + step * (i + 1)

    def _settle_stamps(self) -> None:
        """Gives an edge one stamp, that of the newest record at or below any part of it."""
        for edge in self._edges():
            stamp = max(node.stamp for node in edge)
            for node in edge:
                node.stamp = stamp

    def _settle_counts(self) -> None:
        """Gives an edge the highest count of its records, but no less than its children have together."""
        for edge in sorted(self._edges(), key=lambda edge: -edge[0].depth):
            below = sum(child.count for child in edge[0].children.values())
            count = max(below, *(node.count for node in edge))
            for node in edge:
                node.count = min(count, MOST_COUNT)
        for root in self._roots:
            root.count = min(sum(child.count for child in root.children.values()), MOST_COUNT)
