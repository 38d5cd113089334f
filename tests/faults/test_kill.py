"""SIGKILL at given and at random moments during put, evict, flush, delete, recovery and re-coding (see kill_trials.py).

The end of the run says how many children were killed, and while they did what. `python -m benchmarks.faults` prints
figures of their recovery.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lives
import pytest
import trials
from length import FULL
from teller import MOMENTS

CASES = Path(__file__).with_name("kill_trials.py")
KILLS = 5 if FULL else 3  # of one store
LIVES = int(os.environ.get("KVSTORE_LIVES") or (8 if FULL else 1))  # of each phase

pytestmark = [pytest.mark.faults, pytest.mark.slow]


# What many of a phase's kills must fall into; an opening after "erase" ends one that was cut short.
OWN = {
    "put": ("put", "opening"),
    "evict": ("put", "opening"),
    "flush": ("put", "opening"),
    "delete": ("put", "delete", "save", "opening"),
    "erase": ("delete", "opening"),
    "recover": ("opening", "put"),
    "recode": ("delete", "put", "opening"),
}

Note = Callable[[str, object], None]


def _kills(rows: list[dict[str, Any]], name: str, note: Note) -> Counter[str]:
    """By what the children were doing; the end of the run shows them."""
    deaths = sum((Counter(row["result"].get("deaths", {name: row["result"]["kills"]})) for row in rows), Counter())
    note("kills", [name, dict(deaths)])
    return deaths


@pytest.mark.parametrize("phase", lives.PHASES)
def test_what_was_acknowledged_survives_a_kill(phase: str, record_property: Note) -> None:
    moments = range(len(MOMENTS[phase]))
    lives = [{"seed": seed, "phase": phase, "kills": KILLS} for seed in range(LIVES)]
    lives += [{"seed": LIVES + i, "phase": phase, "kills": 2, "moment": i} for i in moments]
    rows = trials.run(CASES, "life", lives)
    assert trials.failures(rows) == []
    deaths = _kills(rows, phase, record_property)
    assert deaths.total() == KILLS * LIVES + 2 * len(moments)
    if LIVES >= 32:
        assert [what for what in OWN[phase] if deaths[what] < LIVES // 8] == [], deaths
    if phase in ("delete", "erase"):
        assert sum(row["result"]["deleted"] for row in rows) > 0
    for row in rows[LIVES:]:
        assert row["result"]["flushed"] > 0, row
        assert (row["result"]["recoded"] > 0) == (phase == "recode"), row
        kind, _ = MOMENTS[phase][row["case"]["moment"]]
        assert row["result"]["deaths"].get("delete") or kind != b"d", row


def test_two_processes_that_die_in_turn_leave_what_they_flushed(record_property: Note) -> None:
    cases = [{"seed": seed, "kills": 20 if FULL else 3} for seed in range(LIVES if FULL else 1)]
    rows = trials.run(CASES, "turns", cases)
    assert trials.failures(rows) == []
    assert all(row["result"]["durable"] > 0 for row in rows)
    _kills(rows, "in turn", record_property)


def test_what_was_flushed_survives_a_kill_during_the_adoption_of_a_profile(record_property: Note) -> None:
    cases = [{"seed": seed, "kills": KILLS if FULL else 3} for seed in range(LIVES if FULL else 1)]
    rows = trials.run(CASES.with_name("profile_trials.py"), "life", cases)
    assert trials.failures(rows) == []
    assert sum(row["result"]["durable"] for row in rows) > 0
    deaths = _kills(rows, "profile", record_property)
    assert deaths["opening"] >= LIVES // 8 or not FULL


def test_a_kill_while_a_store_learns_loses_nothing(record_property: Note) -> None:
    cases = [{"seed": seed, "kills": 25 if FULL else 4} for seed in range(max(4, LIVES) if FULL else 1)]
    rows = trials.run(CASES.with_name("learn_trials.py"), "life", cases)
    assert trials.failures(rows) == []
    states = sum((Counter(row["result"]["states"]) for row in rows), Counter())
    assert len(states) > 1 or not FULL, states  # before the adoption and after it
    _kills(rows, "learning", record_property)


@pytest.mark.skipif(not FULL, reason="only at full length: calibrations take seconds")
def test_a_killed_calibration_goes_on_and_makes_the_same_profile(record_property: Note) -> None:
    cases = [{"seed": seed, "kills": 3} for seed in range(LIVES)]
    rows = trials.run(CASES.with_name("calibrate_trials.py"), "life", cases)
    assert trials.failures(rows) == []
    _kills(rows, "calibrate", record_property)
