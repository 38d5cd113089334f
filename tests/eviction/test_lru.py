"""The order in which a tier gives up its records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import LeafFirstLRU


def order(policy: LeafFirstLRU) -> list[int]:
    return list(policy.victims())


def test_the_least_recently_added_goes_first() -> None:
    policy = LeafFirstLRU()
    for record in (3, 1, 2):
        policy.add(record)
    assert order(policy) == [3, 1, 2]


def test_adding_again_counts_as_a_use() -> None:
    policy = LeafFirstLRU()
    for record in (3, 1, 2, 3):
        policy.add(record)
    assert order(policy) == [1, 2, 3]
    assert len(policy) == 3


def test_of_one_prefix_the_end_goes_before_its_beginning() -> None:
    policy = LeafFirstLRU()
    for record in (1, 2, 3):
        policy.add(record)
    policy.touch([1, 2, 3])
    assert order(policy) == [3, 2, 1]


def test_a_touched_prefix_outlives_an_untouched_one() -> None:
    policy = LeafFirstLRU()
    for record in (1, 2, 3, 4):
        policy.add(record)
    policy.touch([1, 2])
    assert order(policy) == [3, 4, 2, 1]


def test_a_shared_beginning_outlives_all_its_ends() -> None:
    policy = LeafFirstLRU()
    for record in (1, 2, 3):
        policy.add(record)
    policy.touch([1, 2])
    policy.touch([1, 3])
    assert order(policy) == [2, 3, 1]


def test_touching_a_record_that_is_not_held_adds_nothing() -> None:
    policy = LeafFirstLRU()
    policy.add(1)
    policy.touch([1, 2, 9])
    assert order(policy) == [1]


def test_a_discarded_record_is_no_victim() -> None:
    policy = LeafFirstLRU()
    policy.add(1)
    policy.add(2)
    policy.discard(1)
    policy.discard(7)
    assert order(policy) == [2]


def test_a_path_may_be_any_iterable() -> None:
    policy = LeafFirstLRU()
    policy.add(1)
    policy.add(2)
    policy.touch(iter([1, 2]))
    assert order(policy) == [2, 1]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 8)),
        st.tuples(st.just("discard"), st.integers(1, 8)),
        st.tuples(st.just("touch"), st.lists(st.integers(1, 8), unique=True)),
    )
)


@given(operations)
def test_victims_are_exactly_what_is_held_in_order_of_last_use(ops: list) -> None:
    policy = LeafFirstLRU()
    clock, used = 0, {}
    for kind, argument in ops:
        if kind == "discard":
            policy.discard(argument)
            used.pop(argument, None)
            continue
        if kind == "add":
            policy.add(argument)
            used[argument] = None
        else:
            policy.touch(argument)
        for record in [argument] if kind == "add" else reversed(argument):
            if record in used:
                clock += 1
                used[record] = clock
    assert order(policy) == sorted(used, key=lambda record: used[record])
    assert len(policy) == len(used)
