"""Scripts about GPU kernels, each in a process of its own: triton decides at its import whether it interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from once import once

FOLDER = Path(__file__).parents[1] / "kernels"


def run_script(script: str, *arguments: str, **environment: str) -> str:
    """What a script of tests/kernels prints; `AssertionError` with what it says where it fails."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def compiled_by(factory: pytest.TempPathFactory, script: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a script which compiles kernels prints, once a run."""

    def make(folder: Path) -> None:
        # Whoever uses the kernels would see every warning that compiling them gives.
        text = run_script(script, *arguments, PYTHONWARNINGS="error::UserWarning")
        (folder / "found.json").write_text(text)

    found: dict[str, Any] = json.loads((once(factory, script, make) / "found.json").read_text())
    return found
