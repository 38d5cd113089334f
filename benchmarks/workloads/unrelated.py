"""Sequences that share nothing: not one prefix, not one passage."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.workloads.arrival import Arrival
from benchmarks.workloads.text import Text

SEQUENCES, TOKENS = 4, 1024
SEQUENCES_QUICK, TOKENS_QUICK = 2, 384


def unrelated(text: Text, quick: bool) -> Iterator[Arrival]:
    for _ in range(SEQUENCES_QUICK if quick else SEQUENCES):
        yield Arrival.of(text.take(TOKENS_QUICK if quick else TOKENS), False)
