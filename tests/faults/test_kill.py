"""SIGKILL at given and at random moments during put, evict, flush, delete, recovery and re-coding (see kill_trials.py).

`python -m benchmarks.faults` prints the figures of a full run.
"""

from __future__ import annotations

import os
from pathlib import Path

import lives
import pytest
import trials
from teller import MOMENTS

CASES = Path(__file__).with_name("kill_trials.py")
KILLS = 5  # of one store
LIVES = 8 if os.environ.get("KVSTORE_FAULTS") == "full" else 2

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.parametrize("phase", lives.PHASES)
def test_what_was_acknowledged_survives_a_kill(phase: str) -> None:
    moments = range(len(MOMENTS[phase]))
    lives = [{"seed": seed, "phase": phase, "kills": KILLS} for seed in range(LIVES)]
    lives += [{"seed": LIVES + i, "phase": phase, "kills": 2, "moment": i} for i in moments]
    rows = trials.run(CASES, "life", lives)
    assert trials.failures(rows) == []
    times = [seconds for row in rows for seconds in row["result"]["reopen_s"]]
    recoded, cut = (sum(row["result"][name] for row in rows) for name in ("recoded", "cut"))
    for row in rows[LIVES:]:
        assert row["result"]["flushed"] > 0, row
        assert (row["result"]["recoded"] > 0) == (phase == "recode"), row
        kind, _ = MOMENTS[phase][row["case"]["moment"]]
        assert row["result"]["cut"] > 0 or kind != b"d", row
    print(f"\n{phase}: {recoded} members re-coded, {cut} kills during a delete")
    print(f"{phase}: {len(times)} kills, slowest reopen {max(times):.3f} s")
