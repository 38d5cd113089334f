"""The `kvstore` command."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvstore.errors import KVStoreError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_out, _err = Console(), Console(stderr=True)


@app.callback()
def _about() -> None:
    """A persistent store for the KV caches of language models."""


@app.command()
def calibrate(
    model: Annotated[Path, typer.Option(help="Folder of a transformers checkpoint.")],
    text: Annotated[Path, typer.Option(help="Text like what will be stored, UTF-8.")],
    out: Annotated[Path, typer.Option(help="The profile to write.")],
    windows: Annotated[int, typer.Option(help="Windows of text; an eighth of them is kept for the report.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    work: Annotated[Path | None, typer.Option(help="Folder for raw caches, kept; default: OUT.work, removed.")] = None,
    parts: Annotated[str, typer.Option(help="What to fit: some of lossless, lossy, aqua, donor.")] = "lossless,lossy",
    regime: Annotated[str, typer.Option(help="Of rope type longrope: short or long sequences.")] = "short",
) -> None:
    """Fit a model's profile: what codecs need to make its caches smaller.

    The same command continues an interrupted run.
    """
    with _errors("interrupted; the same command goes on from here"):
        from kvstore.calibration.calibrate import calibrate as make
        from kvstore.calibration.calibrate import load_model, load_text
        from kvstore.calibration.report import size_line, table

        words = load_text(text, windows, length)
        if not out.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(out.parent))
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(out))
        loaded, tokenizer = load_model(model)
        with _bars() as progress:
            names = tuple(name.strip() for name in parts.split(",") if name.strip())
            profile = make(
                loaded,
                tokenizer,
                words,
                out,
                windows=windows,
                length=length,
                work=work,
                parts=names,
                regime=regime,
                progress=progress,
            )
        _out.print(table(profile))
        _out.print(f"{out}: {size_line(profile)}", highlight=False, soft_wrap=True)


class _Bars:
    """A progress bar for every kind of work, in the order in which they begin."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if not total:
            self._bars.console.print(what)
        elif what in self._tasks:
            self._bars.update(self._tasks[what], completed=done, total=total)
        else:
            self._tasks[what] = self._bars.add_task(what, completed=done, total=total)


@contextmanager
def _bars() -> Iterator[_Bars]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_err) as bars:
        yield _Bars(bars)


@contextmanager
def _errors(interrupted: str) -> Iterator[None]:
    """Tell the user's mistakes in one line, with status 1. Any other error is a bug and keeps its traceback.

    interrupted: what to say when the user stops the command.
    """
    try:
        yield
    except KVStoreError as error:
        text = str(error)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except KeyboardInterrupt:
        text = interrupted
    else:
        return
    _err.print(f"error: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def main() -> None:
    """Run the command; the entry point of the package."""
    app()
