"""The suite itself: a run can be made again, and no test is skipped in silence."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import seeds
import skips
from threadruns import HANGS_S

HERE = Path(__file__).parent


def test_what_is_left_to_chance_is_the_same_each_time() -> None:
    drawn = []
    for name in ("a", "a", "b"):
        seeds.fix(name)
        drawn.append((random.random(), float(np.random.random()), secrets.randbits(64)))
    assert drawn[0] == drawn[1]
    assert drawn[0][:2] != drawn[2][:2]
    assert drawn[0][2] == drawn[2][2]  # of the run


def test_reasons_are_counted_and_strange_ones_named() -> None:
    reasons = ["there is no CUDA device"] * 2 + ["this machine has no avx512", "not today"]
    assert skips.summary(reasons) == "4 skipped: 2 there is no CUDA device; 1 this machine has no avx512; 1 not today"
    assert skips.not_allowed(reasons) == ["not today"]
    assert skips.summary([]) == "nothing skipped"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_skip_for_a_strange_reason_fails_the_run(tmp_path: Path, workers: int) -> None:
    shutil.copy(HERE / "conftest.py", tmp_path)
    marks = "import pytest\n@pytest.mark.skip(reason={!r})\ndef test_{}(): pass\n"
    for name, reason in (("known", "there is no CUDA device"), ("strange", "not today")):
        (tmp_path / f"test_{name}.py").write_text(marks.format(reason, name))
    found = {}
    for name in ("known", "strange"):
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, "--rootdir", str(tmp_path), "-o", f"pythonpath={HERE / 'helpers'}"]
        command += ["-o", "markers=random\nthreads\nprocesses"]
        done = subprocess.run(
            [*command, f"test_{name}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S
        )
        found[name] = done.returncode
        assert "1 skipped in" in done.stdout, done.stdout + done.stderr
    assert f"ERROR: a test was skipped for a reason that is not allowed: {reason}" in done.stdout
    assert found == {"known": 0, "strange": 1}
