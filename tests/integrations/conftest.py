"""Tiny models of several families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import tiny


@pytest.fixture(params=["llama", "qwen3", "gpt2", "gemma3-full"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture
def llama() -> Any:
    return tiny("llama")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models take a hundred times longer where threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
