"""The store that most tests here need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcases import open_store

from kvstore import KVStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path) as opened:
        yield opened
