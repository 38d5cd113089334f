"""Processes that are there at once: forked from one that has imported torch and the store, which takes seconds.

Each ends as `os._exit` does, without what was registered with `atexit`: how programs end is for tests/faults.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from threadruns import HANGS_S

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["kvcases", "small_stores"])


@cache
def _start_server() -> None:
    """It imports once what every child needs, and finds it where this process finds it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def process(target: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    """One that calls `target`, which must be importable; it dies with this process."""
    _start_server()
    child = _context.Process(target=target, args=arguments, daemon=True)
    child.start()
    return child


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` returns of a program; raises `TimeoutError` if it hangs."""
    words = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        child = process(_program, code, words, files)
        child.join(HANGS_S)
        if child.exitcode is None:
            raise TimeoutError("the program does not end")
        return subprocess.CompletedProcess(words, child.exitcode, *(file.read_text() for file in files))


def _program(code: str, arguments: list[str], files: list[Path]) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
