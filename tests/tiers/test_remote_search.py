"""How far a sequence is stored is found with few questions, and never said to be more than what was answered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.tiers.remote.beliefs import Beliefs
from kvstore.tiers.remote.search import leading

KEYS = [bytes([i]) for i in range(100)]


def _asked(stored: int, batch: int, believed: dict[bytes, bool] | None = None) -> tuple[int, int]:
    """(what is found of a sequence of which so many blocks are there, how often it asked)."""
    calls = 0

    def ask(keys: Sequence[bytes]) -> list[bool | None]:
        nonlocal calls
        calls += 1
        assert len(keys) <= batch
        return [key[0] < stored for key in keys]

    return leading(KEYS, (believed or {}).get, ask, batch), calls


@pytest.mark.parametrize("batch", [1, 2, 7, 16, 64, 100, 1000])
@pytest.mark.parametrize("stored", [0, 1, 2, 50, 98, 99, 100])
def test_it_is_found_in_few_rounds(stored: int, batch: int) -> None:
    found, rounds = _asked(stored, batch)
    assert found == stored
    most, left = 0, len(KEYS)
    while left > 0:
        most, left = most + 1, 0 if left <= batch else -(-left // (batch + 1))
    assert rounds <= most + 1


def test_what_is_believed_is_not_asked_for() -> None:
    assert _asked(50, 1000, {key: key[0] < 50 for key in KEYS}) == (50, 0)
    assert _asked(50, 1000, {KEYS[0]: False}) == (0, 0)
    found, rounds = _asked(50, 1000, {KEYS[0]: True, KEYS[70]: False})
    assert (found, rounds) == (50, 1)


def test_no_answer_ends_the_search() -> None:
    assert leading(KEYS, lambda key: None, lambda keys: [None] * len(keys), 10) == 0
    assert leading(KEYS, {KEYS[0]: True}.get, lambda keys: [None] * len(keys), 10) == 1


def test_beliefs_end_and_a_loss_takes_what_is_behind() -> None:
    now = [0.0]
    beliefs = Beliefs(30.0, 2.0, lambda: now[0])
    beliefs.note(KEYS[:5], True)
    beliefs.note(KEYS[5:6], False)
    beliefs.lost(KEYS[2:5])
    assert [beliefs.of(key) for key in KEYS[:7]] == [True, True, False, None, None, False, None]
    now[0] = 2.0
    assert [beliefs.of(key) for key in KEYS[:7]] == [True, True, None, None, None, None, None]
    now[0] = 30.0
    assert [beliefs.of(key) for key in KEYS[:3]] == [None] * 3


def test_beliefs_are_bounded() -> None:
    beliefs = Beliefs(30.0, 2.0)
    beliefs.note((i.to_bytes(4, "little") for i in range(200_000)), True)
    assert len(beliefs) == 1 << 16
