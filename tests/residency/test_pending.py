"""The lowest number among the blocks that wait, after any comings and goings."""

from __future__ import annotations

import random
from typing import Any, cast

from kvstore.residency.pending import Pending
from kvstore.trie.index import NO_LIMIT


def test_the_lowest_number_is_that_of_a_plain_dict() -> None:
    rng, pending, plain = random.Random(0), Pending(), dict[int, Any]()
    for step in range(5000):
        if rng.random() < (0.6 if step % 1000 < 500 else 0.3):
            number = step if rng.random() < 0.9 else rng.randrange(5000)
            pending[number] = plain[number] = cast(Any, object())
        elif plain:
            number = rng.choice(list(plain)) if rng.random() < 0.5 else next(iter(plain))
            assert pending.pop(number) is plain.pop(number)
        assert pending == plain
        if rng.random() < 0.5:
            assert pending.first() == min(plain, default=NO_LIMIT)
        assert len(pending._numbers) <= 2 * len(pending) + 64 + 500


def test_numbers_of_blocks_that_left_are_not_kept_for_ever() -> None:
    pending = Pending()
    for number in range(10_000):
        pending[number] = cast(Any, object())
        pending.pop(number)
    assert len(pending._numbers) < 100
    assert pending.first() == NO_LIMIT
