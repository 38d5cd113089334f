"""Costs that are fitted to what was observed: right where much was seen, cautious where little was."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from kvstore.gate.curve import F64, Curve, _non_negative
from kvstore.gate.load import LoadCost, Part
from kvstore.gate.prefill import ENOUGH_S, PrefillCost

PASS, TOKEN, PAIR = 0.03, 0.001, 5e-7


def truth(tokens: int, start: int = 0) -> float:
    return PASS + TOKEN * tokens + PAIR * tokens * (start + tokens / 2)


def seen(*lengths: int) -> PrefillCost:
    cost = PrefillCost("cpu")
    for length in lengths:
        cost.observe(length, truth(length), 0)
    return cost


def test_passes_of_many_lengths_give_all_costs() -> None:
    cost = seen(4, 64, 512, 2048, 8000)
    for tokens, start in ((8, 0), (1000, 0), (500, 4000), (16_000, 0)):
        assert cost.seconds(tokens, start) == pytest.approx(truth(tokens, start), rel=0.03)
    want = [truth(9000) - truth(9000 - k, k) for k in (100, 8000)]
    assert cost.saved([100, 8000], 9000).tolist() == pytest.approx(want, rel=0.03)


def test_one_length_says_most_about_its_neighbours() -> None:
    cost = seen(1500)
    assert cost.seconds(1000) == pytest.approx(truth(1000), rel=0.3)
    assert cost.knows(6000)
    assert not cost.knows(6001)


def test_little_is_as_good_as_nothing() -> None:
    cost = PrefillCost("cpu")
    cost.observe(100, ENOUGH_S / 2, 0)
    assert not cost.knows(100)
    cost.observe(100, ENOUGH_S / 2, 0)
    assert cost.knows(100)


def test_the_last_token_is_a_pass_that_takes_as_long_as_some_tokens() -> None:
    cost = seen(16, 64, 512)
    cost.observe(1, 0.05, 500)
    saved, all_saved = cost.saved([16], 17)[0], cost.saved([16], 400)[0]
    assert saved == 0  # both are passes of a few tokens
    assert all_saved == pytest.approx(truth(400) - truth(384, 16), rel=0.1)
    assert all_saved > 0.01
    assert cost.seconds(1, 500) == 0.05


def test_a_thousand_short_passes_do_not_hide_a_long_one() -> None:
    cost = seen(2048, 4096)
    for number in range(1000):
        cost.observe(1 + number % 3, truth(1 + number % 3, 2000), 2000)
    assert cost.seconds(4096) == pytest.approx(truth(4096), rel=0.1)


def test_one_strange_pass_counts_little() -> None:
    cost = seen(256, 256, 256, 1024, 1024, 1024)
    cost.observe(1024, 20.0, 0)
    assert cost.seconds(1024) == pytest.approx(truth(1024), rel=0.1)


def test_what_became_slow_is_believed_after_some_reads() -> None:
    line = Curve(8)
    for _ in range(20):
        line.observe((1.0, 1e6), 0.001)
    for _ in range(20):
        line.observe((1.0, 1e6), 0.1)
    latency, per_byte = line.fit(list)
    assert latency + 1e6 * per_byte == pytest.approx(0.1, rel=0.05)


def test_costs_are_never_negative() -> None:
    line = Curve(8)
    line.observe((1.0, 10.0), 5.0)
    line.observe((1.0, 1000.0), 1.0)  # more in less time: noise
    assert (line.fit(list) >= 0).all()


def test_cells_are_bounded() -> None:
    line = Curve(8)
    for number in range(400):
        line.observe((1.0, 1.2 ** (1 + number)), 1.0)
    assert len(line) <= 64 * 5


def test_reading_and_decoding_overlap_but_for_the_first_range() -> None:
    cost = LoadCost(bytes_per_token=1000, threads=2)
    for nbytes in (10_000, 1_000_000):
        cost.observe_read("disk", nbytes, 0.002 + nbytes * 1e-8)  # 100 MB/s
        cost.observe_decode("slow", nbytes, nbytes * 1e-8)
    part = Part("disk", "slow", 100_000, 100)
    one, *_, all_of_them = cost.seconds([part] * 50, "cpu").tolist()
    assert one == pytest.approx(0.002 + 0.001 + 0.0005, rel=0.15)
    assert all_of_them == pytest.approx(0.002 + 0.05 + 0.025 / 4, rel=0.1)


def test_blocks_in_memory_wait_for_no_tier() -> None:
    cost = LoadCost(bytes_per_token=1000, threads=1)
    cost.observe_read("disk", 1000, 10.0)
    seconds = cost.seconds([Part(None, "raw", 0, 64), Part("disk", "raw", 64_000, 64)], "cpu")
    assert seconds[0] < 0.01 < 5 < seconds[1]
    assert np.all(np.diff(seconds) > 0)


def test_coefficients_are_the_best_of_those_that_are_not_negative() -> None:
    random = np.random.default_rng(3)
    for width in (2, 3):
        for _ in range(50):
            sizes = np.exp(random.uniform(0, 10, 12))
            rows = np.stack([sizes**power for power in range(width)], 1) * np.exp(random.normal(0, 1, 12))[:, None]
            wanted = random.uniform(0.5, 2, 12)
            found = _non_negative(rows, wanted)
            errors = [float(((rows @ one - wanted) ** 2).sum()) for one in [found, *_by_subsets(rows, wanted)]]
            assert (found >= 0).all()
            assert errors[0] <= min(errors) * (1 + 1e-9)


def test_columns_that_say_the_same_are_no_error() -> None:
    rows = np.array([[1.0, 2.0], [2.0, 4.0]])
    assert rows @ _non_negative(rows, np.array([3.0, 6.0])) == pytest.approx([3.0, 6.0])


def _by_subsets(rows: F64, wanted: F64) -> Iterator[F64]:
    """The least squares of every subset of the columns whose coefficients are not negative."""
    for members in product((False, True), repeat=rows.shape[1]):
        some = np.zeros(rows.shape[1])
        some[list(members)] = np.linalg.lstsq(rows[:, list(members)], wanted, rcond=None)[0]
        if (some >= 0).all():
            yield some
