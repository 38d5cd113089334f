"""`kvstore erase --remote`: what is erased here goes from the remote tier, too, and what did not answer is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import remotestores as rs
import small_stores as small
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.cli.stores import nothing_in
from kvstore.tiers.remote.opening import open_engine
from kvstore.tiers.remote.survey import survey

STEM = small.tokens_of(1, 4 * small.BLOCK)
LONGER = small.tokens_of(2, 6 * small.BLOCK)
NAMED = ",".join(map(str, LONGER))
BLOCKS = (len(STEM) + len(LONGER)) // small.BLOCK


def _run(code: int, *arguments: str) -> Any:
    done = CliRunner().invoke(app, ["erase", *arguments, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.output)


def _there(url: str) -> int:
    engine = open_engine(url)
    try:
        return len(survey(engine, 60.0))
    finally:
        engine.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"folder://{tmp_path}/shared"
    rs.filled(tmp_path / "a", rs.settings(url), STEM, LONGER)
    assert _there(url) == BLOCKS
    return url


def test_without_it_the_remote_tier_stays_as_it_is(tmp_path: Path, url: str) -> None:
    assert _run(0, str(tmp_path / "a"), "--tokens", NAMED, "--yes")["remote_blocks"] == 0
    assert _there(url) == BLOCKS


def test_a_sequence_goes_there_too_also_where_this_store_has_it_no_more(tmp_path: Path, url: str) -> None:
    store = str(tmp_path / "a")
    assert not _run(0, store, "--tokens", NAMED, "--remote", url)["erased"]  # without --yes
    assert _there(url) == BLOCKS
    _run(0, store, "--tokens", NAMED, "--yes")
    done = _run(0, store, "--tokens", NAMED, "--remote", url, "--yes")
    assert (done["removed_blocks"], done["remote_blocks"], done["remote_left"]) == (0, len(LONGER) // small.BLOCK, 0)
    assert _there(url) == len(STEM) // small.BLOCK


def test_a_whole_namespace_goes_there_too(tmp_path: Path, url: str) -> None:
    done = _run(0, str(tmp_path / "a"), "--whole-namespace", "--namespace", "", "--remote", url, "--yes")
    assert done["remote_blocks"] == BLOCKS
    assert _there(url) == 0


def test_a_server_that_does_not_answer_is_said_with_the_exit_code(tmp_path: Path, url: str) -> None:
    gone = "valkey://127.0.0.1:9"
    done = _run(1, str(tmp_path / "a"), "--tokens", NAMED, "--remote", gone, "--yes")
    assert done["remote_left"] >= len(LONGER) // small.BLOCK
    assert (done["removed_blocks"], done["exit_code"]) == (len(LONGER) // small.BLOCK, 1)


def test_a_key_without_a_tier_is_a_mistake(tmp_path: Path) -> None:
    assert "--remote" in _run(1, str(tmp_path / "a"), "--tokens", NAMED, "--key", str(tmp_path / "key"))["error"]


def test_a_remote_folder_that_is_not_there_is_a_mistake_and_nothing_is_erased(tmp_path: Path, url: str) -> None:
    typo = f"folder://{tmp_path}/typo"
    done = _run(1, str(tmp_path / "a"), "--tokens", NAMED, "--remote", typo, "--yes")
    assert "there is no such folder" in done["error"]
    assert not (tmp_path / "typo").exists()
    assert _run(0, str(tmp_path / "a"), "--tokens", NAMED)["blocks"] == len(LONGER) // small.BLOCK


@pytest.mark.parametrize("more", [[], ["--yes"]], ids=["look", "yes"])
def test_a_namespace_without_anything_is_told(tmp_path: Path, url: str, more: list[str]) -> None:
    arguments = ["erase", str(tmp_path / "a"), "--whole-namespace", "--namespace", "nobody", *more]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.output.strip()) == (0, nothing_in("nobody"))
