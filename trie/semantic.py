"""Semantic prefix clusters: stored sequences that differ by few bits (sequential KV compression, sections 2.3 and 4).

The members are the *leaf records*: the last records of paths that nothing continues. In order of their
probability (the mixture's; of equals the lower record number first) each leaf that has no centroid within the
radius becomes one itself; every other leaf belongs to the nearest of the more probable centroids within the
radius (of equally near ones, the most probable). So clusters are a function of the stored leaves and of their
probabilities and distances, and of nothing else: not of the order in which they came. Every leaf is in exactly
one cluster, within the radius of its centroid, which is the most probable member; two centroids are farther
apart than the radius, so there are at most as many clusters as balls of half the radius that cover the leaves.

Two things weaken that. Probabilities move with the traffic, which tells nobody: a leaf is taken at what it was
when it was last looked at, until `refresh` looks at all. And the search for neighbours ends after `VISITS`
nodes: where a leaf has more within its reach, some go unseen, and centroids may then be closer together than
the radius, or a member not with its nearest.
"""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass

from kvstore.trie.index import U64, TrieIndex

__all__ = ["Cluster", "Clusters"]

# How many nodes are looked at for the neighbours of one leaf.
VISITS = 1024

# Leaves that one call of a hook looks at again, at some 20 microseconds each, or 0.2 milliseconds where a thousand are
# within the radius; what is left waits for the next call.
STEPS = 16


@dataclass(frozen=True, slots=True)
class Cluster:
    """Stored sequences that differ by few bits, each named by its leaf record. Immutable.

    Attributes:
        centroid: record of the most probable member.
        members: records, the most probable first.
        radius_bits: the largest distance of a member from the centroid; 0 if it is alone.
        shared_bits: the information in the prefix that all members begin with.

    Example:
        >>> Cluster(centroid=2, members=(2, 5), radius_bits=16.0, shared_bits=128.0).members[0]
        2
    """

    centroid: int
    members: tuple[int, ...]
    radius_bits: float
    shared_bits: float


class _Leaf:
    """centroid: record of the leaf's cluster, its own for a centroid, 0 while it has none. above: the records on its
    path, the deepest first."""

    __slots__ = ("above", "bits", "centroid", "distance", "record")

    def __init__(self, record: int, bits: float, above: U64) -> None:
        self.record = record
        self.bits = bits
        self.above = above
        self.centroid = 0
        self.distance = 0.0

    @property
    def rank(self) -> tuple[float, int]:
        """Lower is more probable."""
        return self.bits, self.record


