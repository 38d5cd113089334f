"""The worth of a donor's tokens: the law itself, and that the index in C++ chooses by it."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.trie._content import ContentIndex as Native
from kvstore.trie.reference.content import ReferenceContent
from kvstore.trie.worth import FAR, UNIT, span_worth, token_worth, weight

NONE = np.zeros(0, np.uint64)


def test_worth_rises_from_the_seam_to_one() -> None:
    assert token_worth(0) == 0.6
    assert token_worth(64) == pytest.approx(0.8)
    assert 0.99 < token_worth(10_000) < 1
    assert span_worth(5, 3) == pytest.approx(token_worth(5) + token_worth(6) + token_worth(7))
    assert span_worth(0, 0) == 0


def test_the_index_s_fixed_point_is_the_same_law() -> None:
    for distance in (0, 1, 2, 63, 64, 65, 1000, FAR):
        assert weight(distance) / UNIT == pytest.approx(token_worth(distance), abs=2 / UNIT)
    assert weight(FAR + 1) == weight(1 << 20) == weight(FAR)
    assert (weight(0), weight(64)) == (39322, 39322 + 13107)


@pytest.mark.native
@pytest.mark.parametrize("kind", [Native, ReferenceContent])
@pytest.mark.parametrize("run", [1, 5, 16, 64, 200, 1000, 4000])
@pytest.mark.parametrize("length", [16, 64, 300])
def test_the_index_takes_the_span_that_is_worth_more(kind: type, run: int, length: int) -> None:
    """A donor has `length` tokens that begin `run` tokens behind its seam; another has these and some more, behind a
    seam of its own. The shortest one that is taken instead says what the index thinks that the first is worth."""
    old = sum(weight(distance) for distance in range(run, run + length))
    least = length
    while sum(weight(distance) for distance in range(least)) < old:
        least += 1
    assert least > length
    for more, wins in ((least - 1, False), (least + 1, True)):
        assert taken(kind, run, length, more) == (2 if wins else 1)


def taken(kind: type, run: int, length: int, more: int) -> int:
    """The record that the first token of interest is taken from: 1, or 2 with `more` tokens."""
    index = kind(8, 1, 8, 8, 1)
    query = np.arange(run + max(length, more), dtype=np.uint32)
    index.insert(0, 1, 0, np.concatenate([query[: run + length], np.full(4, 1 << 20, np.uint32)]))
    index.insert(0, 2, 0, np.concatenate([np.full(4, 1 << 21, np.uint32), query[run : run + more]]))
    _, _, records, *_ = index.find(0, query, run, NONE)
    return int(records[0])
