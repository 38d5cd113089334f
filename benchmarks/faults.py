"""How the store takes SIGKILL, damaged bytes and failing disks: trials, what was lost, how long opening took."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Rows, arguments

_TESTS = Path(__file__).resolve().parents[1] / "tests"


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    sys.path.insert(0, str(_TESTS / "helpers"))
    import trials
    from lives import PHASES

    rows = Rows("faults", options.json)
    kill = _TESTS / "faults" / "kill_trials.py"
    damage = _TESTS / "hostile" / "damage_trials.py"
    lives, kills, flips = (2, 3, 4) if options.quick else (8, 5, 50)
    for phase in PHASES:
        found = trials.run(kill, "life", [{"seed": s, "phase": phase, "kills": kills} for s in range(lives)])
        _kills(rows, phase, found)
    kinds = trials.load(damage)
    names = (*kinds.RECORD_KINDS, *kinds.HARMLESS_KINDS, *kinds.CATALOG_KINDS, *kinds.SHAPES)
    with tempfile.TemporaryDirectory() as shared:
        cases = [{"kind": kind, "seeds": flips, "shared": shared} for kind in names]
        damaged = trials.run(damage, "many", cases)
    for row in damaged:
        kind = row["case"]["kind"]
        rows.add(f"damage/{kind}", "trials", flips, "count")
        rows.add(f"damage/{kind}", "failed", int("result" not in row), "count")
    rows.main_exit(all(row["value"] == 0 for row in rows.rows if row["metric"] == "failed"))


def _kills(rows: Rows, phase: str, found: list[dict[str, Any]]) -> None:
    good = [row["result"] for row in found if "result" in row]
    times = [seconds for result in good for seconds in result["reopen_s"]]
    rows.add(f"kill/{phase}", "trials", sum(result["kills"] for result in good), "count")
    rows.add(f"kill/{phase}", "failed", len(found) - len(good), "count")
    rows.add(f"kill/{phase}", "durable_sequences", sum(result["durable"] for result in good), "count")
    if times:
        rows.add(f"kill/{phase}", "p50_s", statistics.median(times), "s")
        rows.add(f"kill/{phase}", "max_s", max(times), "s")


if __name__ == "__main__":
    main()
