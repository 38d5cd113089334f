"""Tiny models of several families, and a store for one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scorecases import handed_to
from tiny_models import tiny

from kvstore import KVStore, ModelIdentity


@pytest.fixture(params=["llama", "qwen3", "gpt2", "gemma3-full"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture
def llama() -> Any:
    return tiny("llama")


@pytest.fixture
def store(tmp_path: Path, llama: Any, request: pytest.FixtureRequest) -> Iterator[KVStore]:
    """A store for the llama, with the config `CONFIG` of the test's module."""
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama), request.module.CONFIG) as opened:
        yield opened


@pytest.fixture
def handed(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Any]]:
    """The tokens and log-probabilities of every put."""
    return handed_to(store, monkeypatch)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models take a hundred times longer where threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
