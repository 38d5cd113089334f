"""The mixture of traffic and model: what each query promises, and the geometry of the trie."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part

from kvstore.trie import UNIFORM_BITS_PER_TOKEN, UNIFORM_LOGPROB, TrieIndex, bits_from_logprobs, mixture_bits
from kvstore.trie import _trie as native
from kvstore.trie._trie import Trie
from kvstore.trie.reference.trie import ReferenceTrie

pytestmark = pytest.mark.native

HERE, NEVER = b"h" * 32, b"n" * 32
A = 4.0  # the default concentration
PATHS = st.lists(st.integers(0, 2), max_size=9)


def u32(values: Any) -> np.ndarray:
    return np.array(values, np.uint32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.fixture(params=[Trie, ReferenceTrie])
def trie(request: pytest.FixtureRequest) -> Any:
    made = request.param(4)
    made.new_root()
    return made


def put(trie: Any, tokens: list[int], record: int, bits: Any = 1.0) -> None:
    trie.insert(0, u32(tokens), bits, u32([len(tokens)]), u64(record))


def test_the_native_constant_is_that_of_the_prior() -> None:
    assert native.UNIFORM_BITS == UNIFORM_BITS_PER_TOKEN
    assert bits_from_logprobs([UNIFORM_LOGPROB], 1).tolist() == [UNIFORM_BITS_PER_TOKEN]
    assert Trie(4).concentration == ReferenceTrie(4).concentration == A


@pytest.mark.parametrize(
    ("count", "total", "bits"), [(0, 0, 3.0), (0, 7, 3.0), (3, 7, 1.0), (7, 7, 16.0), (1, 1, 64.0)]
)
def test_the_mixture_is_the_formula(count: int, total: int, bits: float) -> None:
    assert mixture_bits(count, total, bits) == pytest.approx(
        -math.log2((count + A * 2**-bits) / (total + A)), rel=1e-12
    )


def test_no_traffic_leaves_the_models_bits_and_no_token_is_certain() -> None:
    assert mixture_bits(0, 0, 5.0) == 5.0
    assert mixture_bits(0, 0, 1e30) == 1e30
    for count in (0, 1, 10**6, 2**32 - 1):
        assert mixture_bits(count, count, 0.0) > 0
        assert math.isfinite(mixture_bits(count, count, 1e30))


def test_traffic_makes_a_path_more_probable_and_its_sibling_less(trie: Any) -> None:
    put(trie, [1, 2], 1)
    put(trie, [1, 3], 2)
    assert trie.bits(0, u32([1, 2])) == pytest.approx(mixture_bits(2, 2, 1.0) + mixture_bits(1, 2, 1.0))
    before = [trie.bits(0, u32([1, last])) for last in (2, 3)]
    assert before[0] == pytest.approx(before[1])
    trie.touch(0, u32([1, 2]))
    after = [trie.bits(0, u32([1, last])) for last in (2, 3)]
    assert after[0] < before[0] < after[1]
    assert after[1] == pytest.approx(mixture_bits(3, 3, 1.0) + mixture_bits(1, 3, 1.0))


def test_a_touching_match_counts_and_a_look_does_not(trie: Any) -> None:
    put(trie, [1, 2], 1)
    for touch, count in ((False, 1), (True, 2)):
        trie.match(0, u32([1, 2]), touch)
        trie.best_match(0, u32([1, 2]))
        trie.longest_prefix(0, u32([1, 2]))
        assert trie.counts()[1].tolist() == [count]


def test_traffic_that_finds_nothing_counts_nowhere(trie: Any) -> None:
    put(trie, [1, 2], 1)
    before = trie.bits(0, u32([1, 2]))
    trie.touch(0, u32([7]))
    trie.match(0, u32([7]), True)
    assert trie.bits(0, u32([1, 2])) == before


def test_traffic_counts_up_to_where_it_parts_though_the_covering_record_lies_beyond(trie: Any) -> None:
    put(trie, [1, 2, 3], 1)
    put(trie, [1, 2, 4], 2)
    assert trie.match(0, u32([1, 2]), True)[3].tolist() == [3]  # a record below the match point
    assert trie.counts()[1].tolist() == [1, 1]
    assert trie.bits(0, u32([1, 2])) == pytest.approx(2 * mixture_bits(3, 3, 1.0))


def test_pins_count_no_traffic(trie: Any) -> None:
    put(trie, [1, 2], 1)
    trie.pin(0, u32([1, 2]), 1)
    trie.touch(0, u32([1, 2]))
    trie.pin(0, u32([1, 2]), -1)
    assert trie.counts()[1].tolist() == [2]


def test_what_is_not_stored_counts_as_uniform_bits_without_traffic(trie: Any) -> None:
    u = UNIFORM_BITS_PER_TOKEN
    assert trie.bits(0, u32([])) == 0
    assert trie.bits(0, u32([5, 6])) == 2 * u
    put(trie, [1, 2], 1)
    stored = trie.bits(0, u32([1, 2]))
    assert trie.bits(0, u32([1, 2, 3, 4])) == pytest.approx(stored + mixture_bits(0, 1, u) + u)
    assert trie.shared_bits(0, u32([1, 2, 3, 9]), u32([1, 2, 3, 4])) == pytest.approx(stored + mixture_bits(0, 1, u))
    assert trie.distance(0, u32([1, 2, 3, 9]), u32([1, 2, 3, 4, 4])) == 3 * u  # nothing is known after [1, 2, 3]
    before = trie.bits(0, u32([1, 2, 3, 4]))
    trie.insert(0, u32([1, 2, 3, 4]), u, u32([4]), u64(2))
    restored = mixture_bits(2, 2, 1.0) * 2 + mixture_bits(1, 2, u) + mixture_bits(1, 1, u)
    assert trie.bits(0, u32([1, 2, 3, 4])) == pytest.approx(restored)
    assert restored < before


def test_the_probabilities_of_what_may_follow_a_prefix_do_not_exceed_one(trie: Any) -> None:
    """With uniform bits, and the 65,536 tokens that they stand for."""
    rng = np.random.default_rng(0)
    for record in range(1, 60):
        path = rng.integers(0, 3, 6)
        trie.insert(0, u32(path), UNIFORM_BITS_PER_TOKEN, u32([]), u64())
        if record % 3 == 0:
            trie.touch(0, u32(path[:4]))
    for prefix in ([], [0], [1, 2], [2, 1, 0]):
        above = trie.bits(0, u32(prefix))
        seen = sum(2 ** (above - trie.bits(0, u32([*prefix, token]))) for token in range(3))
        unseen = 2 ** (above - trie.bits(0, u32([*prefix, 9])))
        assert 0.1 < seen + (65_536 - 3) * unseen <= 1 + 1e-9


def test_inside_an_edge_the_models_probability_is_the_geometric_mean(trie: Any) -> None:
    put(trie, [1, 2, 3, 4], 1, np.array([8, 0, 0, 0], np.float32))
    assert trie.bits(0, u32([1, 2, 3, 4])) == pytest.approx(4 * mixture_bits(1, 1, 2.0))
    assert trie.match(0, u32([1, 2, 3, 4]), False)[1] == 8.0  # the model's own bits are as they were


def test_a_count_saturates(trie: Any) -> None:
    top = 2**32 - 1
    zero, one = u32([0]), u64(1)
    arguments = (
        zero,
        one,
        zero,
        u32([2]),
        one,
        u64(0),
        np.array([2.0], np.float32),
        u32([1, 2]),
        np.zeros(1, np.uint8),
    )
    trie.restore(*arguments, u32([top - 1]))
    for _ in range(3):
        trie.touch(0, u32([1, 2]))
    assert trie.counts()[1].tolist() == [top]
    assert 0 < trie.bits(0, u32([1, 2])) < 1e-6


@pytest.mark.parametrize("kind", [Trie, ReferenceTrie])
@pytest.mark.parametrize("wrong", [0.0, -1.0, 1e7, float("nan"), float("inf")])
def test_a_concentration_that_is_none_is_refused(kind: Any, wrong: float) -> None:
    with pytest.raises(ValueError, match="concentration"):
        kind(4, wrong)


def test_the_concentration_is_how_much_the_model_weighs() -> None:
    found = []
    for concentration in (0.01, 4.0, 1e6):
        index = TrieIndex(4, concentration)
        index.insert(HERE, u32([1, 2]), u32([2]), u64(1), bits=10.0)
        assert index.concentration == concentration
        found.append(index.bits(HERE, u32([1, 2])))
    assert found[0] < 0.1 < 1 < found[1] < 10 < found[2] < 20


# ---- geometry ----


@settings(max_examples=part(150), deadline=None)
@given(
    st.lists(st.tuples(PATHS.filter(bool), st.sampled_from([0.0, 0.5, 3.0, 16.0])), max_size=12),
    st.lists(PATHS, max_size=6),
    st.tuples(PATHS, PATHS, PATHS),
)
def test_distance_is_a_tree_metric_and_the_probability_of_the_meet_an_ultrametric(
    stored: list[tuple[list[int], float]], touched: list[list[int]], three: tuple[list[int], ...]
) -> None:
    index = TrieIndex(4)
    for record, (path, bits) in enumerate(stored):
        index.insert(HERE, u32(path), u32([len(path)]), u64(record + 1), bits=bits)
    for path in touched:
        index.touch(HERE, u32(path))
    for p, q in permutations(three, 2):
        a, b = u32(p), u32(q)
        distance, shared = index.distance(HERE, a, b), index.shared_bits(HERE, a, b)
        assert (distance == 0) == (p == q)
        assert distance >= 0
        assert distance == index.distance(HERE, b, a)
        assert shared == index.shared_bits(HERE, b, a)
        assert 0 < index.ultrametric(HERE, a, b) <= 1
        total = index.bits(HERE, a) + index.bits(HERE, b)
        assert total == pytest.approx(distance + 2 * shared, rel=1e-9, abs=1e-9)
    for p, q, r in permutations(u32(path) for path in three):
        ways = index.distance(HERE, p, q) + index.distance(HERE, q, r)
        assert index.distance(HERE, p, r) <= ways * (1 + 1e-9) + 1e-12
        most = max(index.ultrametric(HERE, p, q), index.ultrametric(HERE, q, r))
        assert index.ultrametric(HERE, p, r) <= most * (1 + 1e-9)


def test_the_ultrametric_stays_above_zero() -> None:
    index = TrieIndex(4)
    long = u32(range(200))
    assert index.shared_bits(NEVER, long, long) == 3200
    assert index.ultrametric(NEVER, long, long) > 0


def test_in_a_namespace_that_nothing_was_put_into_all_is_uniform() -> None:
    index = TrieIndex(4)
    index.insert(HERE, u32([1, 2]), u32([2]), u64(1), bits=1.0)
    p, q = u32([1, 2, 3]), u32([1, 2, 4, 5])
    assert index.bits(NEVER, p) == 48
    assert index.shared_bits(NEVER, p, q) == 32
    assert index.distance(NEVER, p, q) == 48
    assert index.distance(NEVER, p, p) == 0
    assert index.ultrametric(NEVER, p, q) == 2**-32
    assert index.prune(NEVER, 0).size == 0
    for call in (index.shared_bits, index.distance, index.ultrametric):
        for namespace in (HERE, NEVER):
            with pytest.raises(ValueError):
                call(namespace, p, np.arange(3))
    for namespace in (HERE, NEVER):
        with pytest.raises(ValueError, match="tokens"):
            index.bits(namespace, np.arange(3))
        with pytest.raises(ValueError, match="max_bits"):
            index.prune(namespace, float("nan"))


# ---- prune ----


def test_prune_takes_what_is_improbable_deepest_first_and_keeps_parents(trie: Any) -> None:
    trie.insert(0, u32(range(12)), 1.0, u32([4, 8, 12]), u64(1, 2, 3))
    trie.insert(0, u32([0, 1, 2, 3, 50, 51]), 16.0, u32([6]), u64(4))
    for _ in range(3):
        trie.touch(0, u32(range(12)))
    bits = [trie.bits(0, u32(range(n))) for n in (4, 8, 12)]
    assert trie.prune(0, bits[2] + 1e-6).tolist() == [4]
    assert trie.prune(0, bits[1] + 1e-6).tolist() == [3]
    assert trie.longest_prefix(0, u32(range(12))) == 8
    trie.insert(0, u32(range(12)), 9.0, u32([12]), u64(5))
    assert trie.prune(0, 0.0).tolist() == [5, 2, 1]
    assert trie.stats()["tokens"] == 0


def test_prune_keeps_what_a_pin_protects(trie: Any) -> None:
    trie.insert(0, u32(range(12)), 5.0, u32([4, 8, 12]), u64(1, 2, 3))
    trie.insert(0, u32([7, 8]), 5.0, u32([2]), u64(4))
    trie.pin(0, u32(range(8)), 1)
    assert trie.prune(0, 0.0).tolist() == [3, 4]
    assert trie.prune(0, 0.0).tolist() == []
    trie.pin(0, u32(range(8)), -1)
    assert trie.prune(0, 0.0).tolist() == [2, 1]


def test_prune_touches_one_namespace_only(trie: Any) -> None:
    other = trie.new_root()
    put(trie, [1, 2], 1)
    trie.insert(other, u32([1, 2]), 1.0, u32([2]), u64(2))
    assert trie.prune(other, 0.0).tolist() == [2]
    assert trie.contains(1)


# ---- saved and restored ----


def rows_of(index: TrieIndex) -> tuple[dict[str, Any], np.ndarray]:
    """The columns of a catalog, and the traffic."""
    ids, traffic = index.counts()
    paths = [index.path(record)[1] for record in ids.tolist()]
    block = index.block_tokens
    starts = [(len(path) - 1) // block * block for path in paths]

    def tag(path: np.ndarray) -> int:
        return hash(path.tobytes()) & 0xFFFFFFFFFFFFFFFE | 1 if len(path) else 0

    def model(path: np.ndarray) -> float:
        return index.match(HERE, path, touch=False).bits

    return {
        "which": np.zeros(len(ids), np.uint32),
        "ids": ids,
        "starts": u32(starts),
        "counts": u32([len(path) - start for path, start in zip(paths, starts, strict=True)]),
        "tags": np.array([tag(path) for path in paths], np.uint64),
        "parent_tags": np.array([tag(path[:start]) for path, start in zip(paths, starts, strict=True)], np.uint64),
        "bits": np.array([model(p) - model(p[:s]) for p, s in zip(paths, starts, strict=True)], np.float32),
        "tokens": u32(np.concatenate([path[start:] for path, start in zip(paths, starts, strict=True)])),
        "pinned": np.zeros(len(ids), np.uint8),
    }, traffic


def busy(parting: int, seed: int) -> tuple[TrieIndex, list[np.ndarray]]:
    """Sequences that part at multiples of `parting` tokens, and traffic of whole sequences. Inside a block all have the
    same bits: a catalog only keeps those of a block."""
    rng, index, paths, next_id = np.random.default_rng(seed), TrieIndex(4), [], 1
    for _ in range(40):
        path = u32(
            np.repeat(rng.integers(0, 2, 12 // parting), parting) + 2 * np.tile(np.arange(parting), 12 // parting)
        )
        known = index.longest_prefix(HERE, path) // 4 * 4
        ends = list(range(known + 4, 13, 4))
        ids = np.arange(next_id, next_id + len(ends), dtype=np.uint64)
        next_id += len(ends)
        index.insert(HERE, path, u32(ends), ids, bits=float(rng.integers(1, 20)) if parting == 4 else 9.0)
        paths.append(path)
    for i in rng.integers(0, 10, 100).tolist():
        index.touch(HERE, paths[i])
    return index, paths


@pytest.mark.parametrize("parting", [4, 2])
def test_counts_come_back_and_with_them_the_probabilities(parting: int) -> None:
    index, paths = busy(parting, seed=parting)
    rows, traffic = rows_of(index)
    assert 40 < int(traffic.max()) < 200
    again, without = TrieIndex(4), TrieIndex(4)
    assert again.restore([HERE], **rows, traffic=traffic).size == 0
    assert without.restore([HERE], **rows).size == 0
    assert [x.tolist() for x in again.counts()] == [x.tolist() for x in index.counts()]
    assert not without.counts()[1].any()
    far = 0.0
    for path in paths:
        want = index.bits(HERE, path)
        assert again.bits(HERE, path) == pytest.approx(want, rel=1e-6)
        far = max(far, abs(without.bits(HERE, path) - want))
        assert without.bits(HERE, path) == pytest.approx(without.match(HERE, path, touch=False).bits, rel=1e-6)
    assert far > 10  # the traffic made a difference


def test_traffic_that_stopped_where_no_record_ends_is_forgotten() -> None:
    index = TrieIndex(4)
    for record, last in ((1, 2), (2, 3)):
        index.insert(HERE, u32([1, last]), u32([2]), u64(record), bits=1.0)
    index.touch(HERE, u32([1]))
    rows, traffic = rows_of(index)
    again = TrieIndex(4)
    again.restore([HERE], **rows, traffic=traffic)
    assert index.bits(HERE, u32([1])) == pytest.approx(mixture_bits(3, 3, 1.0))
    assert again.bits(HERE, u32([1])) == pytest.approx(mixture_bits(2, 2, 1.0))
    assert again.bits(HERE, u32([1, 2])) == pytest.approx(mixture_bits(2, 2, 1.0) + mixture_bits(1, 2, 1.0))


def test_counts_that_contradict_each_other_give_a_prefix_the_sum_of_what_continues_it() -> None:
    index, _ = busy(4, seed=0)
    rows, traffic = rows_of(index)
    again = TrieIndex(4)
    top = np.full(len(traffic), 2**32 - 1, np.uint32)
    top[rows["starts"] == 0] = 0
    again.restore([HERE], **rows, traffic=top)
    assert again.counts()[1].tolist() == [2**32 - 1] * len(top)
    with pytest.raises(ValueError, match="traffic"):
        TrieIndex(4).restore([HERE], **rows, traffic=traffic[:-1])
    with pytest.raises(ValueError, match="traffic"):
        TrieIndex(4).restore([HERE], **rows, traffic=traffic.astype(np.int64))


# ---- leaves ----


def test_a_leaf_is_the_last_record_of_a_path_that_nothing_continues(trie: Any) -> None:
    trie.insert(0, u32(range(10)), 1.0, u32([4, 8, 10]), u64(1, 2, 3))
    assert trie.leaf(2) is None
    assert trie.leaf(99) is None
    bits, above = trie.leaf(3)
    assert bits == pytest.approx(trie.bits(0, u32(range(10))))
    assert above.tolist() == [2, 1]
    trie.insert(0, u32([*range(6), 60, 61]), 1.0, u32([8]), u64(4))
    assert trie.leaf(4)[1].tolist() == [1]
    assert trie.leaf(3)[1].tolist() == [2, 1]


def test_near_finds_what_is_within_the_radius_and_nothing_else(trie: Any) -> None:
    for record, path in enumerate(([1, 1, 1, 1, 1], [1, 1, 1, 1, 2], [1, 2], [3, 3, 3, 3, 3, 3, 3, 3]), 1):
        trie.insert(0, u32(path), 3.0, u32([len(path)]), u64(record))
    other = trie.new_root()
    trie.insert(other, u32([1, 1]), 3.0, u32([2]), u64(9))
    all_of = trie.near(1, 1e9, 100)
    distances = dict(zip(all_of[0].tolist(), all_of[1].tolist(), strict=True))
    assert sorted(distances) == [2, 3, 4]
    assert distances[2] < distances[3] < distances[4]
    assert distances[3] == pytest.approx(trie.distance(0, u32([1, 1, 1, 1, 1]), u32([1, 2])))
    for reach, want in ((distances[2], [2]), (distances[3], [2, 3]), (0.0, [])):
        assert sorted(trie.near(1, reach * (1 + 1e-9), 100)[0].tolist()) == want
    assert trie.near(77, 1.0, 100) is None


def test_the_search_looks_at_no_more_nodes_than_it_may() -> None:
    trie = Trie(4)
    trie.new_root()
    for last in range(50):
        put(trie, [1, last], last + 1)
    assert len(trie.near(1, 1e9, 1000)[0]) == 49
    assert trie.near(1, 1e9, 10)[0].tolist() == list(range(50, 40, -1))
    assert trie.near(1, 1e9, 0)[0].size == 0
