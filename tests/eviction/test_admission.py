"""What a tier takes in from the tier below."""

from __future__ import annotations

from kvstore.tiers.admission import SecondRead


def test_the_second_read_counts_and_then_it_starts_anew() -> None:
    admission = SecondRead(100)
    assert [admission.again(7, 10) for _ in range(4)] == [False, True, False, True]
    assert [admission.again(n, 10) for n in (1, 2, 1)] == [False, False, True]


def test_only_so_many_bytes_are_remembered_the_oldest_go_first() -> None:
    admission = SecondRead(30)
    for record in (1, 2, 3, 4):
        assert not admission.again(record, 10)
    assert admission.again(2, 10)
    assert not admission.again(1, 10)
    assert admission.again(4, 10)


def test_what_is_larger_than_all_that_is_remembered_is_never_taken_in() -> None:
    admission = SecondRead(30)
    assert [admission.again(1, 31) for _ in range(3)] == [False] * 3
    assert not admission.again(2, 10)
    assert admission.again(2, 10)
