"""The history as values and bytes: bounded, joined where it is old, and no bytes make it fail."""

from __future__ import annotations

import numpy as np
import pytest
import seeds

from kvstore.core.history import COUNTED, MOST_SAMPLES, SIZES, TIMED, Sample, added, pack, unpack
from kvstore.metrics import Metric
from kvstore.timing import BUCKETS, Histogram


def sample(minute: int, gets: int = 1) -> Sample:
    bins = Histogram((gets, *[0] * len(BUCKETS)), gets * 0.00005)
    counts = dict.fromkeys(COUNTED, 0) | {Metric.GET_HITS: gets, Metric.GET_TOKENS: 100 * gets}
    counts[Metric.GET_HIT_TOKENS_HOST] = counts[Metric.GET_HIT_TOKENS_DISK] = 25 * gets
    begin = 1.7e9 + 60 * minute
    return Sample(begin, begin + 60, 60.0, counts, dict.fromkeys(SIZES, minute), dict.fromkeys(TIMED, bins))


def test_what_was_packed_comes_back() -> None:
    samples = tuple(sample(minute, minute + 1) for minute in range(MOST_SAMPLES))
    assert unpack(pack(samples)) == samples
    assert len(pack(samples)) <= 32 << 10
    assert unpack(pack(())) == ()


def test_it_never_grows_beyond_its_bound_and_loses_no_count() -> None:
    history: tuple[Sample, ...] = ()
    for minute in range(1000):
        history = added(history, sample(minute))
        assert len(history) <= MOST_SAMPLES
    assert sum(each.counts[Metric.GET_HITS] for each in history) == 1000
    assert sum(each.timings[TIMED[0]].total for each in history) == 1000
    assert sum(each.seconds for each in history) == 60_000
    assert [each.end for each in history[:-1]] == [each.begin for each in history[1:]]
    lengths = [each.end - each.begin for each in history]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-40:] == [60.0] * 40
    assert history[-1].sizes["disk_bytes"] == 999


def test_rates() -> None:
    assert sample(0, 4).hit_rate == 0.5
    assert Sample(0.0, 1.0, 1.0).hit_rate is None


def test_no_bytes_make_it_fail() -> None:
    good, draw = pack([sample(minute) for minute in range(3)]), np.random.default_rng(seeds.nth(1))
    for _ in range(300):
        data = bytearray(good)
        for place in draw.integers(0, len(data), draw.integers(1, 20)):
            data[place] = draw.integers(0, 256)
        for each in unpack(bytes(data[: draw.integers(len(data) + 1)] if draw.integers(2) else data)):
            assert 0 <= each.begin <= each.end <= 2**53
            assert min(*each.counts.values(), *each.sizes.values(), each.seconds) >= 0


@pytest.mark.parametrize("place", [0, 8, 16, 24, 144, 312])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e300])
def test_numbers_that_no_store_has_counted_are_not_believed(place: int, value: float) -> None:
    data = bytearray(pack([sample(0)]))
    data[place : place + 8] = np.array([value], "<f8").tobytes()
    assert unpack(bytes(data)) == ()
