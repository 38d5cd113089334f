"""`ReferenceTree`: what the oracle stores, and how that changes. See `reference.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.trie.prior import CONCENTRATION

__all__ = ["MOST_COUNT", "Node", "ReferenceTree"]

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

MOST_COUNT = (1 << 32) - 1


class Node:
    """One token. `record`: id of the record that ends here, or 0. `hole`: id of one that left while the path goes on.
    `pins`: pins at exactly this depth. `count`: the traffic that entered its edge."""

    __slots__ = ("bits", "children", "count", "depth", "edge_end", "hole", "parent", "pins", "record", "stamp", "token")

    def __init__(self, parent: Node | None, token: int, bits: float) -> None:
        self.parent = parent
        self.token = token
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, Node] = {}
        self.bits = bits
        self.count = 0
        self.record = 0
        self.hole = 0
        self.edge_end = False
        self.stamp = 0
        self.pins = 0

    def up(self) -> Iterator[Node]:
        """This node and its ancestors, without the root."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[Node]:
        """This node and everything below, newest child first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def pinned(self) -> bool:
        return any(node.pins for node in self.below())


class ReferenceTree:
    """Insert, look up, touch, pin, evict, remove, erase. Not thread-safe, not fast."""

    def __init__(self, block_tokens: int, concentration: float = CONCENTRATION) -> None:
        if not 1 <= block_tokens <= 65536:
            raise ValueError("block_tokens: not in 1..65536")
        if not 1e-6 <= concentration <= 1e6:
            raise ValueError("concentration: not in 1e-6..1e6")
        self.block_tokens = block_tokens
        self.concentration = concentration
        self._roots: list[Node] = []
        self._records: dict[int, Node] = {}
        self._holes: dict[int, Node] = {}
        self._released: list[int] = []
        self._clock = 0

    def new_root(self) -> int:
        self._roots.append(Node(None, 0, 0.0))
        return len(self._roots) - 1

    def _root(self, root: int) -> Node:
        if not 0 <= root < len(self._roots):
            raise ValueError(f"root: {root} does not exist")
        return self._roots[root]

    def _walk(self, root: int, tokens: U32) -> Node:
        node = self._root(root)
        for token in tokens.tolist():
            child = node.children.get(token)
            if child is None:
                break
            node = child
        return node

    # ---- reading ----

    def longest_prefix(self, root: int, tokens: U32) -> int:
        return self._walk(root, tokens).depth

    def match(self, root: int, tokens: U32, touch: bool) -> tuple[int, float, U64, U32]:
        at = self._walk(root, tokens)
        blocks = -(-at.depth // self.block_tokens)
        records, ends = [0] * blocks, [0] * blocks
        for node in at.up():
            i = (node.depth - 1) // self.block_tokens
            if node.record and not records[i]:
                records[i], ends[i] = node.record, node.depth
        used = at
        if at.depth % self.block_tokens and ends[-1] != at.depth:
            for node in at.below():
                if (node.depth - 1) // self.block_tokens == blocks - 1 and node.record:
                    records[-1], ends[-1], used = node.record, node.depth, node
                    break
        if touch:
            self._touch(used, at)
        return at.depth, at.bits, np.array(records, np.uint64), np.array(ends, np.uint32)

    def contains(self, record_id: int) -> bool:
        return record_id in self._records

    def path(self, record_id: int) -> tuple[int, U32]:
        if record_id not in self._records:
            raise KeyError(f"record_id: {record_id} is not stored")
        nodes = list(self._records[record_id].up())
        top = nodes[-1].parent
        root = next(i for i, node in enumerate(self._roots) if node is top)
        return root, np.array([node.token for node in reversed(nodes)], np.uint32)

    def stats(self) -> dict[str, int]:
        nodes = [node for root in self._roots for node in root.below() if node.parent is not None]
        edges = sum(node.edge_end for node in nodes)
        return {"nodes": edges, "tokens": len(nodes), "records": len(self._records), "holes": len(self._holes)}

    # ---- recency ----

    @staticmethod
    def _edge_end(node: Node) -> Node:
        while node.parent is not None and not node.edge_end:
            (node,) = node.children.values()
        return node

    @staticmethod
    def _edge(end: Node) -> list[Node]:
        """The nodes of the edge that ends here, upwards."""
        edge = [end]
        while (above := edge[-1].parent) is not None and above.parent is not None and not above.edge_end:
            edge.append(above)
        return edge

    def _touch(self, node: Node, counted: Node | None) -> None:
        """Makes the path to `node` the most recent, and counts traffic on the path to `counted`."""
        self._clock += 1
        for each in self._edge_end(node).up():
            each.stamp = self._clock
        if counted is not None and counted.parent is not None:
            for each in self._edge_end(counted).up():
                each.count = min(each.count + 1, MOST_COUNT)
                if each.depth == 1 and each.parent is not None:
                    each.parent.count = min(each.parent.count + 1, MOST_COUNT)

    def touch(self, root: int, tokens: U32) -> int:
        node = self._walk(root, tokens)
        self._touch(node, node)
        return node.depth

    def pin(self, root: int, tokens: U32, delta: int) -> None:
        if delta not in (1, -1):
            raise ValueError("delta: not +1 or -1")
        node = self._walk(root, tokens)
        if len(tokens) == 0 or node.depth < len(tokens):
            raise ValueError("tokens: this path is not stored")
        if delta < 0 and not node.pins:
            raise ValueError("tokens: this path is not pinned")
        node.pins += delta
        node.edge_end = True
        if delta < 0:
            self._touch(node, None)

    # ---- changing ----

    def _set(self, node: Node, rid: int) -> int:
        """Returns the id that this replaces, of a record or of a hole that it fills, or 0."""
        old = node.record
        if old:
            del self._records[old]
        node.record = rid
        if rid:
            self._records[rid] = node
            if node.hole:
                old = node.hole
                del self._holes[old]
                node.hole = 0
        return old

    def _release(self, node: Node) -> None:
        if node.hole:
            del self._holes[node.hole]
            self._released.append(node.hole)
            node.hole = 0

    def is_hole(self, record_id: int) -> bool:
        return record_id in self._holes

    def take_released(self) -> U64:
        released, self._released = self._released, []
        return np.array(sorted(released), np.uint64)

    def _is_last(self, node: Node) -> bool:
        """Whether a record is the last one of a path that nothing continues."""
        end = self._edge_end(node)
        return not end.children and next(x for x in self._edge(end) if x.record) is node

    def _grow(self, node: Node, tokens: list[int], bits: float) -> Node:
        """Adds one edge below `node` with `bits` in all."""
        if not tokens:
            return node
        if node.parent is not None:
            node.edge_end = True
        start = node.bits
        for i, token in enumerate(tokens):
            node.children[token] = node = Node(node, token, start + bits * (i + 1) / len(tokens))
            node.stamp = self._clock
        node.edge_end = True
        return node

    def _supersede_tails(self, node: Node) -> list[int]:
        """Takes the unpinned tails strictly inside the block that a record ending at `node` covers."""
        block = (node.depth - 1) // self.block_tokens * self.block_tokens
        inside = [x for x in node.up() if block < x.depth < node.depth and x.record and not x.pins]
        return [self._set(x, 0) for x in inside]

    def tails(self, root: int, tokens: U32) -> list[tuple[int, int]]:
        return [(x.record, x.depth) for x in self._walk(root, tokens).up() if x.record and x.depth % self.block_tokens]

    def covers(self, root: int, tokens: U32) -> list[tuple[int, int]]:
        at, size = self._walk(root, tokens), self.block_tokens
        if at.depth % size == 0:
            return []
        below = (x for x in at.below() if (x.depth - 1) // size == at.depth // size)
        return [(x.record, x.depth) for x in below if x.record]

    def insert(self, root: int, tokens: U32, bits: Any, ends: U32, ids: U64, keep_tails: bool = False) -> U64:
        n, at_ends, new_ids = len(tokens), ends.tolist(), ids.tolist()
        if n == 0:
            raise ValueError("tokens: expected at least one")
        if len(at_ends) != len(new_ids):
            raise ValueError("ids: expected as many as ends")
        for i, end in enumerate(at_ends):
            late = i > 0 and end <= at_ends[i - 1]
            if not 0 < end <= n or late or (end % self.block_tokens and end != n):
                raise ValueError("ends: expected rising multiples of the block, or the last token")
        if any(not 0 < rid < 1 << 63 for rid in new_ids) or len(set(new_ids)) < len(new_ids):
            raise ValueError("ids: not in 1..2^63 - 1, or twice")
        if any(rid in self._records or rid in self._holes for rid in new_ids):
            raise ValueError("ids: in use already")
        each = np.full(n, bits, np.float32) if np.isscalar(bits) else np.asarray(bits)
        if len(each) != n or not (np.isfinite(each) & (each >= 0)).all():
            raise ValueError("bits: numbers must be finite and not negative")
        at = self._walk(root, tokens)
        leaf = self._grow(at, tokens[at.depth :].tolist(), float(each[at.depth :].sum(dtype=np.float64)))
        if at_ends and at_ends[-1] == n and n % self.block_tokens:
            leaf.edge_end = True
        nodes = {node.depth: node for node in leaf.up()}
        gone = []
        for end, rid in zip(at_ends, new_ids, strict=True):
            gone += [] if keep_tails else self._supersede_tails(nodes[end])
            gone.append(self._set(nodes[end], rid))
        self._touch(leaf, leaf)
        return np.array(sorted(rid for rid in gone if rid), np.uint64)

    def _trim(self, node: Node) -> None:
        """Drops unpinned leaves without a record; what is left ends its edge there."""
        while node.parent is not None and not node.children and not node.pins and not node.record:
            self._release(node)
            del node.parent.children[node.token]
            node = node.parent
        node.edge_end = node.parent is not None

    def evict(self, below: int = (1 << 64) - 1) -> int | None:
        while True:
            nodes = [x for root in self._roots for x in root.below() if x.parent is not None]
            leaves = [x for x in nodes if not x.children and not x.pins]
            last = {x: next((y for y in self._edge(x) if y.record), x) for x in leaves}
            leaves = [x for x in leaves if last[x].record < below]
            if not leaves:
                return None
            leaf = min(leaves, key=lambda x: (x.stamp, -x.depth))
            rid = self._set(last[leaf], 0)
            self._trim(leaf)
            if rid:
                return rid

    def remove(self, record_id: int) -> bool:
        if record_id not in self._records:
            return False
        node = self._records[record_id]
        leaves_hole = node.depth % self.block_tokens == 0 and not self._is_last(node)
        self._set(node, 0)
        if leaves_hole:
            node.hole = record_id
            self._holes[record_id] = node
        self._trim(self._edge_end(node))
        return True

    def erase(self, root: int, tokens: U32) -> U64:
        at = self._walk(root, tokens)
        if len(tokens) == 0 or at.depth < len(tokens):
            return np.zeros(0, np.uint64)
        cut = (len(tokens) - 1) // self.block_tokens * self.block_tokens
        pinned_before = [x for x in at.up() if x.pinned()]
        for x in at.below():
            self._release(x)
        gone = [self._set(x, 0) for x in at.below()]
        for x in at.up():
            if x.depth > cut and not x.pins:
                gone.append(self._set(x, 0))
        at.children.clear()
        at.pins = 0
        node = at
        while node.parent is not None and not node.children and not node.pins:
            gone.append(self._set(node, 0))
            self._release(node)
            del node.parent.children[node.token]
            node = node.parent
        freed = [x for x in node.up() if x in pinned_before and not x.pinned()]
        if freed:
            self._clock += 1
            for x in freed:
                x.stamp = self._clock
        return np.array(sorted(rid for rid in gone if rid), np.uint64)
