"""Numbers as people read them, and pieces of HTML. Everything that comes from a store passes `escape`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from html import escape

_NUMBER = re.compile(r"[-–]?[\d,.]*( ?(%|s|ms|[KMGT]?i?B))?")


def size(nbytes: float) -> str:
    """Return a number of bytes for people.

    Example:
        >>> size(3 << 20), size(512)
        ('3.0 MiB', '512 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def share(part: float, whole: float) -> str:
    """Return a part as per cent; "–" of nothing.

    Example:
        >>> share(1, 8), share(0, 0)
        ('12.5 %', '–')
    """
    return f"{100 * part / whole:.1f} %" if whole else "–"


def ratio(before: float, after: float) -> str:
    """Return how many times smaller something became; "–" of nothing.

    Example:
        >>> ratio(3, 2), ratio(3, 0)
        ('1.50', '–')
    """
    return f"{before / after:.2f}" if after else "–"


def seconds(value: float | None) -> str:
    """Return a duration; "–" for none.

    Example:
        >>> seconds(0.00042), seconds(1.5), seconds(None)
        ('0.42 ms', '1.50 s', '–')
    """
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def when(moment: float) -> str:
    """Return a moment in UTC.

    Example:
        >>> when(0)
        '1970-01-01 00:00 UTC'
    """
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(moment, 253402300799.0)))


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Return a table that scrolls by itself where it is too wide. Numbers stand on the right."""
    body = [[_text(cell) for cell in row] for row in rows]
    head = "".join(f'<th scope="col"{_right(body, i)}>{escape(name)}</th>' for i, name in enumerate(columns))
    lines = "".join("<tr>" + "".join(_cell(text, i, body) for i, text in enumerate(row)) + "</tr>" for row in body)
    empty = f'<tr><td colspan="{len(columns)}">none</td></tr>' if not body else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}{f' <small>{escape(note)}</small>' if note else ''}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{lines}{empty}</tbody></table></div>"
    )


def details(summary: str, inner: str) -> str:
    """Return something that opens when it is asked for; it does so without JavaScript."""
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def _cell(text: str, i: int, body: list[list[str]]) -> str:
    if i == 0:
        return f'<th scope="row"{_right(body, 0)}>{escape(text)}</th>'
    return f"<td{_right(body, i)}>{escape(text)}</td>"


def _right(body: list[list[str]], column: int) -> str:
    return ' class="n"' if body and all(_NUMBER.fullmatch(row[column]) for row in body) else ""


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
