"""SIGKILL during a calibration: the profile is there whole or not at all, and a run that goes on makes the same one.

Run by helpers/trials.py.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import calibrated
import seeds
import small_stores
from trials import in_child

from kvstore.calibration.calibrate import calibrate
from kvstore.codecs import Profile


def life(seed: int, kills: int) -> dict[str, Any]:
    """Kills a calibration again and again until it has ended by itself, `kills` times at least."""
    rng = random.Random(f"calibrate/{seeds.nth(seed)}")
    killed = ended = 0
    with small_stores.scratch() as folder:
        begin = time.monotonic()
        whole = _undisturbed(folder / "whole")
        seconds = time.monotonic() - begin
        while killed < kills:
            killed_now = _killed(folder / "out", rng.random() * seconds)
            if (folder / "out").exists():
                assert Profile.load(folder / "out").id.hex() == whole, "the profile differs from an undisturbed one"
                (folder / "out").unlink()
                shutil.rmtree(folder / "out.work", ignore_errors=True)
                ended += 1
            killed += killed_now
        assert _undisturbed(folder / "out") == whole
    return {"kills": killed, "ended": ended}


def _undisturbed(out: Path) -> str:
    found = in_child(lambda: _run(out))
    assert "result" in found, found
    made: str = found["result"]
    return made


def _run(out: Path) -> str:
    made = calibrate(
        calibrated.model(), calibrated.tokenizer(), calibrated.text(), out,
        windows=calibrated.WINDOWS, length=calibrated.LENGTH, parts=("aqua", "lossless"),
    )  # fmt: skip
    return made.id.hex()


def _killed(out: Path, delay: float) -> bool:
    """Whether it was still running after the delay."""
    pid = os.fork()
    if pid == 0:
        try:
            _run(out)
        finally:
            os._exit(0)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
