"""Scripts about GPU kernels, each in a process of its own: triton decides at its import whether it interprets."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from once import once

FOLDER = Path(__file__).parents[1] / "kernels"
FULL = os.environ.get("KVSTORE_FAULTS") == "full"
HANGS_S = 3000.0  # what no machine takes, however loaded

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
_with_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def on_a_gpu(test: Any) -> Any:
    """Marks a test that needs a GPU: skipped where there is none, and run by `make gpu` where there is one."""
    return pytest.mark.gpu(_with_cuda(test))


def run_script(script: str, *arguments: str) -> str:
    """What a script of tests/kernels prints; `AssertionError` with what it says where it fails."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Whoever uses the kernels would see every warning that compiling them gives.
    command = [sys.executable, "-W", "error", str(FOLDER / script), *arguments]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class Compiled:
    """What a script that compiles kernels says of them: of all with KVSTORE_FAULTS=full, else of the most important."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = found["kernels"]
        self.control: dict[str, Any] = found["control"]

    @classmethod
    def of(cls, script: str, factory: pytest.TempPathFactory) -> Compiled:
        """Made once a run, for all workers."""

        def make(folder: Path) -> None:
            (folder / "found.json").write_text(run_script(script, *([] if FULL else ["--few"])))

        return cls(json.loads((once(factory, script, make) / "found.json").read_text()))

    def keep_everything_in_registers(self, count: int) -> None:
        """Fails unless there are `count` kernels, none with a stack; and unless the control shows one would be seen."""
        assert len(self.rows) == count
        for row in self.rows:
            assert (row["stack_bytes"], row["spill_bytes"], row["local_bytes"]) == (0, 0, 0), row
        assert self.control["stack_bytes"] > 0
        assert self.control["spill_bytes"] > 0
