"""What the tests of families share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import small_stores


@pytest.fixture
def path() -> Iterator[Path]:
    """Where a store may be made, in memory if the machine can."""
    with small_stores.scratch() as folder:
        yield folder / "store"
