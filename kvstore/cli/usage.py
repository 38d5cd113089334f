"""Mistakes in the words of a command line, told as all others are: one line, or one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from kvstore.cli.errors import FAILED, tell

_UsageError: Any = typer.BadParameter.__base__  # typer's own or click's, as the version of typer has it


class Commands(TyperGroup):
    """The group of all commands. What is wrong with options becomes one line, for which typer prints four."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Run a command line; default is that of the process. Ends with `SystemExit`."""
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in words
        try:
            code = super().main(words, prog_name, **{**extra, "standalone_mode": False})
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                where = error.ctx.command_path if error.ctx else "kvstore"
                text = f"{error.format_message().rstrip('.')}; `{where} --help` says what it takes"
                tell(text, "UsageError", error.exit_code, as_json)
            code = error.exit_code
        except OSError as error:  # printing failed; everything else was told before
            tell(f"the output cannot be written: {error.strerror}", type(error).__name__, FAILED, False)
            code = FAILED
        sys.exit(code or 0)
