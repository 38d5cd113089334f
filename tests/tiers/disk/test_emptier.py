from __future__ import annotations

import random

from kvstore.tiers.disk.emptier import Emptier
from kvstore.tiers.disk.segment import Segment


def test_the_emptiest_usable_segment_is_found_as_a_look_at_all_would() -> None:
    chance = random.Random(3)
    segments = {number: Segment(number, live=chance.randrange(1, 50)) for number in range(1, 30)}
    emptier, listed = Emptier(segments), dict.fromkeys(segments, True)
    for _ in range(3000):
        segment = segments[chance.choice(sorted(segments))]
        if segment.live and chance.random() < 0.7:
            segment.live -= chance.randint(1, segment.live)
            segment.deaths += 1
            emptier.died(segment)
            listed[segment.number] = True
        elif chance.random() < 0.5:
            segment.live += chance.randrange(1, 50)  # written to: its spaces were used
            listed[segment.number] = False
        elif chance.random() < 0.3:
            segment.tight = segment.deaths
        most, barred = chance.randrange(60), chance.sample(sorted(segments), 5)
        found = emptier.find(most, lambda segment, barred=barred: segment.number not in barred)
        there = [
            s.live
            for s in segments.values()
            if 0 < s.live <= most and not s.is_closed and s.number not in barred and listed[s.number]
        ]
        assert (found.live if found else None) == min(there, default=None) or (
            found is not None and found.live < min(there, default=60)  # listed anew with all others
        )
        assert len(emptier._rows) <= 4 * len(segments) + 64 + 1


def test_rows_do_not_grow_with_deaths() -> None:
    segments = {1: Segment(1, live=10_000)}
    emptier = Emptier(segments)
    for live in range(9_999, 0, -1):
        segments[1].live = live
        emptier.died(segments[1])
        assert len(emptier._rows) <= 70
    assert emptier.find(1, lambda segment: True) is segments[1]
