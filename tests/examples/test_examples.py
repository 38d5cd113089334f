"""Every example runs, and its user sees the gain: with a tiny model here, as `--quick`; `make examples` runs them at
full size."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import calibrated
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
HELPERS = {"smollm2", "stopwatch"}
# For each: arguments of a run with a model of chance weights, and what must be in the text that it prints.
EXPECTED = {
    "agent": ([], r"\n   2 +(\d+) +([1-9]\d?) .*\n(?s:.*)[1-9]\d* came from the store"),
    "rag": (["--max-kl", "1000"], r"passages in other company +(\d\d?\d?) "),
    "chat_server": ([], r"round 3: +\d+ prompt tokens, +0 from memory, +([1-9]\d*) from disk"),
    "warm_cluster": (["--workers", "1"], r"\n   1 +(\d+) +(\d\d?) "),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    calibrated.model(max_position_embeddings=8192).save_pretrained(folder)
    calibrated.tokenizer().save_pretrained(folder)
    return folder


def test_every_example_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == EXPECTED.keys() | HELPERS


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_runs(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    more, expected = EXPECTED[name]
    module.main(["--quick", "--model", str(checkpoint), *more])
    printed = capfd.readouterr().out
    assert re.search(expected, printed), printed
