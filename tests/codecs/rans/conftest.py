"""The entropy coder's levels: `twin` is each of them, skipped where this machine has it not."""

from __future__ import annotations

import pytest
from ranscases import HAVE

from kvstore.codecs.levels import LEVELS


@pytest.fixture(params=LEVELS)
def twin(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in HAVE:
        pytest.skip(f"this machine has no {name}")
    return name
