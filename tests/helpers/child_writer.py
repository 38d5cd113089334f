"""A second process that has a store open for writing and does as it is told, a line of Python at a time.

`Writer(setup, ...)` runs `setup`, which must leave a store named `store`; `do(line)` runs one line and waits for it.
`PUTS` is a setup that opens a store of `kvcases` with the settings it is given and defines `put`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent
PUTS = """
import os, sys
from kvcases import *
store = open_store(sys.argv[1], **eval(sys.argv[2]))
def put(count, seed=0, **settings):
    ids = tokens(count, seed)
    return store.put(ids, kv_of(ids), **settings)
"""
_LOOP = """
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
store.close()
"""


def environment() -> dict[str, str]:
    """That of this process, with the helpers importable."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])}


class Writer:
    """The process. arguments: `sys.argv[1:]` of its setup."""

    def __init__(self, setup: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", setup + _LOOP, *map(str, arguments)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("ready")

    def do(self, line: str) -> None:
        """Runs one line there and returns when it has run."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self._expect("done")

    def end(self) -> None:
        """Lets it close the store and end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(600) == 0

    def _expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word
