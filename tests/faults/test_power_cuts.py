"""Whatever was flushed survives a power cut at any moment, and nothing else is wrong (see cut_trials.py)."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import lives
import pytest
import shim
import trials
from length import FULL

CASES = Path(__file__).with_name("cut_trials.py")
CUTS = 100  # of one recording
TOTAL = int(os.environ.get("KVSTORE_CUTS") or (2400 if FULL else 30))  # in all
GROUPS = [[phase] for phase in lives.PHASES] if FULL else [list(lives.PHASES)]  # each in a process of its own

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(shim.compiler() is None, reason=shim.NO_COMPILER),
]


@pytest.mark.parametrize("phases", GROUPS, ids="-".join)
def test_what_was_flushed_survives_a_power_cut(phases: list[str]) -> None:
    """And a store that does not sync its segments is caught, or the trials would prove nothing."""
    wanted = -(-TOTAL // len(lives.PHASES))
    sizes = [min(CUTS, wanted - done) for done in range(0, wanted, CUTS)]
    cases = [{"seed": seed, "phase": phase, "cuts": size} for phase in phases for seed, size in enumerate(sizes)]
    forgetful = {"seed": 1, "phase": phases[0], "cuts": 40, "forgetful": True}
    *rows, caught = trials.run(CASES, "life", [*cases, forgetful], preload=True)
    assert trials.failures(rows) == []
    assert trials.failures([caught])
    found = sum((Counter(row["result"]) for row in rows), Counter())
    assert found["cuts"] == wanted * len(phases)
    assert found["flushed"] > 0
    print(f"\n{' '.join(phases)}: {dict(found)}")
