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
FULL = os.environ.get("KVSTORE_FAULTS") == "full"
LIVES = int(os.environ.get("KVSTORE_LIVES") or (8 if FULL else 2))  # of each phase

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.parametrize("phase", lives.PHASES)
def test_what_was_acknowledged_survives_a_kill(phase: str) -> None:
    moments = range(len(MOMENTS[phase]))
    lives = [{"seed": seed, "phase": phase, "kills": KILLS} for seed in range(LIVES)]
    lives += [{"seed": LIVES + i, "phase": phase, "kills": 2, "moment": i} for i in moments]
    rows = trials.run(CASES, "life", lives)
    assert trials.failures(rows) == []
    times = [seconds for row in rows for seconds in row["result"]["reopen_s"]]
    if phase in ("delete", "erase"):
        assert sum(row["result"]["deleted"] for row in rows) > 0
    recoded, cut = (sum(row["result"][name] for row in rows) for name in ("recoded", "cut"))
    for row in rows[LIVES:]:
        assert row["result"]["flushed"] > 0, row
        assert (row["result"]["recoded"] > 0) == (phase == "recode"), row
        kind, _ = MOMENTS[phase][row["case"]["moment"]]
        assert row["result"]["cut"] > 0 or kind != b"d", row
    print(f"\n{phase}: {recoded} members re-coded, {cut} kills during a delete")
    print(f"{phase}: {len(times)} kills, slowest reopen {max(times):.3f} s")


def test_two_processes_that_die_in_turn_leave_what_they_flushed() -> None:
    cases = [{"seed": seed, "kills": 20 if FULL else 4} for seed in range(LIVES if FULL else 1)]
    rows = trials.run(CASES, "turns", cases)
    assert trials.failures(rows) == []
    assert all(row["result"]["durable"] > 0 for row in rows)


def test_what_was_flushed_survives_a_kill_during_the_adoption_of_a_profile() -> None:
    cases = [{"seed": seed, "kills": KILLS if FULL else 3} for seed in range(LIVES if FULL else 1)]
    rows = trials.run(CASES.with_name("profile_trials.py"), "life", cases)
    assert trials.failures(rows) == []
    assert sum(row["result"]["durable"] for row in rows) > 0


@pytest.mark.skipif(not FULL, reason="only at full length: calibrations take seconds")
def test_a_killed_calibration_goes_on_and_makes_the_same_profile() -> None:
    cases = [{"seed": seed, "kills": 3} for seed in range(LIVES)]
    rows = trials.run(CASES.with_name("calibrate_trials.py"), "life", cases)
    assert trials.failures(rows) == []
