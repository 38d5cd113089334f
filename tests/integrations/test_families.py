"""A model of each way to keep a cache: what a store gives back goes on like the cache that stayed in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import causal_models
import pytest
import torch
import transformers
from benchmodules import load

NAMES = (
    *(
        "BailingHybrid",
        "Blenderbot",
        "CohereCompassText",
        "Dbrx",
        "Dots3NoteText",
        "Gemma4Unified",
        "Git",
        "GlmMoeDsa",
        "InklingText",
        "Jamba",
    ),
    *("KimiLinear", "Llama4", "LongcatFlash", "Mamba2", "Ministral", "Mllama", "Qwen3_5Moe", "Zamba", "Zamba2", "Zaya"),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_back_from_disk_goes_on_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    families: Any = load("families")
    monkeypatch.setattr(causal_models, "MOST_PARAMETERS", families.MOST_PARAMETERS)
    with causal_models.quiet():
        model = families.small(getattr(transformers, f"{name}Config"))
        assert families.kinds_of(model)
        assert families.difference(model, 45) == ""
