"""A growing session takes no more of the disk than the caches that it would otherwise keep in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmodules import load

from kvstore import StoreConfig, TierConfig


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral", "llama4", "qwen3-next", "mamba2", "falcon-h1"])
def test_six_turns_take_no_more_than_the_caches_at_their_ends(name: str, tmp_path: Path) -> None:
    growing: Any = load("growing")
    config = StoreConfig(host=TierConfig(0), disk=TierConfig(256 << 20, "entropy"), segment_bytes=4 << 20)
    turns = growing.grown(name, tmp_path, config)
    assert [turn.resumed for turn in turns] == [0, *(turn.tokens for turn in turns[:-1])]
    for part in (turns[:1], turns):
        stored, cache = (sum(getattr(turn, field) for turn in part) for field in ("stored_bytes", "cache_bytes"))
        assert stored <= cache
    assert all(turn.is_exact for turn in turns)
