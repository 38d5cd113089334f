"""Timed reads of a tier: short ones, repeated where a busy processor may have held them up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.gate import probe
from kvstore.gate.probe import timed_reads

KIB = 1024
Reads = Callable[[list[float]], list[tuple[int, float]]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What is found of a record of 4 MiB whose reads take so long, one after the other; all others as the last."""

    def timed(seconds: list[float]) -> list[tuple[int, float]]:
        now, left = [0.0], list(seconds)

        def read(sources: Any, buffers: Any) -> None:
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        tier, pool = SimpleNamespace(read=read), SimpleNamespace(take=lambda nbytes: bytearray(nbytes))
        return [(nbytes, round(took, 6)) for nbytes, took in timed_reads(tier, SimpleNamespace(nbytes=4 << 20), pool)]  # type: ignore[type-var, arg-type]

    return timed


def test_quick_storage_is_read_in_every_size(reads: Reads) -> None:
    assert reads([1e-4, 2e-4, 3e-4]) == [(4 * KIB, 1e-4), (64 * KIB, 2e-4), (512 * KIB, 3e-4)]


def test_reads_that_were_held_up_are_repeated(reads: Reads) -> None:
    found = reads([0.003, 0.003, 0.002, 1e-4, 2e-4, 0.004, 3e-4])
    assert found == [(4 * KIB, 1e-4), (64 * KIB, 2e-4), (512 * KIB, 3e-4)]


def test_slow_storage_is_read_in_two_sizes_and_twice_each(reads: Reads) -> None:
    assert reads([0.05, 0.04, 0.07, 0.06, 9.0]) == [(4 * KIB, 0.04), (64 * KIB, 0.06)]


def test_storage_that_cannot_be_read_tells_nothing() -> None:
    def read(sources: Any, buffers: Any) -> None:
        raise OSError(5, "Input/output error")

    tier, pool = SimpleNamespace(read=read), SimpleNamespace(take=lambda nbytes: bytearray(nbytes))
    assert timed_reads(tier, SimpleNamespace(nbytes=4096), pool) == []  # type: ignore[type-var, arg-type]
