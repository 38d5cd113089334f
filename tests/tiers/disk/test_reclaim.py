from __future__ import annotations

import random

from kvstore.config import PAGE_BYTES
from kvstore.tiers.disk.reclaim import Reclaim
from kvstore.tiers.disk.segment import Extent


def test_the_emptiest_segment_is_known_while_records_leave() -> None:
    chance = random.Random(5)
    left = {number: PAGE_BYTES * chance.randrange(1, 6) for number in range(1, 40)}
    space = Reclaim(8 * PAGE_BYTES, live=0, limit=1 << 40, left=dict(left), can_move=False, fixed=frozenset({3}))
    while left:
        number = chance.choice(sorted(left))
        if left[number] > 0:
            left[number] -= PAGE_BYTES
            space.lose(Extent(number, PAGE_BYTES, PAGE_BYTES))
        assert space.enough() == any(nbytes <= 0 for nbytes in left.values())
        assert space.left == left
        if chance.random() < 0.3 and space.take_empty():
            gone = set(left) - set(space.left)
            assert [left.pop(number) for number in gone] == [0]
    assert not space.take_empty()


def test_what_cannot_be_moved_is_no_candidate_until_it_is_empty() -> None:
    full = 10 * PAGE_BYTES
    space = Reclaim(segment=full, live=0, limit=1, left={1: PAGE_BYTES, 2: full}, can_move=True, fixed=frozenset({1}))
    assert not space.enough()  # only segment 2 could be emptied, and it is full
    space.lose(Extent(1, PAGE_BYTES, PAGE_BYTES))
    assert space.take_empty()
    assert space.left == {2: full}


def test_no_record_is_evicted_too_many_where_several_go_at_once() -> None:
    """Whatever sizes they have, up to the largest."""
    chance, largest = random.Random(7), 16 * PAGE_BYTES
    for coming in (None, 0, 50 * PAGE_BYTES):
        space = Reclaim(largest, live=1 << 24, limit=1 << 23, left={1: 1 << 24}, can_move=True, coming=coming)
        turns = 0
        while not space.enough():
            turns += 1
            for _ in range(space.needed(largest)):
                assert not space.enough()
                space.lose(Extent(1, PAGE_BYTES, PAGE_BYTES * chance.randrange(1, 17)))
        assert turns < 40  # of hundreds of records
