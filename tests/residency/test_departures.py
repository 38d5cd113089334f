"""The log of what left: what it remembers of which block, and what it forgets."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_key, namespace_digest
from kvstore.core.tokens import Tokens
from kvstore.residency import departures
from kvstore.residency.departures import BlockName, Departures

SPACE = namespace_digest(b"")
ROOT = bytes(range(32))


def ids(*values: int) -> Tokens:
    return np.array(values, np.uint32)


def name(*tokens: int, parent: bytes = ROOT, start: int = 4, space: bytes = SPACE) -> BlockName:
    return BlockName.of(chain_key(parent, ids(*tokens)), parent, space, start, ids(*tokens))


def why(log: Departures, *tokens: int, known: int = 0, parent: bytes = ROOT, start: int = 4) -> Reason | None:
    return log.why(parent, SPACE, start, ids(*tokens), known)


def test_nothing_is_known_of_an_empty_log() -> None:
    assert why(Departures(), 1, 2, 3, 4) is None


def test_a_block_is_known_by_all_of_it_by_a_part_and_by_what_goes_beyond_it() -> None:
    log = Departures()
    log.add(name(1, 2, 3), Reason.EVICTED)
    asked = [(1, 2, 3), (1, 2), (1, 2, 3, 4), (1, 9), (9, 2, 3), (2,)]
    assert [why(log, *tokens) is Reason.EVICTED for tokens in asked] == [True, True, True, True, False, False]


def test_what_is_known_already_does_not_count() -> None:
    log = Departures()
    log.add(name(1, 2, 3), Reason.DELETED)
    assert [why(log, 1, 2, 9, known=known) for known in range(3)] == [Reason.DELETED, Reason.DELETED, None]


def test_the_block_with_most_tokens_in_common_decides_and_of_equal_ones_the_newest() -> None:
    log = Departures()
    log.add(name(1, 2, 3), Reason.EVICTED)
    log.add(name(1, 2), Reason.DELETED)
    assert why(log, 1, 2, 3, 4) is Reason.EVICTED
    assert why(log, 1, 2) is Reason.DELETED
    log.add(name(1, 2, 3, 7), Reason.EXPIRED)
    assert why(log, 1, 2, 3, 4) is Reason.EXPIRED


def test_a_block_that_left_twice_left_for_the_last_reason() -> None:
    log = Departures()
    log.add(name(1, 2), Reason.EVICTED)
    log.add(name(1, 2), Reason.DAMAGED)
    assert (len(log), why(log, 1, 2)) == (1, Reason.DAMAGED)


def test_a_block_that_arrives_is_no_longer_gone() -> None:
    log = Departures()
    log.add(name(1, 2), Reason.EVICTED)
    log.add(name(1, 3), Reason.EVICTED)
    log.arrived([chain_key(ROOT, ids(1, 2)), chain_key(ROOT, ids(5))])
    assert (len(log), why(log, 1, 2, known=1), why(log, 1, 3)) == (1, None, Reason.EVICTED)
    log.arrived([chain_key(ROOT, ids(1, 3))])
    assert (len(log), log._after, log._bytes) == (0, {}, 0)


def test_blocks_behind_others_and_first_blocks_of_other_namespaces_are_not_mixed_up() -> None:
    log = Departures()
    log.add(name(1, 2, parent=bytes(32)), Reason.EVICTED)
    log.add(name(1, 2, start=0, space=namespace_digest(b"other")), Reason.DELETED)
    assert why(log, 1, 2) is None
    assert why(log, 1, 2, start=0) is None
    assert why(log, 1, 2, parent=bytes(32)) is Reason.EVICTED


def test_a_record_is_known_once_its_entry_was_found() -> None:
    log = Departures()
    log.found([(7, name(1, 2))])  # nobody asked
    assert why(log, 1, 2) is None
    log.expect(7, Reason.EXPIRED)
    assert log.expects(7)
    log.found([(7, name(1, 2))])
    assert (why(log, 1, 2), log.expects(7)) == (Reason.EXPIRED, False)


@pytest.mark.parametrize("limits", [{"most_blocks": 3}, {"most_tokens": 7}])
def test_the_oldest_is_forgotten_first(limits: dict[str, int]) -> None:
    log = Departures(**limits)
    for first in range(10):
        log.add(name(first, 1), Reason.EVICTED)
        log.expect(first, Reason.EVICTED)
    assert [first for first in range(10) if why(log, first, 1)] == [7, 8, 9]
    assert len(log._expected) == 3 or "most_tokens" in limits


def test_of_many_behind_one_block_each_is_found_among_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many followed one block, a question looks at the neighbours of its place alone."""
    log, shared, looks = Departures(), departures._shared, []
    for last in range(16_000):
        log.add(name(1, 2, 3, last), Reason.EVICTED)
    monkeypatch.setattr(departures, "_shared", lambda *two: looks.append(two) or shared(*two))
    asked = range(0, 16_000, 160)
    assert all(why(log, 1, 2, 3, last, known=3) for last in asked)
    assert why(log, 1, 2, 3, 77_777, known=3) is None
    assert len(asked) < len(looks) <= 4 * (len(asked) + 1)
