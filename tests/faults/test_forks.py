"""A forked child opens a store anew, whatever the threads of its parent were doing at the fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trials
from length import FULL

PROGRAM = Path(__file__).with_name("fork_trials.py")
FORKS = 200 if FULL else 5


@pytest.mark.faults
def test_a_child_that_opens_a_store_anew_never_hangs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path / "store"), str(FORKS)],
        capture_output=True,
        text=True,
        env=trials.environment(),
    )
    assert done.stdout.splitlines() == ["well"] * FORKS, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
