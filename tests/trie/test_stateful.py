"""The C++ trie and the plain-Python oracle must agree after every operation, at every level of the CPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracles import both, run_machine, same_stats, u32, u64

from kvstore.codecs.levels import LEVELS, cpu_levels
from kvstore.trie._trie import Trie
from kvstore.trie.reference.trie import ReferenceTrie

BLOCK = 4
# A small alphabet and long runs of one token: paths share a lot, and edges are long enough for vector code.
TOKENS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.lists(st.sampled_from([1, 1 + (1 << 16)]), min_size=1, max_size=14),  # the same in their lower 16 bits
    st.tuples(st.integers(0, 60), st.lists(st.integers(0, 2), min_size=1, max_size=6)).map(lambda x: [7] * x[0] + x[1]),
)


def close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-6, abs=1e-12)


def path_of(trie: ReferenceTrie, record: int) -> tuple[int, np.ndarray]:
    """Root and path of a record or of a hole."""
    if not trie.is_hole(record):
        return trie.path(record)
    nodes = list(trie._holes[record].up())
    root = next(i for i, node in enumerate(trie._roots) if node is nodes[-1].parent)
    return root, u32([node.token for node in reversed(nodes)])


def rows_of(trie: ReferenceTrie, ids: list[int], pinned: set[int]) -> dict[str, np.ndarray]:
    """The columns that a catalog would hold for these records; tags are the paths' Python hashes, which
    never are 0."""

    def tag(root: int, path: list[int]) -> int:
        return hash((root, *path)) & 0xFFFFFFFFFFFFFFFE | 1 if path else 0

    paths = {i: path_of(trie, i) for i in ids}
    traffic = {
        i: count
        for columns in (trie.counts(), trie.holes())
        for i, count in zip(*(c.tolist() for c in columns), strict=True)
    }
    starts = {i: (len(path) - 1) // BLOCK * BLOCK for i, (_, path) in paths.items()}
    bits = {
        i: trie.match(root, path, False)[1] - trie.match(root, path[: starts[i]], False)[1]
        for i, (root, path) in paths.items()
    }
    return {
        "roots": u32([paths[i][0] for i in ids]),
        "ids": u64(ids),
        "starts": u32([starts[i] for i in ids]),
        "counts": u32([len(paths[i][1]) - starts[i] for i in ids]),
        "tags": u64([tag(paths[i][0], paths[i][1].tolist()) for i in ids]),
        "parent_tags": u64([tag(paths[i][0], paths[i][1][: starts[i]].tolist()) for i in ids]),
        "bits": np.array([bits[i] for i in ids], np.float32),
        "tokens": u32(np.concatenate([[], *(paths[i][1][starts[i] :] for i in ids)])),
        "pinned": np.array([i in pinned for i in ids], np.uint8),
        "traffic": u32([traffic[i] for i in ids]),
        "holes": np.array([trie.is_hole(i) for i in ids], np.uint8),
    }


class TrieMachine(RuleBasedStateMachine):
    level = "scalar"

    @initialize(roots=st.integers(1, 2))
    def build(self, roots: int) -> None:
        os.environ["KVSTORE_CPU"] = self.level
        self.fast, self.slow = Trie(BLOCK), ReferenceTrie(BLOCK)
        self.roots = roots
        for _ in range(roots):
            assert self.fast.new_root() == self.slow.new_root()
        self.next_id = 1
        self.ids: set[int] = set()
        self.known: list[tuple[int, list[int]]] = []

    def teardown(self) -> None:
        os.environ.pop("KVSTORE_CPU", None)
        if not hasattr(self, "fast"):
            return
        while True:  # the whole order of eviction, not just its head
            gone = self.both("evict")
            self.ids.discard(gone)
            self.agree()
            if gone is None:
                break

    def both(self, name: str, *arguments: Any) -> Any:
        return both(self.fast, self.slow, name, *arguments)

    def pick(self, data: st.DataObject) -> tuple[int, np.ndarray]:
        """A query: something inserted before, a prefix or an extension of it, or anything."""
        if self.known and data.draw(st.integers(0, 4)):
            root, path = data.draw(st.sampled_from(self.known))
            cut = data.draw(st.integers(1, len(path)))
            more = data.draw(st.one_of(st.just([]), TOKENS))
            return root, u32(path[:cut] + more)
        return data.draw(st.integers(0, self.roots - 1)), u32(data.draw(TOKENS))

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        root, tokens = self.pick(data)
        n = len(tokens)
        places = [*range(BLOCK, n + 1, BLOCK), *([n] if n % BLOCK else [])]
        if data.draw(st.integers(0, 3)):
            ends = places[data.draw(st.integers(0, len(places) - 1)) :]  # what a store does: the new blocks
        else:
            ends = sorted(data.draw(st.sets(st.sampled_from(places))))
        ids = list(range(self.next_id, self.next_id + len(ends)))
        self.next_id += len(ends)
        bits: Any = 2.5
        if data.draw(st.booleans()):
            bits = np.array(data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), np.float32)
        gone = self.both("insert", root, tokens, bits, u32(ends), u64(ids), data.draw(st.booleans()))
        self.ids = (self.ids | set(ids)) - set(gone)
        assert not any(self.slow.is_hole(record) for record in gone)
        self.known.append((root, tokens.tolist()))

    @rule(
        data=st.data(),
        ends=st.lists(st.integers(0, 20), max_size=3),
        ids=st.lists(st.integers(0, 9), max_size=3),
    )
    def insert_nonsense(self, data: st.DataObject, ends: list[int], ids: list[int]) -> None:
        root, tokens = self.pick(data)
        valid = ends and ends == sorted(set(ends)) and not set(ids) & (self.ids | {0}) and len(set(ids)) == len(ids)
        if valid and len(ends) == len(ids):
            return  # may be no nonsense, and would use an id twice
        if ends or ids:
            assert self.both("insert", root, tokens, 1.0, u32(ends), u64(ids)) is ValueError

    @rule(data=st.data(), touch=st.booleans())
    def match(self, data: st.DataObject, touch: bool) -> None:
        root, tokens = self.pick(data)
        assert self.both("longest_prefix", root, tokens) <= len(tokens)
        depth, bits, records, ends = self.fast.match(root, tokens, touch)
        want = self.slow.match(root, tokens, touch)
        assert (depth, records.tolist(), ends.tolist()) == (want[0], want[2].tolist(), want[3].tolist())
        assert bits == pytest.approx(want[1], rel=1e-9, abs=1e-6)
        assert self.fast.tails(root, tokens) == self.slow.tails(root, tokens)
        assert self.fast.covers(root, tokens) == self.slow.covers(root, tokens)
        found, known = self.fast.best_match(root, tokens)
        assert (found, known) == (depth, close(self.slow.best_match(root, tokens)[1]))
        for end, record in zip(ends.tolist(), records.tolist(), strict=True):
            if record:  # whatever the oracle says: the record holds the query's tokens
                at_root, path = self.fast.path(record)
                shared = min(end, depth)
                assert at_root == root
                assert len(path) == end
                assert path[:shared].tolist() == tokens[:shared].tolist()

    @rule(data=st.data())
    def measure(self, data: st.DataObject) -> None:
        """Bits and distances of paths, stored or not."""
        (root, p), (_, q) = self.pick(data), self.pick(data)
        for name, paths in (("bits", (p,)), ("shared_bits", (p, q)), ("distance", (p, q))):
            fast, slow = (getattr(trie, name)(root, *paths) for trie in (self.fast, self.slow))
            assert fast == close(slow), name

    @rule(data=st.data(), radius=st.integers(0, 60))
    def look_around(self, data: st.DataObject, radius: int) -> None:
        for record in sorted(self.ids):
            leaf, want = self.fast.leaf(record), self.slow.leaf(record)
            assert (leaf is None) == (want is None)
            # Not a whole number: sums of logarithms must not decide at the edge.
            near, there = (trie.near(record, radius + 0.3719, 1 << 30) for trie in (self.fast, self.slow))
            if leaf is None or want is None:
                assert near is None
                continue
            assert leaf[0] == close(want[0])
            assert leaf[1].tolist() == want[1].tolist()
            assert near is not None
            assert there is not None
            found, distances = (dict(zip(x[0].tolist(), x[1].tolist(), strict=True)) for x in (near, there))
            assert found == close(distances)

    @rule(root=st.integers(0, 1), limit=st.integers(0, 200))
    def prune(self, root: int, limit: int) -> None:
        gone = self.both("prune", root % self.roots, limit + 0.3719)
        assert set(gone) <= self.ids
        self.ids -= set(gone)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.both("touch", *self.pick(data))

    @rule(data=st.data(), delta=st.sampled_from([1, 1, -1]))
    def pin(self, data: st.DataObject, delta: int) -> None:
        self.both("pin", *self.pick(data), delta)

    @rule(data=st.data())
    def unpin_known(self, data: st.DataObject) -> None:
        if self.known:
            root, path = data.draw(st.sampled_from(self.known))
            self.both("pin", root, u32(path), -1)

    @rule(times=st.integers(1, 4))
    def evict(self, times: int) -> None:
        for _ in range(times):
            self.ids.discard(self.both("evict"))

    @rule(data=st.data())
    def evict_below(self, data: st.DataObject) -> None:
        self.ids.discard(self.both("evict", data.draw(st.integers(0, self.next_id))))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        record = data.draw(st.integers(1, self.next_id))
        assert self.both("remove", record) == (record in self.ids)
        self.ids.discard(record)

    @rule(data=st.data())
    def erase(self, data: st.DataObject) -> None:
        gone = set(self.both("erase", *self.pick(data)))
        assert gone <= self.ids
        self.ids -= gone

    @rule()
    def compact(self) -> None:
        self.fast.compact()
        assert self.fast.stats()["garbage_tokens"] == 0

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """As after a restart: some records were lost, some come twice, in any order."""
        ids = data.draw(st.permutations(sorted(self.ids | set(self.slow.holes()[0].tolist()))))
        pinned = set(data.draw(st.lists(st.sampled_from(ids), max_size=2))) if ids else set()
        columns = rows_of(self.slow, ids, pinned)
        if ids and data.draw(st.booleans()):  # one more record for a path that is there
            i = data.draw(st.integers(0, len(ids) - 1))
            first = int(columns["counts"][:i].sum())
            again = columns["tokens"][first : first + int(columns["counts"][i])]
            for name in set(columns) - {"tokens", "ids"}:
                columns[name] = np.append(columns[name], columns[name][i])
            columns["ids"] = np.append(columns["ids"], np.uint64(self.next_id))
            columns["tokens"] = np.append(columns["tokens"], again)
            if data.draw(st.booleans()):
                columns["tags"][-1] ^= np.uint64(2)
            self.next_id += 1
        if ids and data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(ids) - 1))
            name = data.draw(st.sampled_from(["tags", "parent_tags", "starts", "ids", "roots", "traffic"]))
            columns[name][place] ^= columns[name].dtype.type(data.draw(st.sampled_from([1, 4, 8])))
        self.fast, self.slow = Trie(BLOCK), ReferenceTrie(BLOCK)
        for _ in range(self.roots):
            self.fast.new_root(), self.slow.new_root()
        if not data.draw(st.integers(0, 3)):
            columns["traffic"][:] = 0
        dropped = set(self.both("restore", *columns.values(), data.draw(st.booleans())))
        self.ids = set(columns["ids"].tolist()) - dropped - set(self.slow.holes()[0].tolist())
        self.next_id = max([self.next_id, *(i + 1 for i in self.ids if i < 1 << 40)])

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "fast"):
            return
        found = same_stats(self.fast, self.slow)
        assert found["records"] == len(self.ids)
        assert found["arena_tokens"] - found["garbage_tokens"] == found["tokens"]
        assert [x.tolist() for x in self.fast.counts()] == [x.tolist() for x in self.slow.counts()]
        holes = self.both("holes")[0]
        assert not self.ids & set(holes)
        assert not set(self.both("take_released")) & {*self.ids, *holes}
        assert all(self.fast.is_hole(hole) and not self.fast.contains(hole) for hole in holes)
        for record in self.ids:
            root, path = self.fast.path(record)
            want_root, want_path = self.slow.path(record)
            assert self.fast.contains(record)
            assert (root, path.tolist()) == (want_root, want_path.tolist())


@pytest.mark.native
@pytest.mark.parametrize("level", LEVELS)
def test_trie_agrees_with_the_oracle(level: str) -> None:
    if level not in cpu_levels():
        pytest.skip(f"this machine has no {level}")
    machine = type(f"TrieMachine_{level}", (TrieMachine,), {"level": level})
    run_machine(machine, int(os.environ.get("KVSTORE_TRIE_EXAMPLES", "100")), 40)
