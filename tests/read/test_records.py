"""Records of a get that are decoded together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kvcases import same_kv
from lazyhits import lazily
from predicted_stores import COUNT, TOKENS, contents, predicted_store

from kvstore.codecs.in_order import Native
from kvstore.codecs.predictive.levels.mode import LevelMode
from kvstore.read import get
from kvstore.timing import Timing


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each call decodes together."""
    found, together = list[int](), Native.together

    def counted(blocks: Sequence[Native], end: int) -> None:
        found.append(len(blocks))
        together(blocks, end)

    monkeypatch.setattr(Native, "together", staticmethod(counted))
    return found


def test_blocks_from_disk_are_decoded_together_and_timed_one_by_one(tmp_path: Path, calls: list[int]) -> None:
    with predicted_store(tmp_path, "predictive:3", threads=1) as store:
        hit = store.get(TOKENS)
        assert hit is not None
        assert same_kv(hit.layers, contents("predictive:3"))
        assert sorted(calls) == [2, 2]  # of four blocks, as many for each half
        decoded = store.metrics.timings.by_place(Timing.DECODE)
        assert {where.codec: sum(times.counts) for where, times in decoded.items()} == {"predictive": 4}


def test_first_layers_are_decoded_together_too(
    tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get, "free_processors", lambda: 1)
    with predicted_store(tmp_path, "predictive:1", threads=1) as store:
        hit = lazily(store, TOKENS)
        assert calls[:2] == [2, 2]  # and then, perhaps, what comes later
        assert same_kv(tuple(hit.layers), contents("predictive:1"))


def test_blocks_of_the_host_tier_are_decoded_together(tmp_path: Path, calls: list[int]) -> None:
    with predicted_store(tmp_path, "predictive:2", threads=1, host=1 << 24) as store:
        for _ in range(3):  # from disk, from disk for the host tier, and from there
            calls.clear()
            hit = store.get(TOKENS)
            assert hit is not None
            assert same_kv(hit.layers, contents("predictive:2"))
        assert hit.tiers == {"host": COUNT}
        assert max(calls) > 1


@pytest.mark.parametrize("bad", range(4))
def test_what_comes_before_a_damaged_block_is_returned(
    tmp_path: Path, calls: list[int], bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a block that was damaged before it was sealed, whose checksums are right."""
    encode = LevelMode._encode_on_cpu

    def spoilt(mode: Any, info: Any, view: Any, out: memoryview, limit: int) -> Any:
        sizes = encode(mode, info, view, out, limit)
        if isinstance(sizes, tuple) and info.start == 16 * bad:
            end = sum(sizes)
            out[end - sizes[-1] + 20 : end] = b"\xff" * (sizes[-1] - 20)
        return sizes

    with monkeypatch.context() as spoiling:
        spoiling.setattr(LevelMode, "_encode_on_cpu", spoilt)
        store = predicted_store(tmp_path, "predictive:1", threads=1)
    with store:
        hit = store.get(TOKENS)
        assert max(calls) > 1
        assert (0 if hit is None else hit.tokens) == 16 * bad
        assert hit is None or same_kv(hit.layers, contents("predictive:1"), 16 * bad)
        assert store.stats()["counters"]["damaged_codec"] == 1
        assert store.check().problems == ()
