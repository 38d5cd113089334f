"""What tests of layers that are read after their get have in common."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config import KIB
from kvstore.read import get, stripes
from kvstore.read.layerwise import LayerDecode
from kvstore.read.stripes import StripeReader
from kvstore.residency import block


@pytest.fixture
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small records are read in parts; the model leaves a processor, whatever machine this is."""
    monkeypatch.setattr(get, "free_processors", lambda: 1)
    monkeypatch.setattr(block, "_LEAST_FOR_SUMS", 64 * KIB)
    monkeypatch.setattr(stripes, "_PART_BYTES", 16 * KIB)
    monkeypatch.setattr(stripes, "_LEAST_BYTES", 64 * KIB)
    monkeypatch.setattr(stripes, "_AHEAD_BYTES", 64 * KIB)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StripeReader]:
    """What reads layers later, as it is made."""
    made: list[StripeReader] = []
    init = StripeReader.__init__

    def noted(self: StripeReader, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(StripeReader, "__init__", noted)
    return made


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's threads decode no layers: whoever waits for them does."""
    monkeypatch.setattr(LayerDecode, "_line_up", lambda later: None)
