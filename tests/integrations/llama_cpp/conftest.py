"""A tiny model, and what belongs to it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from llamas import Llama, write_gguf


@pytest.fixture(scope="session")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("llama") / "tiny.gguf")


@pytest.fixture
def llama(gguf_path: Path) -> Iterator[Llama]:
    if find_spec("xllamacpp") is None:
        pytest.skip("could not import 'xllamacpp'")
    model = Llama(gguf_path)
    yield model
    model.close()
