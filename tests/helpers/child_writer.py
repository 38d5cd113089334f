"""A second process that has a store open for writing and does as it is told, a line of Python at a time.

`Writer(setup, ...)` runs `setup`, which must leave a store named `store`; `do(line)` runs one line and waits for it.
`PUTS` is a setup that opens a store of `kvcases` with the settings it is given and defines `put`.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from typing import Any

import forked
from threadruns import HANGS_S

PUTS = """
import os, sys
from kvcases import *
store = open_store(sys.argv[1], **eval(sys.argv[2]))
def put(count, seed=0, **settings):
    ids = tokens(count, seed)
    return store.put(ids, kv_of(ids), **settings)
"""


class Writer:
    """The process. arguments: `sys.argv[1:]` of its setup."""

    def __init__(self, setup: str, *arguments: object) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = forked.process(_serve, theirs, setup, list(map(str, arguments)))
        theirs.close()
        self._wait()

    def do(self, line: str) -> None:
        """Runs one line there and returns when it has run."""
        self._pipe.send(line)
        self._wait()

    def end(self) -> None:
        """Lets it close the store and end."""
        self._pipe.close()
        self._process.join(HANGS_S)
        assert self._process.exitcode == 0

    def _wait(self) -> None:
        assert self._pipe.poll(HANGS_S), "the process does not answer"
        error = self._pipe.recv()
        assert not error, error


def _serve(pipe: Any, setup: str, arguments: list[str]) -> None:
    """Answers with what went wrong, or ""."""
    sys.argv = ["-c", *arguments]
    there: dict[str, Any] = {"__name__": "__main__"}
    line = setup
    while True:
        error = ""
        try:
            exec(line, there)
        except BaseException:
            error = traceback.format_exc()
        pipe.send(error)
        try:
            line = pipe.recv()
        except EOFError:
            return there["store"].close()
