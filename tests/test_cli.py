"""The command: what it prints, and that mistakes are short texts with status 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import calibrated
import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.codecs import Profile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated.checkpoint(tmp_path_factory.mktemp("model"))


def run(folder: Path, *arguments: str | Path, **changes: str | Path) -> Result:
    """`kvstore calibrate` with a text of nine windows; what it wrote to both outputs is in `output`."""
    (folder / "text").write_text(calibrated.text())
    options = {"text": folder / "text", "out": folder / "p", "windows": "9", "length": "48", "parts": "aqua"}
    given = [text for name, value in {**options, **changes}.items() for text in (f"--{name}", str(value))]
    return CliRunner().invoke(app, ["calibrate", *given, *map(str, arguments)], env={"COLUMNS": "200"})


def test_calibrate_writes_a_profile_and_prints_the_report(model: Path, tmp_path: Path) -> None:
    done = run(tmp_path, model=model)
    assert done.exit_code == 0, done.output
    profile = Profile.load(tmp_path / "p")
    row = profile.report["parts"]["aqua"]
    assert "1 of 9 windows of 48 tokens kept" in done.output
    assert f"{row['bits_per_value']:.3f}" in done.output
    assert f"{profile.nbytes / profile.report['model_bytes']:.1%} of the model" in done.output
    assert profile.id.hex() in done.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nowhere"}, "error: nowhere: no model (config.json is missing)"),
        ({"text": "nowhere"}, "error: nowhere: No such file or directory"),
        ({"out": "nowhere/p"}, "error: nowhere: no such folder"),
        ({"out": "/"}, "error: /: is a folder"),
        ({"windows": "1"}, "error: windows: expected at least 2"),
        ({"windows": "0"}, "error: windows: expected at least 2"),
        ({"length": "-4"}, "error: length: expected at least 8"),
        ({"length": "400"}, "tokens are less than two windows of 400; give more text"),
        (
            {"parts": "aqua,nothing"},
            "error: parts: expected some of lossless, levels, aqua, lossy, donor, approximate, found 'nothing'",
        ),
        (
            {"parts": ""},
            "error: parts: expected some of lossless, levels, aqua, lossy, donor, approximate, found nothing",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(changes: dict[str, str], message: str, model: Path, tmp_path: Path) -> None:
    done = run(tmp_path, **{"model": model, **changes})
    assert done.exit_code == 1, done.output
    assert message in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "p").exists()


def test_what_is_no_file_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = run(tmp_path, model="nowhere", out=tmp_path / "pipe")
    assert (done.exit_code, "pipe: is a FIFO; name a file" in done.output) == (1, True)


def test_a_monotonous_text_is_a_mistake_and_another_one_does(model: Path, tmp_path: Path) -> None:
    changes = {"model": model, "windows": "4", "length": "64", "parts": "lossless,lossy"}
    (tmp_path / "same").write_text("a" * 100_000)
    done = run(tmp_path, **{**changes, "text": tmp_path / "same"})
    assert (done.exit_code, "Traceback" in done.output) == (1, False)
    assert "error: text: is too monotonous to fit a predictor to (lossy); name another" in done.output
    assert not (tmp_path / "p").exists()
    assert run(tmp_path, **changes).exit_code == 0


def test_an_interrupted_run_says_how_to_go_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvstore.calibration.calibrate._fit", interrupt)
    done = run(tmp_path, model=model)
    assert done.exit_code == 1
    assert "interrupted; the same command goes on from here" in done.output


def test_a_bug_has_its_traceback(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("kvstore.calibration.calibrate._fit", fail)
    assert isinstance(run(tmp_path, model=model).exception, AssertionError)


def test_help_names_the_commands() -> None:
    assert "calibrate" in CliRunner().invoke(app, ["--help"]).output


def test_help_does_not_wait_for_torch() -> None:
    """Nor do the completion of a shell and the commands of the remote tier: torch takes two seconds to import."""
    told = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))"
    source = told + "; from kvstore.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "False"
    assert "calibrate" in done.stdout
