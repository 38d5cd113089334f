"""`kvstore warmup`: from a checkpoint and a file of prompts to a store."""

from __future__ import annotations

import json
from pathlib import Path

import calibrated
import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore import KVStore, stored_identity
from kvstore.cli import app

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
    done = run(*given)
    assert done.exit_code == 0, done.output
    assert f"7 prompts of {planned['tokens']:,} distinct tokens" in done.output
    again = json.loads(run(*given, "--json").stdout)
    assert (again["stored_tokens"], again["computed_tokens"]) == (planned["tokens"], 0)
    with KVStore(tmp_path / "store", stored_identity(tmp_path / "store"), read_only=True) as store:
        assert len(store.inventory().sequences) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--prompts": "nowhere"}, "nowhere: No such file"),
        ({"--model": "nowhere"}, "nowhere: no model"),
        ({"--format": "yaml"}, "format: expected one of text, jsonl, chat"),
        ({"--format": "jsonl"}, "line 1:"),
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
