"""Prompts for SmolLM2, and what vLLM answers to them without a store. `make test-vllm` runs this folder."""

from __future__ import annotations

from typing import Any

import pytest
import vllmruns

SENTENCES = "".join(f"Item {i} has the colour {('red', 'green', 'blue')[i % 3]}. " for i in range(120))


@pytest.fixture(scope="session", autouse=True)
def needs_vllm() -> None:
    if not vllmruns.PYTHON:
        pytest.skip("vLLM is not installed here; make test-vllm installs it beside")


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """605 tokens that go on in a way that no last bit changes."""
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(vllmruns.MODEL)(SENTENCES).input_ids[:605]
    assert len(ids) == 605
    return ids


@pytest.fixture(scope="session")
def hundred(prompt: list[int]) -> list[list[int]]:
    """A hundred prompts that begin alike and end at different places."""
    return [prompt[: 505 + i] for i in range(100)]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, prompt: list[int], hundred: list[list[int]]) -> Any:
    """What vLLM says without a store: to the prompt, and to the hundred."""
    rounds = [{"prompts": [prompt], "new": 60}, {"prompts": hundred, "new": 4}]
    done = vllmruns.run(tmp_path_factory.mktemp("plain"), rounds)
    return [[one["text"] for one in answers] for answers in done["rounds"]]
