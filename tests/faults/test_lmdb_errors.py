"""Each call that LMDB makes of the system fails once, and from then on (see nth_trials.py)."""

from __future__ import annotations

from pathlib import Path

import failing
import pytest
import shim
import trials
from length import FULL

CASES = Path(__file__).with_name("nth_trials.py")
_module = trials.load(CASES)

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(shim.compiler() is None, reason=shim.NO_COMPILER),
]


@pytest.mark.parametrize("script", sorted(failing.SCRIPTS) if FULL else ["plain"])
def test_the_nth_call_of_lmdb_fails(script: str) -> None:
    steps = {"step": 1, "firsts": 8} if FULL else {"step": 193, "firsts": 1}
    cases = [
        {"script": script, "call": call, "code": code, "sticky": sticky, "offset": len(call), **steps}
        for call, codes in _module.CALLS.items()
        for code in (codes if FULL else codes[:1])
        for sticky in (False, True)
        if not (sticky and code == "EINTR") and (FULL or call in ("pwrite", "sync") or not sticky)
    ]
    rows = trials.run(CASES, "every", cases, preload=True)
    assert trials.failures(rows) == []
    assert sum(row["result"]["runs"] for row in rows if row["case"]["call"] in ("pwrite", "sync")) > 0
    for row in rows:
        print(row["case"], row["result"])
