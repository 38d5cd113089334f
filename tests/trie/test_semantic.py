"""Clusters of stored sequences: against a plain greedy over all pairs, at every step and in any order."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvstore.trie import Cluster, Clusters, TrieIndex, semantic

pytestmark = pytest.mark.native

BLOCK = 4
NAMES = [b"a" * 32, b"b" * 32]


def u32(values: Any) -> np.ndarray:
    return np.array(values, np.uint32)


class Store:
    """What a store does with an index: puts whole sequences, and tells the clusters what comes and goes."""

    def __init__(self, concentration: float = 4.0) -> None:
        self.index = TrieIndex(BLOCK, concentration)
        self.clusters: Clusters | None = None
        self.records: set[int] = set()
        self.next_id = 1

    def put(self, tokens: list[int], name: bytes = NAMES[0], bits: float = 2.0) -> None:
        path = u32(tokens)
        match = self.index.match(name, path, touch=False)
        first = match.usable(BLOCK) // BLOCK * BLOCK
        ends = [end for end in [*range(BLOCK, len(path), BLOCK), len(path)] if end > first]
        ids = list(range(self.next_id, self.next_id + len(ends)))
        self.next_id += len(ids)
        gone = self.index.insert(name, path, u32(ends), np.array(ids, np.uint64), bits=bits).tolist()
        self.tell(ids, gone)

    def tell(self, came: list[int], gone: list[int]) -> None:
        self.records = (self.records | set(came)) - set(gone)
        if self.clusters is not None:
            for record in came:
                self.clusters.added(record)
            for record in gone:
                self.clusters.removed(record)

    def leaves(self) -> list[int]:
        return [record for record in sorted(self.records) if self.index.leaf(record) is not None]


def greedy(index: TrieIndex, leaves: list[int], radius: float) -> list[Cluster]:
    """The definition, pair by pair."""
    paths = {record: index.path(record) for record in leaves}
    bits = {record: index.leaf(record)[0] for record in leaves}  # type: ignore[index]
    ranked = sorted(leaves, key=lambda record: (bits[record], record))
    members: dict[int, list[tuple[int, float]]] = {}
    for record in ranked:
        name, path = paths[record]
        near = []
        for centroid in members:
            if paths[centroid][0] == name:
                distance = index.distance(name, path, paths[centroid][1])
                if distance <= radius:
                    near.append((distance, bits[centroid], centroid))
        if near:
            distance, _, centroid = min(near)
            members[centroid].append((record, distance))
        else:
            members[record] = [(record, 0.0)]
    out = []
    for centroid, rows in members.items():
        name, path = paths[centroid]
        shared = min(index.shared_bits(name, path, paths[record][1]) for record, _ in rows)
        out.append(Cluster(centroid, tuple(r for r, _ in rows), max(d for _, d in rows), shared))
    return out


def check(found: list[Cluster], want: list[Cluster]) -> None:
    assert [(x.centroid, x.members) for x in found] == [(x.centroid, x.members) for x in want]
    for a, b in zip(found, want, strict=True):
        assert a.radius_bits == pytest.approx(b.radius_bits, abs=1e-6)
        assert a.shared_bits == pytest.approx(b.shared_bits, abs=1e-6)


def sequence(rng: random.Random) -> list[int]:
    """Few beginnings, few ways on: many share much."""
    return [rng.randrange(2) for _ in range(rng.randrange(1, 14))] + [5] * rng.randrange(0, 5)


@pytest.mark.parametrize("seed", range(12))
def test_clusters_are_those_of_the_definition_after_any_operations(seed: int) -> None:
    rng, store, radius = random.Random(seed), Store(), [5.1, 9.7, 22.3][seed % 3]
    store.clusters = clusters = Clusters(store.index, radius)
    sizes = set()
    for _ in range(120):
        kind, path = rng.randrange(10), sequence(rng)
        name = NAMES[rng.random() < 0.2]
        if kind < 5:
            store.put(path, name, rng.choice([0.5, 2.0, 7.0]))
        elif kind < 6:
            store.index.touch(name, u32(path))
        elif kind < 8:
            gone = store.index.evict()
            store.tell([], [] if gone is None else [gone])
        elif kind < 9:
            store.tell([], store.index.erase(name, u32(path)).tolist())
        else:
            pruned = store.index.prune(name, 40).tolist()
            rng.shuffle(pruned)  # hooks may come in any order
            store.tell([], pruned)
        leaves = store.leaves()
        assert len(clusters) == len(leaves)
        held = [record for cluster in clusters.clusters() for record in cluster.members]
        assert sorted(held) == leaves  # each in exactly one
        assert all(clusters.centroid(record) for record in leaves)
        if rng.random() < 0.3:
            clusters.refresh()
            want = greedy(store.index, leaves, radius)
            check(clusters.clusters(), want)
            sizes |= {len(cluster.members) for cluster in want}
    assert max(sizes) > 1  # or nothing was clustered at all


def restored(rng: random.Random, count: int) -> Store:
    """Many sequences whose probabilities no traffic changes any more."""
    first = Store()
    for _ in range(count):
        first.put(sequence(rng), bits=rng.choice([0.5, 2.0, 7.0]))
    index, ids = TrieIndex(BLOCK), sorted(first.records)
    paths = [first.index.path(record)[1] for record in ids]
    starts = [(len(path) - 1) // BLOCK * BLOCK for path in paths]
    tags = [hash(tuple(path.tolist())) & 0xFFFFFFFFFFFFFFFE | 1 for path in paths]
    before = [
        hash(tuple(p[:s].tolist())) & 0xFFFFFFFFFFFFFFFE | 1 if s else 0 for p, s in zip(paths, starts, strict=True)
    ]
    bits = [
        first.index.match(NAMES[0], path, touch=False).bits
        - first.index.match(NAMES[0], path[:start], touch=False).bits
        for path, start in zip(paths, starts, strict=True)
    ]
    blocks = [path[start:] for path, start in zip(paths, starts, strict=True)]
    dropped = index.restore(
        NAMES[:1],
        u32([0] * len(ids)),
        np.array(ids, np.uint64),
        u32(starts),
        u32([len(block) for block in blocks]),
        np.array(tags, np.uint64),
        np.array(before, np.uint64),
        np.array(bits, np.float32),
        np.concatenate(blocks),
        np.zeros(len(ids), np.uint8),
        first.index.counts()[1],
    )
    assert dropped.size == 0
    first.index = index
    return first


@pytest.mark.parametrize("seed", range(6))
def test_without_traffic_what_the_hooks_keep_is_exact_and_knows_no_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(semantic, "STEPS", [1, 64][seed % 2])  # what is left over is done when it is asked for
    rng = random.Random(seed)
    store, radius = restored(rng, 60), 12.3
    leaves = store.leaves()
    rng.shuffle(leaves)
    clusters = Clusters(store.index, radius)
    for i, record in enumerate(leaves):
        clusters.added(record)
        if i % 5 == 0:
            check(clusters.clusters(), greedy(store.index, sorted(leaves[: i + 1]), radius))
    loaded = Clusters(store.index, radius)
    loaded.load()
    assert loaded.clusters() == clusters.clusters()
    store.clusters = clusters
    while store.records:
        record = rng.choice(sorted(store.records))
        store.index.remove(record)
        store.tell([], [record])
        assert len(clusters) == len(store.leaves())
        if len(store.records) % 4 == 0:
            check(clusters.clusters(), greedy(store.index, store.leaves(), radius))
    assert clusters.clusters() == []


def test_a_more_probable_member_takes_over() -> None:
    store = Store()
    clusters = store.clusters = Clusters(store.index, 60.0)
    for last in (1, 2, 3):
        store.put([9, 9, 9, 9, 9, 9, 9, last])
    for record, last in ((4, 3), (3, 2), (2, 1)):
        for _ in range(2 + 3 * (4 - record)):
            store.index.touch(NAMES[0], u32([9, 9, 9, 9, 9, 9, 9, last]))
        clusters.refresh()
        (cluster,) = clusters.clusters()
        assert cluster.centroid == record
        assert sorted(cluster.members) == [2, 3, 4]
        assert clusters.centroid(2) == clusters.centroid(3) == clusters.centroid(4) == record


def test_when_a_centroid_goes_the_most_probable_member_takes_over() -> None:
    store = Store()
    clusters = store.clusters = Clusters(store.index, 60.0)
    for last, bits in ((1, 0.5), (2, 2.0), (3, 1.0)):
        store.put([9, 9, 9, 9, 9, 9, 9, last], bits=bits)
    clusters.refresh()
    assert clusters.clusters()[0].members == (2, 4, 3)
    store.tell([], store.index.erase(NAMES[0], u32([9, 9, 9, 9, 9, 9, 9, 1])).tolist())
    assert [cluster.members for cluster in clusters.clusters()] == [(4, 3)]
    assert clusters.centroid(2) is None


def test_a_leaf_that_is_continued_leaves_and_comes_back_with_the_eviction_of_what_continued_it() -> None:
    store = Store()
    clusters = store.clusters = Clusters(store.index, 5.0)
    store.put([1, 2, 3, 4])
    assert [cluster.members for cluster in clusters.clusters()] == [(1,)]
    store.put([1, 2, 3, 4, 5, 6])
    assert [cluster.members for cluster in clusters.clusters()] == [(2,)]
    store.put([1, 2, 3, 4, 5, 6, 7])  # replaces the tail
    assert [cluster.members for cluster in clusters.clusters()] == [(3,)]
    store.tell([], [store.index.evict()])  # type: ignore[list-item]
    assert [cluster.members for cluster in clusters.clusters()] == [(1,)]


def test_what_left_the_index_before_its_hook_is_in_no_cluster_and_the_hook_still_works() -> None:
    store = Store()
    clusters = store.clusters = Clusters(store.index, 5.0)
    store.put([1, 2, 3, 4, 5, 6])
    gone = store.index.evict()
    assert gone == 2
    clusters.refresh()
    assert clusters.clusters() == []
    clusters.removed(gone)
    assert [cluster.members for cluster in clusters.clusters()] == [(1,)]


def test_namespaces_share_no_cluster() -> None:
    store = Store()
    clusters = store.clusters = Clusters(store.index, 1000.0)
    for name in NAMES:
        store.put([1, 2, 3], name)
    assert sorted(cluster.members for cluster in clusters.clusters()) == [(1,), (2,)]


def test_a_hook_does_no_more_than_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semantic, "STEPS", 3)
    store = Store()
    for last in range(40):
        store.put([9, 9, 9, 9, last])
    clusters, looks = Clusters(store.index, 100.0), [0]
    clusters.load()
    near = store.index.near

    def counted(*arguments: Any) -> Any:
        looks[0] += 1
        return near(*arguments)

    monkeypatch.setattr(store.index, "near", counted)
    centroid = clusters.clusters()[0].centroid
    assert len(clusters.clusters()[0].members) == 40
    store.index.remove(centroid)
    clusters.removed(centroid)
    assert looks[0] == 3
    assert len(clusters.clusters()[0].members) == 39
    assert looks[0] > 30


@pytest.mark.parametrize("radius", [0, -1.0, float("nan"), float("inf")])
def test_a_radius_that_is_none_is_refused(radius: float) -> None:
    with pytest.raises(ValueError, match="radius_bits"):
        Clusters(TrieIndex(BLOCK), radius)
