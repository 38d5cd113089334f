"""What takes minutes to make is made once a run, whichever worker needs it first; the others wait for it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` has filled. Who fails leaves nothing behind: the next one tries again."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    folder = root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed when it is closed
        if not folder.exists():
            half = root / f"{name}.half"
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir()
            make(half)
            half.rename(folder)
    return folder
