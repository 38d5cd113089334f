"""The `kvstore` command: what an operator does with a store without writing Python.

`commands` lists the commands, which stand in files of one or a few that belong together; `output` prints, `errors` has
the exit codes.
"""

from __future__ import annotations

import io
import sys
from typing import Any

from kvstore.version import __version__


def main(arguments: list[str] | None = None) -> None:
    """Run the command; the entry point of the package. Ends with `SystemExit`.

    Args:
        arguments: default is those of the process.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: there is nowhere to print to, and the exit code tells the rest
            setattr(sys, name, io.StringIO())
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:  # in an instant: without torch
        print(f"kvstore {__version__}")
        raise SystemExit(0)
    try:
        from kvstore.cli.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich", "typer"):
            raise
        print(f"error: the command needs {error.name}; pip install 'kvstore-lm[cli]'", file=sys.stderr)
        raise SystemExit(1) from None
    app(arguments)


def __getattr__(name: str) -> Any:
    if name == "app":
        from kvstore.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