class Clusters:
    """Clusters of the leaf records of an index, kept up to date by `added` and `removed`. Thread-safe.

    Starts empty: `load` takes in what the index holds already. Covers all namespaces, which never share a cluster.
    Takes about 500 bytes a leaf, and 8 for each record on its path.

    Args:
        index: whose leaves are clustered.
        radius_bits: the largest distance of a member from its centroid, above 0, as `TrieIndex.distance` has it.

    Raises:
        ValueError: the radius is not a number above 0.

    Example:
        >>> import numpy as np
        >>> index, end = TrieIndex(block_tokens=4), np.array([4], np.uint32)
        >>> for record, last in enumerate([3, 4, 5], 1):
        ...     tokens = np.array([0, 1, 2, last], np.uint32)
        ...     _ = index.insert(bytes(32), tokens, end, np.array([record], np.uint64))
        >>> clusters = Clusters(index, radius_bits=64.0)
        >>> clusters.load()
        >>> sorted(clusters.clusters()[0].members)
        [1, 2, 3]
    """

    def __init__(self, index: TrieIndex, radius_bits: float) -> None:
        if not 0 < radius_bits < float("inf"):
            raise ValueError(f"radius_bits: expected a finite number above 0, found {radius_bits!r}")
        self.index = index
        self.radius_bits = float(radius_bits)
        self._lock = threading.Lock()
        self._leaves: dict[int, _Leaf] = {}
        self._members: dict[int, set[int]] = {}  # centroid -> its cluster, itself among it
        self._open: list[tuple[float, int]] = []  # heap of the ranks of leaves to look at again, each once
        self._waiting: set[tuple[float, int]] = set()  # the same ranks

    def __len__(self) -> int:
        """Return how many leaves there are."""
        return len(self._leaves)

    def load(self) -> None:
        """Take in every leaf of the index, and look at all anew. O(leaves)."""
        with self._lock:
            for record in self.index.counts()[0].tolist():
                self._enter(record)
            self._refresh()

    def added(self, record: int) -> None:
        """Take in a record; call this after it was inserted into the index.

        A record that is no leaf changes nothing. A leaf displaces those that it continues.
        """
        with self._lock:
            self._enter(record)
            self._settle(STEPS)

    def removed(self, record: int) -> None:
        """Take out a record; call this after it left the index, in any order.

        If it was a leaf, the last record that is left of its path may now be one.
        """
        with self._lock:
            leaf = self._leaves.get(record)
            if leaf is not None:
                self._leave(leaf)
                left = next((above for above in leaf.above.tolist() if above in self.index), None)
                if left is not None:
                    self._enter(left)
            self._settle(STEPS)

    def centroid(self, record: int) -> int | None:
        """Return the centroid of a leaf record's cluster; None if the record is no leaf, or not yet placed."""
        with self._lock:
            leaf = self._leaves.get(record)
            return None if leaf is None else leaf.centroid or None

    def refresh(self) -> None:
        """Look at every leaf anew, with the probabilities of now. O(leaves), each as long as in a hook."""
        with self._lock:
            self._refresh()

    def clusters(self) -> list[Cluster]:
        """Return all clusters, that of the most probable centroid first; finish what the hooks left to do."""
        with self._lock:
            self._settle(None)
            ranked = sorted((self._leaves[centroid] for centroid in self._members), key=lambda leaf: leaf.rank)
            return [self._cluster(leaf) for leaf in ranked]

    def _cluster(self, centroid: _Leaf) -> Cluster:
        leaves = sorted((self._leaves[record] for record in self._members[centroid.record]), key=lambda leaf: leaf.rank)
        # bits(p) + bits(q) - distance(p, q) is twice what p and q share; all share what the centroid shares with the
        # member that shares least with it.
        shared = min((centroid.bits + leaf.bits - leaf.distance) / 2 for leaf in leaves)
        radius = max(leaf.distance for leaf in leaves)
        return Cluster(centroid.record, tuple(leaf.record for leaf in leaves), radius, max(0.0, shared))

    # ---- leaves come and go ----

    def _enter(self, record: int) -> None:
        found = None if record in self._leaves else self.index.leaf(record)
        if found is None:
            return
        leaf = _Leaf(record, *found)
        for above in leaf.above.tolist():
            if above in self._leaves:
                self._leave(self._leaves[above])
        self._leaves[record] = leaf
        self._again(record)

    def _leave(self, leaf: _Leaf) -> None:
        del self._leaves[leaf.record]
        self._detach(leaf)

    def _refresh(self) -> None:
        self._members.clear()
        self._open = []
        for record, leaf in self._leaves.items():
            leaf.centroid, leaf.distance = 0, 0.0
            found = self.index.leaf(record)
            if found is not None:  # else its hook is still to come, and needs what is known of it
                leaf.bits, leaf.above = found
                self._open.append(leaf.rank)
        heapq.heapify(self._open)
        self._waiting = set(self._open)
        self._settle(None)

    # ---- clusters ----

    def _again(self, record: int) -> None:
        rank = self._leaves[record].rank
        if rank not in self._waiting:
            self._waiting.add(rank)
            heapq.heappush(self._open, rank)

    def _detach(self, leaf: _Leaf) -> None:
        """Take a leaf out of its cluster; if it was the centroid, the members are looked at again."""
        if leaf.centroid == leaf.record:
            for record in self._members.pop(leaf.record) - {leaf.record}:
                self._leaves[record].centroid = 0
                self._again(record)
        elif leaf.centroid:
            self._members[leaf.centroid].discard(leaf.record)
        leaf.centroid, leaf.distance = 0, 0.0

    def _settle(self, steps: int | None) -> None:
        """Look at leaves again, the most probable first, so that none is looked at twice for one change."""
        while self._open and (steps is None or steps > 0):
            rank = heapq.heappop(self._open)
            self._waiting.discard(rank)
            leaf = self._leaves.get(rank[1])
            if leaf is not None and leaf.rank == rank:
                self._place(leaf)
                steps = None if steps is None else steps - 1

    def _place(self, leaf: _Leaf) -> None:
        found = self.index.near(leaf.record, self.radius_bits, VISITS)
        if found is None:  # it left the index, or was continued, and the hook is still to come
            return
        reach = dict(zip(found[0].tolist(), found[1].tolist(), strict=True))
        centroids = [self._leaves[record] for record in self._members.keys() & reach.keys()]
        above = [(reach[x.record], x.rank) for x in centroids if x.rank < leaf.rank]
        if above:
            distance, (_, centroid) = min(above)
            self._detach(leaf)
            leaf.centroid, leaf.distance = centroid, distance
            self._members[centroid].add(leaf.record)
        elif leaf.centroid != leaf.record:
            self._detach(leaf)
            leaf.centroid = leaf.record
            self._members[leaf.record] = {leaf.record}
            for record in self._leaves.keys() & reach.keys():
                if self._leaves[record].rank > leaf.rank:
                    self._again(record)
