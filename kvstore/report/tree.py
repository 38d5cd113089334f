"""The prefix tree as few nodes: runs of blocks that are used alike are one; what is small is folded into "other"."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore.residency.block_table import BlockTable
from kvstore.trie.prior import mixture_bits

MOST_NODES = 600
_MOST_CHILDREN = 40  # of one node; the smaller ones are folded
_MOST_DEPTH = 24
_FIRST = 6  # tokens of a node that are kept for its label


@dataclass(frozen=True)
class Node:
    """A run of blocks, with everything that continues it. Immutable.

    Attributes:
        id, parent: numbers of nodes; the parent of a namespace is -1.
        kind: "namespace", "run", or "other" for nodes that were folded together.
        namespace: its place in the table's `namespaces`.
        start: position of its first token.
        tokens: of the run itself; `begins` are the first of them.
        all_tokens, bytes, sequences: of the run and everything behind it.
        uses: how often its last block was put or got; 0 where it is not known.
        probability: that what was used up to its beginning goes on here, by the mixture of traffic and the model's
            probability (`kvstore.trie.prior`); None for namespaces and folded nodes.
        folded: how many nodes of the tree are not shown behind it, or in it.
    """

    id: int
    parent: int
    kind: str
    namespace: int
    start: int
    tokens: int
    begins: tuple[int, ...]
    all_tokens: int
    bytes: int
    sequences: int
    uses: int
    probability: float | None
    folded: int = 0


class PrefixTree:
    """The tree of all blocks of a table.

    Args:
        table: of the store.

    Example:
        >>> from kvstore.residency.block_table import ROW
        >>> rows = np.zeros(3, ROW)
        >>> rows["record"], rows["parent"], rows["start"], rows["count"] = [1, 2, 3], [0, 1, 1], [0, 4, 4], 4
        >>> tree = PrefixTree(BlockTable(rows, np.arange(12, dtype=np.uint32), (bytes(32),)))
        >>> [(node.kind, node.all_tokens, node.sequences) for node in tree.nodes()]
        [('namespace', 12, 2), ('run', 12, 2), ('run', 4, 1), ('run', 4, 1)]
    """

    def __init__(self, table: BlockTable) -> None:
        self._table, rows = table, table.rows
        self._count = rows["count"].astype(np.int64)
        self._parent = np.searchsorted(rows["record"], rows["parent"]) if len(rows) else np.zeros(0, np.int64)
        self._parent = np.where(rows["parent"] > 0, self._parent, -1)
        self._children: dict[int, list[int]] = {}
        for child, parent in enumerate(self._parent.tolist()):
            self._children.setdefault(parent if parent >= 0 else -1 - int(rows["namespace"][child]), []).append(child)
        self._ends = np.cumsum(self._count)
        self.is_last = np.ones(len(rows), bool)
        self.is_last[self._parent[self._parent >= 0]] = False

    @cached_property
    def _sums(self) -> npt.NDArray[np.int64]:
        """By row: tokens, bytes, and sequences of the block and everything behind it, `[rows, 3]`."""
        sums = np.stack([self._count, self._table.rows["bytes"], self.is_last], axis=1).astype(np.int64)
        order = np.argsort(self._table.rows["start"], kind="stable")
        starts = self._table.rows["start"][order]
        for here in np.split(order, np.flatnonzero(np.diff(starts)) + 1)[::-1]:  # what is behind a block comes first
            inner = here[self._parent[here] >= 0]
            np.add.at(sums, self._parent[inner], sums[inner])
        return sums

    @property
    def sequence_tokens(self) -> int:
        """Tokens of all sequences, each counted from its beginning: what they would take without shared prefixes."""
        rows = self._table.rows[self.is_last]
        return int((rows["start"].astype(np.int64) + rows["count"]).sum())

    def nodes(self, most: int = MOST_NODES) -> list[Node]:
        """Return the largest nodes, parents first; at most about `most`."""
        found: list[Node] = []
        heap: list[tuple[int, int, int, list[int]]] = []  # -bytes, number of the node, its depth, rows that follow it
        for namespace in range(len(self._table.namespaces)):
            rows = self._children.get(-1 - namespace, [])
            node = self._node(len(found), -1, "namespace", namespace, [], rows)
            found.append(node)
            heapq.heappush(heap, (-node.bytes, node.id, 0, rows))
        while heap and len(found) < most:
            _, parent, depth, rows = heapq.heappop(heap)
            if depth == _MOST_DEPTH:
                found[parent] = _folded(found[parent], len(rows))
                continue
            rows = sorted(rows, key=lambda row: -int(self._sums[row, 1]))
            total = max(found[parent].uses, sum(int(self._table.rows["uses"][row]) for row in rows))
            room = max(1, min(_MOST_CHILDREN, most - len(found)))
            for row in rows[:room]:
                run, behind = self._run(row)
                node = self._node(len(found), parent, "run", found[parent].namespace, run, behind, total)
                found.append(node)
                if behind:
                    heapq.heappush(heap, (-node.bytes, node.id, depth + 1, behind))
            if rest := rows[room:]:
                other = self._node(len(found), parent, "other", found[parent].namespace, [], rest)
                found.append(_folded(other, len(rest)))
        for _, number, _, rows in heap:
            found[number] = _folded(found[number], len(rows))
        return found

    def _run(self, row: int) -> tuple[list[int], list[int]]:
        """The blocks from a row on that are used alike and that nothing branches off from, and what follows them."""
        run, uses = [row], self._table.rows["uses"]
        while len(behind := self._children.get(run[-1], [])) == 1 and uses[behind[0]] == uses[row]:
            run.append(behind[0])
        return run, behind

    def _node(
        self, number: int, parent: int, kind: str, namespace: int, run: list[int], behind: list[int], total: int = 0
    ) -> Node:
        table, sums = self._table, self._sums
        whole = sums[run[0]] if run else sums[behind].sum(axis=0) if behind else np.zeros(3, np.int64)
        first = table.rows[run[0]] if run else None
        begins: tuple[int, ...] = ()
        if first is not None:
            end = int(self._ends[run[0]])
            begins = tuple(table.tokens[end - int(first["count"]) : end][:_FIRST].tolist())
        uses = table.rows["uses"]
        return Node(
            id=number,
            parent=parent,
            kind=kind,
            namespace=namespace,
            start=int(first["start"]) if first is not None else int(table.rows["start"][behind[0]]) if behind else 0,
            tokens=int(self._count[run].sum()) if run else 0,
            begins=begins,
            all_tokens=int(whole[0]),
            bytes=int(whole[1]),
            sequences=int(whole[2]),
            uses=int(uses[run[-1]]) if run else sum(int(uses[row]) for row in behind),
            probability=_probability(first, total) if first is not None else None,
        )


def _probability(first: npt.NDArray[np.void], total: int) -> float:
    count = int(first["uses"])
    return float(2.0 ** -mixture_bits(count, max(total, count), float(first["bits"]) / max(1, int(first["count"]))))


def _folded(node: Node, count: int) -> Node:
    return replace(node, folded=node.folded + count)
