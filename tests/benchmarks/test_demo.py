"""What `make demo` runs, with fewer conversations: its own check must pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_conversations_survive_a_kill() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.demo", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout[done.stdout.rindex('{"bit_identical"') :].split("\n")[0])
    assert (found["bit_identical"], found["continued_text_equal"], found["sessions"]) == (True, True, 2)
