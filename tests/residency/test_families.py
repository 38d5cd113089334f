"""Who needs whom: members and their donors, by number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.residency.families import Families


def test_a_member_names_its_donors_in_their_order_and_they_name_it() -> None:
    families = Families()
    families.add(9, [5, 2])
    assert families.donors(9) == (5, 2)
    assert families.members(5) == families.members(2) == [9]
    assert len(families) == 1
    assert families.stats() == {"members": 1, "donors": 2}


def test_members_are_named_by_number() -> None:
    families = Families()
    for member in (30, 10, 20):
        families.add(member, [1])
    assert families.members(1) == [10, 20, 30]


def test_what_stands_alone_has_neither() -> None:
    families = Families()
    assert families.donors(1) == ()
    assert families.members(1) == []
    assert len(families) == 0
    families.remove(1)
    assert families.stats() == {"members": 0, "donors": 0}


def test_a_member_that_is_removed_needs_nothing() -> None:
    families = Families()
    families.add(9, [5, 2])
    families.add(8, [5])
    families.remove(9)
    assert families.donors(9) == ()
    assert families.members(5) == [8]
    assert families.members(2) == []
    assert families.stats() == {"members": 1, "donors": 1}


def test_a_donor_that_is_removed_is_still_needed() -> None:
    families = Families()
    families.add(9, [5])
    families.remove(5)
    assert families.members(5) == [9]
    assert families.donors(9) == (5,)


def test_a_member_that_is_added_again_needs_only_its_new_donors() -> None:
    families = Families()
    families.add(9, [5, 2])
    families.add(9, [3])
    assert families.donors(9) == (3,)
    assert families.members(5) == families.members(2) == []
    assert families.stats() == {"members": 1, "donors": 1}


@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.none() | st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True)),
        max_size=40,
    )
)
def test_both_directions_agree_after_any_history(history: list[tuple[int, list[int] | None]]) -> None:
    families, model = Families(), dict[int, tuple[int, ...]]()
    for member, donors in history:
        if donors is None:
            families.remove(member)
            model.pop(member, None)
        else:
            families.add(member, donors)
            model[member] = tuple(donors)
    for record in range(1, 9):
        assert families.donors(record) == model.get(record, ())
        assert families.members(record) == sorted(m for m, donors in model.items() if record in donors)
    needed = {donor for donors in model.values() for donor in donors}
    assert families.stats() == {"members": len(model), "donors": len(needed)}
    assert len(families) == len(model)
