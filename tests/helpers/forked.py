"""Processes that are there at once: forked from one that has imported torch and the store, which takes seconds.

Each ends as `os._exit` does, without what was registered with `atexit`: how programs end is for tests/faults.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
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


def pipe() -> tuple[Any, Any]:
    """Two ends, one of which a process may get among its arguments."""
    _start_server()
    return _context.Pipe()


def run(code: str, output: Path, *arguments: object) -> tuple[int | None, str]:
    """The status with which a program ended, None if it hangs, and what it said; which goes into the file `output`."""
    child = process(_program, code, str(output), list(map(str, arguments)))
    child.join(HANGS_S)
    return child.exitcode, output.read_text()


def _program(code: str, output: str, arguments: list[str]) -> None:
    into = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(into, 1)
    os.dup2(into, 2)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
