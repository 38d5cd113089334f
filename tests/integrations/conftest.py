"""Tiny models of several families."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny


@pytest.fixture(params=["llama", "qwen3", "gpt2", "gemma3-full"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture
def llama() -> Any:
    return tiny("llama")
