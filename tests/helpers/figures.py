"""Figures that documents print, and the rows of benchmarks/results that they name.

Under a table of figures stands a comment that shows nothing:

    <!-- rows:
    7.0 = [resume-entropy resume/512 speedup]
    87 = 100 * [store store/durable-write/1MiB share_of_ceiling @O_DIRECT]
    498 = median([trie* trie/1M/lookup lookups_per_s]) / 1000
    -->

One line for each number in the table, left to right and downwards; the first column has none, and code and links are
left out. [file case metric] is the value of that row; @ names its peer, and "ratio @" means the ratio to it. A file
with * means the rows of all such files. Beside them stand numbers, + - * / ( ), median, min and max.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
_NUMBER = re.compile(r"(?<![\w.@/-])\d+(?:,\d{3})*(?:\.\d+)?(?=x\b|[^\w-]|$)")
_TABLE = re.compile(r"((?:^\|.*\n)+)\n<!-- rows:\n((?:.+ = .+\n)+)-->", flags=re.M)


@dataclass(frozen=True)
class Figure:
    """printed: as it stands in the table; source: what stands behind the = of its line."""

    printed: str
    source: str


def numbers(table: str) -> list[str]:
    """The numbers of a table in Markdown, but for its head and its first column."""
    found = []
    for line in table.strip().splitlines()[2:]:
        cells = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line).split("|")[2:]
        found += [number for cell in cells for number in _NUMBER.findall(cell)]
    return found


def tables(text: str) -> list[tuple[list[str], list[Figure]]]:
    """For each table with rows: its numbers, and the lines of its comment."""
    made = []
    for table, comment in _TABLE.findall(text):
        lines = [line.partition(" = ") for line in comment.strip().splitlines()]
        made.append((numbers(table), [Figure(printed, source) for printed, _, source in lines]))
    return made


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
    name, case, metric, *ratio = where.split()
    found = []
    for path in sorted(RESULTS.glob(f"{name}.json")):
        rows = [row for row in json.loads(path.read_text()) if (row["case"], row["metric"]) == (case, metric)]
        rows = [row for row in rows if not peer or row["peer"] == peer]
        if len(rows) != 1:
            raise LookupError(f"{path.name}: {len(rows)} rows are [{reference}]")
        found.append(float(rows[0]["ratio" if ratio else "value"]))
    if not found:
        raise LookupError(f"no file is {name}.json")
    return found


def is_so(figure: Figure) -> bool:
    """Whether what is printed is the value, rounded to as many digits as are printed."""
    digits = len(figure.printed.partition(".")[2])
    apart = abs(value(figure.source) - float(figure.printed.replace(",", "")))
    return apart <= 0.5 * 10**-digits * (1 + 1e-6)
