"""Figures that documents print, and the rows of benchmarks/results that they name.

Under a table of figures stands a comment that shows nothing:

    <!-- rows:
    7.0 = [resume-entropy resume/512 speedup]
    87 = 100 * [store store/durable-write/1MiB share_of_ceiling @O_DIRECT]
    498 = median([trie* trie/1M/lookup lookups_per_s]) / 1000
    -->

One line for each number in the table, left to right and downwards; the first column has none, and code and links are
left out. [file case metric] is the value of that row; @ names its peer, and "ratio @" means the ratio to it. A file
with * means the rows of all such files. Beside them stand numbers, + - * / ( ), median, min and max. A number that is
no figure, as the size that was asked for, has "given" in place of rows.

Such a comment may stand under a paragraph, too. It then names some of the paragraph's numbers, in their order.

Under a table whose numbers have no rows stands why, which is "nothing here is measured" or a command and its date:

    <!-- no rows: `python -m benchmarks.seam`, 21 November 2026 -->
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
NUMBER = re.compile(r"(?<![\w.@/-])\d+(?:,\d{3})*(?:\.\d+)?(?=x\b|[^\w-]|$)")
TABLE = re.compile(r"((?:^\|.*\n)+)\n<!-- rows:\n((?:.+ = .+\n)+)-->", flags=re.M)
PROSE = re.compile(r"((?:^[^|<\n].*\n)+)\n<!-- rows:\n((?:.+ = .+\n)+)-->", flags=re.M)
_WITHOUT = re.compile(r"((?:^\|.*\n)+)\n<!-- no rows: (.+) -->", flags=re.M)
HIDDEN = re.compile(r"`[^`]*`|\]\([^)]*\)")  # code, and the targets of links
GIVEN = "given"


@dataclass(frozen=True)
class Figure:
    """printed: as it stands in the table; source: what stands behind the = of its line."""

    printed: str
    source: str


def numbers(table: str) -> list[str]:
    """The numbers of a table in Markdown, but for its head and its first column."""
    found = []
    for line in table.strip().splitlines()[2:]:
        found += [number for cell in _plain(line).split("|")[2:] for number in NUMBER.findall(cell)]
    return found


def _plain(text: str) -> str:
    """Without code and the targets of links."""
    return HIDDEN.sub("", text)


def tables(text: str) -> list[tuple[list[str], list[Figure]]]:
    """For each table with rows: its numbers, and the lines of its comment."""
    return [(numbers(table), _figures(comment)) for table, comment in TABLE.findall(text)]


def paragraphs(text: str) -> list[tuple[list[str], list[Figure]]]:
    """The same for each paragraph with rows."""
    return [(NUMBER.findall(_plain(prose)), _figures(comment)) for prose, comment in PROSE.findall(text)]


def without_rows(text: str) -> list[str]:
    """For each table that says that it has no rows: why."""
    return [reason for _, reason in _WITHOUT.findall(text)]


def _figures(comment: str) -> list[Figure]:
    lines = [line.partition(" = ") for line in comment.strip().splitlines()]
    return [Figure(printed, source) for printed, _, source in lines]


def value(source: str) -> float:
    """What a source comes to. Raises `LookupError` for a row that there is not, or more than once."""
    known: list[list[float]] = []

    def noted(match: re.Match[str]) -> str:
        known.append(_rows(match[1]))
        return f"known[{len(known) - 1}]" + ("" if "*" in match[1].split()[0] else "[0]")

    formula = re.sub(r"\[([^\]]+)\]", noted, source)
    if not re.fullmatch(r"(?:known\[\d+\]|\[0\]|median|min|max|[\d.+*/() -])+", formula):
        raise ValueError(f"not a formula: {source}")
    names = {"known": known, "median": statistics.median, "min": min, "max": max}
    return float(eval(formula, {"__builtins__": {}}, names))  # of these signs alone


def _rows(reference: str) -> list[float]:
    where, _, peer = reference.partition(" @")
    name, _, wanted = where.partition(" ")
    found = []
    for path in sorted(RESULTS.glob(f"{name}.json")):
        rows = [row for row in json.loads(path.read_text()) if not peer or row["peer"] == peer]
        named = {column: [row for row in rows if _name(row, column) == wanted] for column in ("value", "ratio")}
        column = "value" if named["value"] else "ratio"
        if len(named[column]) != 1:
            raise LookupError(f"{path.name}: {len(named[column])} rows are [{reference}]")
        found.append(float(named[column][0][column]))
    if not found:
        raise LookupError(f"no file is {name}.json")
    return found


def _name(row: dict[str, str], column: str) -> str:
    return f"{row['case']} {row['metric']}" + (" ratio" if column == "ratio" else "")


def is_so(figure: Figure) -> bool:
    """Whether what is printed is the value, rounded to as many digits as are printed."""
    if figure.source == GIVEN:
        return True
    digits = len(figure.printed.partition(".")[2])
    apart = abs(value(figure.source) - float(figure.printed.replace(",", "")))
    return apart <= 0.5 * 10**-digits * (1 + 1e-6)
