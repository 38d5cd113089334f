"""No benchmark measures on what a profile was fitted to. No model and none of the installed conversations is needed."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from benchmodules import ROOT, load

conversations = load("conversations")
# Those that fit something, or have a store learn: from the text that they name "calibration" themselves.
FIT = {"profile.py", "approximate.py", "learning.py", "peers/quality/data.py", "published/splitzip.py"}


def talk(number: int, turns: int = 3, length: int = 10) -> dict[str, object]:
    said = [f"talk-{number}-{turn} ".ljust(length, "x") for turn in range(2 * turns)]
    return {"conversations": [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(said)]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """100 usual conversations, with short, long and malformed ones between them."""
    items = []
    for number in range(100):
        items += [talk(number), talk(1000 + number, turns=2), talk(2000 + number, length=1600)]
        items.append({"conversations": [{"from": "gpt", "value": "first"}]})
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(items))
    return path


def numbers(text: str) -> set[int]:
    return {int(part.split("-")[0]) for part in text.split("talk-")[1:]}


def test_held_out_and_calibration_text_share_no_conversation(file: Path) -> None:
    held_out = numbers(conversations.held_out_text(1 << 20, file))
    calibration = numbers(conversations.calibration_text(1 << 20, file))
    assert held_out == set(range(3, 100, 4))
    assert calibration == set(range(100)) - held_out


def test_asking_for_more_text_adds_to_it(file: Path) -> None:
    for take in (conversations.held_out_text, conversations.calibration_text):
        assert take(1 << 20, file).startswith(take(500, file))
        assert len(take(500, file)) == 500


@pytest.mark.parametrize(("turns", "characters"), [(3, 1500), (2, 1500), (3, 2000), (1, 4000), (3, 5)])
def test_conversations_of_any_size_are_held_out_of_the_same_calibration(
    file: Path, turns: int, characters: int
) -> None:
    calibration = numbers(conversations.calibration_text(1 << 20, file))
    found = [talk[0]["content"] for talk in conversations.held_out_conversations(file, turns, characters)]
    assert not numbers(" ".join(found)) & calibration
    assert bool(found) == (characters > 5)


def test_text_to_measure_on_is_a_file_or_held_out(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_SHAREGPT", file.name)
    monkeypatch.setattr(conversations, "_package", lambda name: tmp_path)
    (tmp_path / "data").mkdir()
    file.rename(tmp_path / "data" / file.name)
    assert numbers(conversations.measured_text(None, 1 << 20)) == set(range(3, 100, 4))
    (tmp_path / "text").write_text("some text")
    assert conversations.measured_text(tmp_path / "text", 4) == "some"


def test_only_what_fits_a_profile_can_take_calibration_text() -> None:
    """Whoever measures can import no function that gives calibration text."""
    folder = ROOT / "benchmarks"
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "benchmarks.conversations":
                taken = {alias.name for alias in node.names}
                assert not any(one.startswith("_") or one == "*" for one in taken), f"{name} takes {taken}"
                assert "tables_text" not in taken, f"{name} must measure on held-out text"
                assert "calibration_text" not in taken or name in FIT, f"{name} must measure on held-out text"
            elif isinstance(node, ast.Import):
                assert all(alias.name != "benchmarks.conversations" for alias in node.names), (
                    f"{name}: name what it takes"
                )
