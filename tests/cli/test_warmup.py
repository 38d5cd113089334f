"""`kvstore warmup`: from a checkpoint and a file of prompts to a store."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path

import calibrated
import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore import KVStore, stored_identity
from kvstore.cli import app
from kvstore.tiers.disk.fs import FileSystem

LINES = [
    {
        "template": "{system} {question}",
        "parts": {"system": ["be kind", "be brief"], "question": ["who", "what", "why"]},
    },
    {"prompt": "be kind and patient"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated.checkpoint(tmp_path_factory.mktemp("model"))


def run(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["warmup", *map(str, arguments)], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_file_of_prompts_becomes_a_store(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join(map(json.dumps, LINES)))
    given = (tmp_path / "store", "--model", model, "--prompts", prompts, "--format", "jsonl", "--namespace", "a")
    planned = json.loads(run(*given, "--dry-run", "--json").stdout)
    assert planned["dry_run"]
    assert planned["prompts"] == 7
    assert not (tmp_path / "store").exists()
    done = run(*given)
    assert done.exit_code == 0, done.output
    assert f"7 prompts of {planned['tokens']:,} distinct tokens" in done.output
    again = json.loads(run(*given, "--json").stdout)
    assert (again["stored_tokens"], again["computed_tokens"]) == (planned["tokens"], 0)
    with KVStore(tmp_path / "store", stored_identity(tmp_path / "store"), read_only=True) as store:
        assert len(store.inventory().sequences) == 7


def test_the_format_follows_from_the_ending(model: Path, tmp_path: Path) -> None:
    text = json.dumps({"prompt": "a\u2028harbour"}, ensure_ascii=False)
    for name in ("harbour.jsonl", "harbour.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    given = (tmp_path / "store", "--model", model, "--dry-run", "--json", "--prompts")
    assert json.loads(run(*given, tmp_path / "harbour.jsonl").stdout)["tokens"] == len("a\u2028harbour".encode())
    done = run(*given, tmp_path / "harbour.txt")
    assert done.exit_code == 1
    assert "harbour.txt: each line is a JSON object" in json.loads(done.stdout)["error"]
    taken = json.loads(run(*given, tmp_path / "harbour.txt", "--format", "text").stdout)
    assert taken["tokens"] == len(text.encode())


def test_a_full_disk_is_named_with_what_to_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_fs: FileSystem, _fd: int, _nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystem, "allocate", full)
    (tmp_path / "prompts").write_text("a prompt\nanother prompt\n")
    given = (tmp_path / "store", "--model", model, "--prompts", tmp_path / "prompts")
    done = run(*given)
    assert done.exit_code == 1
    assert "blocks could not be stored: the file system of " in done.stdout
    assert "is full: " in done.stdout
    assert "the store takes 64.0 MiB at a time. Free space there" in done.stdout
    assert "unpin" not in done.stdout
    assert "[the file system is full: it has no room for a segment of " in caplog.text
    again = json.loads(run(*given, "--json").stdout)
    assert "is full" in again["dropped_because"]


def test_other_losses_are_told_by_their_counters(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = FileSystem.pwritev

    def refuses(fs: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset:  # records; the rest of a store is at the beginning of its files
            raise OSError(errno.EIO, "Input/output error")
        return written(fs, fd, buffers, offset)

    monkeypatch.setattr(FileSystem, "pwritev", refuses)
    (tmp_path / "prompts").write_text("a prompt\n")
    done = run(tmp_path / "store", "--model", model, "--prompts", tmp_path / "prompts")
    assert done.exit_code == 1
    assert "1 blocks that the disk refused to write: check the disk" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--prompts": "nowhere"}, "nowhere: No such file"),
        ({"--model": "nowhere"}, "nowhere: no model"),
        ({"--format": "yaml"}, "format: expected one of text, jsonl, chat"),
        ({"--format": "jsonl"}, "prompts, line 1: is not JSON"),
        ({"--dtype": "int8"}, "dtype: expected bfloat16, float16 or float32"),
        ({"--workers": "nobody"}, "--workers: expected ray, found 'nobody'"),
        ({"--config": "nowhere"}, "cannot be read as TOML"),
    ],
)
def test_mistakes_are_told_in_one_line(changes: dict[str, str], message: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("a prompt\n")
    options = {"--model": str(model), "--prompts": str(tmp_path / "prompts"), **changes}
    done = run(tmp_path / "store", *(word for pair in options.items() for word in pair))
    assert done.exit_code == 1, done.output
    assert message in done.stderr
    assert "Traceback" not in done.output
