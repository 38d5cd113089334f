"""What holds for each order of eviction: children go before parents, and victims are what is held."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import pytest
import seeds
from hypothesis import given
from hypothesis import strategies as st
from policyruns import use

from kvstore.eviction import POLICIES, EvictionPolicy, LeafFirstLFU, LeafFirstLRU, LeafFirstS3FIFO, PriorGuided
from kvstore.eviction.leaf_first import LeafFirst
from kvstore.eviction.prior import FEW_GHOSTS, GHOSTS
from kvstore.eviction.reuse_model import BOUNDS, Reuse

ALL: list[Callable[[], EvictionPolicy]] = list(POLICIES.values())  # a new row is tested like the others
OURS: list[Callable[[], LeafFirst]] = [kind for kind in POLICIES.values() if issubclass(kind, LeafFirst)]


def path_of(node: int) -> list[int]:
    """Root first, in the tree where node n comes after n // 3."""
    path = []
    while node:
        path.append(node)
        node //= 3
    return path[::-1]


@pytest.mark.parametrize("make", ALL)
@given(nodes=st.lists(st.integers(1, 120), max_size=60), capacity=st.integers(5, 12))
def test_what_is_held_has_its_parents(make: Callable[[], EvictionPolicy], nodes: list[int], capacity: int) -> None:
    policy, held = make(), set[int]()
    for node in nodes:
        use(policy, held, path_of(node), capacity)
        assert all(record // 3 in held for record in held if record >= 3)
        order = list(policy.victims())
        assert sorted(order) == sorted(held)
        place = {record: i for i, record in enumerate(order)}
        assert all(place[record] < place[record // 3] for record in held if record >= 3)


@pytest.mark.parametrize("make", ALL)
@given(operations=st.lists(st.tuples(st.sampled_from(["add", "touch", "discard", "victims"]), st.integers(1, 40))))
def test_victims_are_what_is_held_whatever_the_order_of_calls(
    make: Callable[[], EvictionPolicy], operations: list[tuple[str, int]]
) -> None:
    policy, held = make(), set[int]()
    for name, node in operations:
        if name == "add":
            policy.add(node)
            held.add(node)
        elif name == "touch":
            policy.touch([0, *path_of(node)])
        elif name == "discard":
            policy.discard(node)
            held.discard(node)
        else:  # a tier that looks at some and takes only every other
            for i, victim in enumerate(list(islice(policy.victims(), node))):
                if i % 2:
                    policy.discard(victim)
                    held.discard(victim)
        assert sorted(policy.victims()) == sorted(held)


@pytest.mark.parametrize("make", ALL)
@given(parents=st.lists(st.integers(0, 100), min_size=1, max_size=60))
def test_children_go_before_parents_that_were_only_told_by_add(
    make: Callable[[], EvictionPolicy], parents: list[int]
) -> None:
    """As when a store is opened: by rising number, each with its parent, and nothing is touched. LRU is told nothing
    of parents: it knows them by the order of uses."""
    if make is LeafFirstLRU:
        return
    policy = make()
    known = {record: parent % record for record, parent in enumerate(parents, 1)}
    for record, parent in known.items():
        policy.add(record, parent)
    place = {record: i for i, record in enumerate(policy.victims())}
    assert place.keys() == known.keys()
    assert all(place[record] < place[parent] for record, parent in known.items() if parent)


def test_the_table_of_policies_is_closed() -> None:
    assert list(POLICIES) == ["lru", "lfu", "s3fifo", "arc", "prior", "adaptive"]
    with pytest.raises(TypeError):
        POLICIES["mine"] = LeafFirstLRU  # type: ignore[index]
    assert all(next(make().victims(), None) is None for make in ALL)


@pytest.mark.parametrize("make", OURS)
def test_the_prefix_in_use_goes_last(make: Callable[[], LeafFirst]) -> None:
    policy, held = make(), set[int]()
    for path in ([1, 2, 3], [1, 4], [5, 6]):
        use(policy, held, path, 10)
    assert list(policy.victims())[-2:] == [6, 5]


@pytest.mark.parametrize("make", OURS)
def test_a_parent_is_learnt_from_the_touch_after_the_add(make: Callable[[], LeafFirst]) -> None:
    policy = make()
    for i in range(3):
        policy.add(i + 1)
        policy.touch([1, 2, 3][: i + 1])
    policy.touch([9])
    assert list(policy.victims()) == [3, 2, 1]


def test_calls_that_belong_to_one_use_count_once() -> None:
    counted, apart = LeafFirstLFU(), LeafFirstLFU()
    for policy in (counted, apart):
        for record in (1, 2):
            policy.add(record)
        for path in ([2], [8], [2], [8]):
            policy.touch(path)
    for _ in range(9):
        counted.touch([1])
        apart.touch([1])
        apart.touch([8])
    counted.touch([9])
    assert list(counted.victims()) == [1, 2]
    assert list(apart.victims()) == [2, 1]  # the control: with others in between they are uses of their own


def test_s3fifo_lets_a_scan_pass_by() -> None:
    policy, held = LeafFirstS3FIFO(), set[int]()
    for _ in range(4):
        for record in (1, 2, 3):
            use(policy, held, [record], 20)
    for record in range(100, 200):
        use(policy, held, [record], 20)
    assert {1, 2, 3} <= held
    lru, kept = LeafFirstLRU(), set[int]()
    for record in [1, 2, 3] * 4 + list(range(100, 200)):
        use(lru, kept, [record], 20)
    assert not {1, 2, 3} & kept  # the control: recency alone loses them


def test_s3fifo_takes_what_comes_back_into_the_main_queue() -> None:
    policy, held = LeafFirstS3FIFO(), set[int]()
    for record in [*range(1, 12), 1]:
        use(policy, held, [record], 10)
    assert policy._leaves.queue(1) is True
    assert policy._leaves.queue(11) is False


def test_what_comes_back_is_learnt_to_stay() -> None:
    """Records below 100 come back after 40 others, which never do: recency holds none of them, the statistics do."""
    hits = {}
    for name, make in (("prior", PriorGuided), ("lru", LeafFirstLRU)):
        policy, held, fresh, count = make(), set[int](), 1000, 0
        for _ in range(300):
            for session in range(1, 11):
                count += session in held
                use(policy, held, [session], 20)
                for _ in range(4):
                    fresh += 1
                    use(policy, held, [fresh, fresh + 100000], 20)
        hits[name] = count
    assert hits["lru"] == 0
    assert hits["prior"] > 1500


def test_what_costs_more_stays_longer() -> None:
    policy = PriorGuided(saving=lambda record: 1000.0 if record == 2 else 1.0)
    for record in (1, 2, 3, 4):
        policy.add(record)
        policy.touch([record])
    policy.touch([9])
    assert list(policy.victims())[-1] == 2


@pytest.mark.parametrize("make", OURS)
def test_memory_is_bounded(make: Callable[[], LeafFirst]) -> None:
    policy, held, chance = make(), set[int](), random.Random(seeds.nth(1))
    for _ in range(4000):
        node = chance.randrange(1, 100000)
        use(policy, held, path_of(node), 30)
    leaves = policy._leaves
    assert leaves._entries <= 4 * 30 + 64
    assert max(len(leaves._place), len(leaves._parent), len(leaves._children)) <= 30
    if isinstance(policy, PriorGuided):
        known = 30 + len(policy._ghosts)
        assert 1000 < known <= 31 * (1 + GHOSTS) + FEW_GHOSTS
        assert policy._reuse._cohorts <= 2 * known + 64 + len(policy._cohorts)
        assert policy._reuse._alive == len(policy._known) + len(policy._ghosts)
    if isinstance(policy, LeafFirstS3FIFO):
        assert 0 < len(policy._ghosts) <= 30


def test_the_index_follows_what_was_seen() -> None:
    reuse = Reuse()
    good, bad = reuse.kind("good"), reuse.kind("bad")
    for now in range(1000, 40000, 100):
        reuse.advance(now)
        for kind in (good, bad):
            cohort = reuse.cohort(kind, now)
            for _ in range(20):  # a path of twenty records
                reuse.join(cohort)
                if kind == good:
                    reuse.came_back(cohort, now + 50)
    assert reuse.index(good, 0) > 10 * reuse.index(bad, 0)
    assert reuse.index(good, BOUNDS[-1] * 2) >= 0


def test_before_anything_was_seen_the_oldest_is_worth_least() -> None:
    reuse = Reuse()
    kind = reuse.kind()
    ages = [reuse.index(kind, age) for age in (0, 100, 1000, 10000)]
    assert ages == sorted(ages, reverse=True)
