"""What a command ends with: one line for each mistake of the user, and the exit codes (docs/cli.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvstore.cli.output import err, print_json, printable
from kvstore.errors import (
    CorruptStore,
    FormatVersion,
    IdentityMismatch,
    KVStoreError,
    StoreLocked,
    StoreNotFound,
)

OK, FAILED, USAGE, DAMAGED, LOCKED, MISSING, FOREIGN = range(7)
_READING = "ls, inspect, stats, verify or backup"
_CODES = (
    (StoreNotFound, MISSING),
    (StoreLocked, LOCKED),
    (CorruptStore, DAMAGED),
    (IdentityMismatch, FOREIGN),
    (FormatVersion, FOREIGN),
)


def code_of(error: BaseException) -> int:
    """Return the exit code for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


@contextmanager
def told(as_json: bool = False, interrupted: str = "interrupted") -> Iterator[None]:
    """Tell the user's mistakes in one line, with an exit code. Any other error is a bug and keeps its traceback.

    Args:
        as_json: print an object with "error" instead of the line.
        interrupted: what to say when the user stops the command.
    """
    try:
        yield
    except (KVStoreError, ValueError) as error:
        text, kind, code = str(error), type(error).__name__, code_of(error)
        if not isinstance(error, KVStoreError) and type(error) is not ValueError:
            raise
        if isinstance(error, StoreLocked):
            text = f"{error.what}; end that program, or use a command that only reads, such as {_READING}"
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        kind, code = type(error).__name__, FAILED
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch has no type for it
            raise
        text, kind, code = "memory ran out; ask for less, or free some", "MemoryError", FAILED
    except KeyboardInterrupt:
        text, kind, code = interrupted, "Interrupted", FAILED
    else:
        return
    tell(text, kind, code, as_json)
    raise typer.Exit(code)


def tell(text: str, kind: str, code: int, as_json: bool) -> None:
    """Print an error: one line to the standard error, or an object with "error" to the standard output."""
    line = " ".join(text.split())
    if as_json:
        print_json({"error": line, "kind": kind, "exit_code": code})
    else:
        err.print(f"error: {printable(line)}", style="red", markup=False, highlight=False, soft_wrap=True)


def leave(code: int) -> None:
    """End the command with a code, if it is not 0."""
    if code:
        raise typer.Exit(code)
