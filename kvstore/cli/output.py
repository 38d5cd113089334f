"""How commands print: a document as JSON, or the same for people."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvstore.report.words import size as size

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
out, err = Console(), Console(stderr=True)
_WIDEST = 10_000  # columns
_LEAST_CUT = 24  # columns that a text keeps


def print_json(document: dict[str, Any]) -> None:
    """Print one line of JSON to the standard output."""
    sys.stdout.write(json.dumps(document, default=str) + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """Return a text without what steers a terminal: names of sessions and files may hold anything.

    Example:
        >>> print(printable("a" + chr(27) + "[31m"))
        a\\x1b[31m
    """
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def line(text: str) -> None:
    """Print one line for people, as it is."""
    out.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, cut: bool = False
) -> None:
    """Print a table; numbers stand on the right. Lines are as long as they must be: no name is cut, no row folded. cut:
    the last column is cut where lines would be wider than the terminal."""
    body = [[_cell(value) for value in row] for row in rows]
    if title is not None:
        out.print(f"\n{title}\n{'-' * len(title)}", style="bold", markup=False, highlight=False)
    made = Table(box=None, pad_edge=False, show_header=any(columns))
    for number, name in enumerate(columns):
        right = bool(body) and all(row[number][1] for row in body)
        made.add_column(name, justify="right" if right else "left", no_wrap=True)
    cells = [[Text(text) for text, _ in row] for row in body]
    for row in cells:
        made.add_row(*row)
    needed = Measurement.get(out, out.options.update(max_width=_WIDEST), made).maximum
    if cut and cells and needed > out.width:
        least = max(_LEAST_CUT, max(row[-1].cell_len for row in cells) - (needed - out.width))
        for row in cells:
            row[-1].truncate(least, overflow="ellipsis")
        needed = Measurement.get(out, out.options.update(max_width=_WIDEST), made).maximum
    Console(width=max(needed, out.width)).print(made)


def _cell(value: object) -> tuple[str, bool]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else printable(str(value)).replace("\n", "\\n"), False
    return (f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"), True


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_seconds(text: str) -> float:
    """Read a span of time such as 90m, 12h, 30d or 2w. Raises `ValueError`.

    Example:
        >>> parse_seconds("12h"), parse_seconds("1.5d")
        (43200.0, 129600.0)
    """
    given = text.strip().lower()
    try:
        found = float(given[:-1]) * _SECONDS[given[-1:]]
    except (KeyError, ValueError):
        found = 0.0
    if not 0 < found < math.inf:
        raise ValueError(f"{text!r} is no span of time; write a number above 0 with s, m, h, d or w")
    return found


class Bars:
    """A progress bar for every kind of work, in the order in which they begin."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        if not total:
            self._bars.console.print(what)
        elif what in self._tasks:
            self._bars.update(self._tasks[what], completed=done, total=total, description=f"{what} {note}".rstrip())
        else:
            self._tasks[what] = self._bars.add_task(what, completed=done, total=total)


@contextmanager
def progress_bars(hidden: bool = False) -> Iterator[Bars]:
    """Bars on the standard error; hidden, or not on a terminal: none are drawn."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=hidden or not err.is_terminal) as bars:
        yield Bars(bars)
