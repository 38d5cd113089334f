"""`kvstore remote`: what lies in a remote tier is counted, verified and removed, ends before what they continue."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remotestores as rs
import small_stores as small
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.tiers.remote.engines.folder import FolderEngine
from kvstore.tiers.remote.opening import open_engine
from kvstore.tiers.remote.survey import survey

STEM = small.tokens_of(1, 4 * small.BLOCK)
FORKS = [np.concatenate([STEM, small.tokens_of(number, 3 * small.BLOCK)]) for number in (7, 8)]
RECORDS = 4 + 2 * 3
LONG_S = 60.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"folder://{tmp_path}/shared"
    rs.filled(tmp_path / "a", rs.settings(url), *FORKS)
    return url


def _run(code: int, *arguments: str) -> Any:
    done = CliRunner().invoke(app, ["remote", *arguments, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.output)


def _stored(tmp_path: Path, url: str, name: str) -> list[int]:
    with rs.open_store(tmp_path / name, rs.settings(url, promote="second")) as store:
        return [small.stored(store, tokens) for tokens in FORKS]


def test_stats_counts_by_identity(url: str) -> None:
    (row,) = _run(0, "stats", url)["identities"]
    assert (row["records"], row["tokens"], row["damaged"], row["unreachable"]) == (RECORDS, 4 * RECORDS, 0, 0)


def test_verify_names_what_is_damaged_and_gc_removes_it_with_what_it_cuts_off(tmp_path: Path, url: str) -> None:
    engine = open_engine(url)
    value = next(value for value in survey(engine, LONG_S) if value.depth == 4 * small.BLOCK)
    engine.delete([value.name], LONG_S)
    engine.put(value.name, [b"x" * 400], LONG_S)
    found = _run(3, "verify", url)
    assert (len(found["problems"]), found["unreachable"], value.name in found["problems"][0]) == (1, 2, True)
    assert _run(0, "gc", url)["removed"] == 0  # without --yes
    assert _run(0, "gc", url, "--yes")["removed"] == 3
    assert _run(0, "verify", url)["values"] == RECORDS - 3
    assert sorted(_stored(tmp_path, url, "b")) == [len(STEM), len(FORKS[0])]


@pytest.mark.parametrize("command", [["stats"], ["verify"], ["gc"], ["gc", "--yes"]], ids=" ".join)
def test_a_folder_that_is_not_there_is_a_mistake_and_is_not_made(tmp_path: Path, command: list[str]) -> None:
    name, *more = command
    assert "there is no such folder" in _run(1, name, f"folder://{tmp_path}/typo", *more)["error"]
    assert not (tmp_path / "typo").exists()


def test_gc_to_a_budget_takes_ends_before_what_they_continue(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gone = open_engine(url), list[str]()
    delete = FolderEngine.delete

    def look(self: FolderEngine, keys: Any, timeout_s: float) -> int:
        done = delete(self, keys, timeout_s)
        gone.extend(keys)
        parents = {value.parent for value in survey(engine, LONG_S)}
        assert not parents.intersection(gone)
        return done

    monkeypatch.setattr(FolderEngine, "delete", look)
    values = survey(engine, LONG_S)
    budget = sum(value.nbytes for value in values) // 2
    done = _run(0, "gc", url, "--to", str(budget), "--yes")
    assert done["after"] <= budget < done["before"]
    assert done["removed"] == len(gone) > 0
    assert _run(0, "verify", url)["unreachable"] == 0
    assert max(_stored(tmp_path, url, "b")) >= len(STEM)


def test_gc_by_age_keeps_what_something_younger_continues(tmp_path: Path, url: str) -> None:
    values = {value.name: value for value in survey(open_engine(url), LONG_S)}
    name = next(value.name for value in values.values() if value.depth == 6 * small.BLOCK)
    young = {name, values[name].parent, values[values[name].parent].parent}
    for file in (tmp_path / "shared").rglob("*"):
        if file.is_file() and not any(name.endswith(file.name) for name in young):
            os.utime(file, (0, 0))
    assert _run(0, "gc", url, "--older-than", "36500d", "--yes")["removed"] == 0
    assert _run(0, "gc", url, "--older-than", "30d", "--yes")["removed"] == 3  # the other fork, not what is before both
    assert _run(0, "verify", url)["unreachable"] == 0
    assert sorted(_stored(tmp_path, url, "b")) == [len(STEM), len(FORKS[0])]


def test_a_use_makes_values_of_a_folder_young(tmp_path: Path, url: str) -> None:
    files = [file for file in (tmp_path / "shared").rglob("*") if file.is_file()]
    for file in files:
        os.utime(file, (0, 0))
    with rs.open_store(tmp_path / "b", rs.settings(url)) as store:
        rs.got(store, FORKS[0])
        rs.until(lambda: sum(file.stat().st_mtime > 0 for file in files) == 7)
    assert _run(0, "gc", url, "--older-than", "30d", "--yes")["removed"] == 3


@pytest.mark.parametrize(
    ("to", "age", "says"),
    [("valkey://127.0.0.1:1", "30d", "does not say how old"), ("memory:gc", "soon", "is no span of time")],
)
def test_an_age_that_cannot_be_told_is_refused(to: str, age: str, says: str) -> None:
    done = CliRunner().invoke(app, ["remote", "gc", to, "--older-than", age])
    assert done.exit_code == 1
    assert says in " ".join(done.output.split())


def test_sealed_values_stay_where_the_key_is_not_known(tmp_path: Path) -> None:
    url, file = f"folder://{tmp_path}/sealed", tmp_path / "fleet.key"
    file.write_bytes(b"k" * 32)
    rs.filled(tmp_path / "s", rs.settings(url, key=file), *FORKS)
    (row,) = _run(0, "stats", url)["identities"]
    assert (row["sealed"], row["records"], row["damaged"]) == (RECORDS, 0, 0)
    assert _run(0, "gc", url, "--to", "1", "--yes")["removed"] == 0
    (row,) = _run(0, "stats", url, "--key", str(file))["identities"]
    assert (row["sealed"], row["records"], row["damaged"]) == (0, RECORDS, 0)
    assert _run(0, "gc", url, "--to", "1", "--yes", "--key", str(file))["removed"] == RECORDS


def test_mistakes_are_told_in_one_line() -> None:
    done = CliRunner().invoke(app, ["remote", "stats", "nowhere:x"])
    assert done.exit_code == 1
    assert done.output.startswith("error: ")
