"""Stores here are small: few blocks are enough to learn from."""

from __future__ import annotations

import learncases
import pytest

from kvstore.learning import trial


@pytest.fixture(autouse=True)
def _few_blocks_teach_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LEAST_TOKENS", (learncases.ENOUGH - 1) * learncases.LENGTH)
