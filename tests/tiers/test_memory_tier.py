"""The device and host tiers: a budget that holds at every moment, and what is given up for it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import LeafFirstLRU
from kvstore.tiers.memory import MemoryTier


@dataclass(frozen=True)
class Item:
    nbytes: int


class Harness:
    """A tier of 100 bytes, what it was told may not go, and what it said went."""

    def __init__(self, budget: int = 100) -> None:
        self.kept: set[int] = set()
        self.gone: list[int] = []
        self.tier: MemoryTier[Item] = MemoryTier(
            "host", budget, LeafFirstLRU(), lambda record: record not in self.kept, self.gone.append
        )

    def add(self, record: int, nbytes: int) -> bool:
        return self.tier.add(record, Item(nbytes))


def test_what_fits_is_held() -> None:
    h = Harness()
    assert h.add(1, 60)
    assert h.add(2, 40)
    assert (h.tier.nbytes, len(h.tier), h.gone) == (100, 2, [])
    assert h.tier.get(1) == Item(60)
    assert 1 in h.tier
    assert 3 not in h.tier
    assert h.tier.get(3) is None


def test_the_least_recently_used_goes_for_a_new_one() -> None:
    h = Harness()
    for record in (1, 2, 3, 4):
        h.add(record, 25)
    h.tier.touch([1])
    assert h.add(5, 50)
    assert h.gone == [2, 3]
    assert h.tier.nbytes == 100


def test_of_one_prefix_the_end_goes_first() -> None:
    h = Harness()
    for record in (1, 2, 3, 4):
        h.add(record, 25)
    h.tier.touch([1, 2, 3, 4])
    h.add(5, 25)
    assert h.gone == [4]


def test_no_more_goes_than_has_to() -> None:
    h = Harness()
    for record in (1, 2, 3, 4):
        h.add(record, 25)
    h.add(5, 1)
    assert h.gone == [1]


def test_what_may_not_go_stays_and_the_next_one_goes() -> None:
    h = Harness()
    h.kept = {1, 2}
    for record in (1, 2, 3, 4):
        h.add(record, 25)
    assert h.add(5, 30)
    assert h.gone == [3, 4]
    assert {1, 2, 5} == {r for r in range(9) if r in h.tier}


def test_an_item_that_cannot_be_made_to_fit_changes_nothing() -> None:
    h = Harness()
    h.kept = {1}
    h.add(1, 60)
    h.add(2, 40)
    assert not h.add(3, 50)
    assert (h.gone, h.tier.nbytes, len(h.tier)) == ([], 100, 2)
    assert not h.add(4, 101)
    assert h.gone == []


def test_a_tier_without_budget_takes_nothing() -> None:
    h = Harness(budget=0)
    assert not h.add(1, 1)
    assert (len(h.tier), h.tier.nbytes) == (0, 0)


def test_a_replaced_item_is_charged_instead_of_the_old_one() -> None:
    h = Harness()
    h.add(1, 60)
    assert h.add(1, 90)
    assert h.tier.nbytes == 90
    assert h.add(1, 10)
    assert (h.tier.nbytes, len(h.tier), h.gone) == (10, 1, [])


def test_a_replacement_that_needs_room_evicts_others_and_not_itself() -> None:
    h = Harness()
    h.add(1, 50)
    h.add(2, 50)
    assert h.add(1, 60)
    assert h.gone == [2]
    assert h.tier.get(1) == Item(60)


def test_a_replacement_that_does_not_fit_leaves_the_old_item() -> None:
    h = Harness()
    h.add(1, 50)
    assert not h.add(1, 101)
    assert h.tier.get(1) == Item(50)


def test_removing_tells_nobody() -> None:
    h = Harness()
    h.add(1, 50)
    assert h.tier.remove([1])
    assert not h.tier.remove([1])
    assert (h.gone, h.tier.nbytes) == ([], 0)


def test_clearing_leaves_nothing() -> None:
    h = Harness()
    h.add(1, 50)
    h.add(2, 10)
    h.tier.clear()
    assert (len(h.tier), h.tier.nbytes, h.gone) == (0, 0, [])
    assert h.add(3, 100)


def test_whoever_is_told_of_an_eviction_may_use_the_tier() -> None:
    tier: MemoryTier[Item]
    seen: list[tuple[int, int]] = []

    def evicted(record: int) -> None:
        tier.remove([2])
        seen.append((record, tier.nbytes))

    tier = MemoryTier("host", 100, LeafFirstLRU(), lambda record: True, evicted)
    tier.add(1, Item(50))
    tier.add(2, Item(50))
    assert tier.add(3, Item(40))
    assert seen == [(1, 40)]


operations = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "touch", "keep", "free"]), st.integers(1, 9), st.integers(0, 60)),
    max_size=60,
)


@given(operations)
def test_the_budget_and_the_sum_hold_after_every_operation(ops: list[tuple[str, int, int]]) -> None:
    h = Harness()
    held: dict[int, int] = {}
    for kind, record, nbytes in ops:
        if kind == "add":
            kept_before = {r: held[r] for r in h.kept if r in held and r != record}
            if h.add(record, nbytes):
                held[record] = nbytes
            for gone in h.gone:
                del held[gone]
            h.gone.clear()
            assert kept_before.items() <= held.items()
        elif kind == "remove":
            assert h.tier.remove([record]) == (held.pop(record, None) is not None)
        elif kind == "touch":
            h.tier.touch([record])
        elif kind == "keep":
            h.kept.add(record)
        else:
            h.kept.discard(record)
        assert h.tier.nbytes == sum(held.values()) <= h.tier.budget
        assert {r for r in range(10) if r in h.tier} == set(held)


@pytest.mark.parametrize("budget", [1, 99, 1000])
def test_a_stream_of_records_never_exceeds_the_budget(budget: int) -> None:
    h = Harness(budget)
    for record in range(1, 500):
        h.add(record, record % 37)
        assert h.tier.nbytes <= budget
