"""Some rows of a kept run measured anew, beside those that stay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Values = dict[str, dict[str, tuple[float, str]]]
"""Value and unit by case and metric."""


def kept_rows(path: Path) -> list[Row]:
    """The rows of a file that a benchmark wrote."""
    found: list[Row] = json.loads(path.read_text())
    return found


def values_of(rows: Sequence[Row]) -> Values:
    """What was measured, by case; of perplexities also the ratio to that of the exact cache."""
    found: Values = {}
    for row in rows:
        if row["metric"] in ("missing", "refused"):
            continue
        of = found.setdefault(row["case"], {})
        of[row["metric"]] = row["value"], row["unit"]
        if row["metric"] == "perplexity" and row["ratio"] is not None:
            of["perplexity_ratio"] = row["ratio"], "x"
    return found


def merged(kept: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """`kept` in its order, with the rows of each case that is in `new` in place of its own; new cases come last."""
    cases: dict[str, list[Row]] = {}
    for row in new:
        cases.setdefault(row["case"], []).append(row)
    found, measured = [], set(cases)
    for row in kept:
        found += cases.pop(row["case"], []) if row["case"] in measured else [row]
    return found + [row for rows in cases.values() for row in rows]
