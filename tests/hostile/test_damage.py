"""A damaged byte costs the entry it lies in and nothing else; no damage gives wrong bytes or kills the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import small_stores
import trials
from length import FULL

CASES = Path(__file__).with_name("damage_trials.py")
FLIPS = 50 if FULL else 1
FAMILY_CASES = Path(__file__).with_name("family_trials.py")
_module = trials.load(CASES)
_families = trials.load(FAMILY_CASES)

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def _run(kinds: Iterable[str], seeds: int, cases: Path = CASES) -> dict[str, Counter[str]]:
    """Outcomes by kind. All kinds in one worker process: importing torch takes longer than a kind does."""
    with small_stores.scratch() as shared:
        jobs = [{"kind": kind, "seeds": seeds, "shared": str(shared)} for kind in kinds]
        rows = trials.run(cases, "many", jobs)
    assert trials.failures(rows) == []
    return {row["case"]["kind"]: Counter(row["result"]) for row in rows}


def test_a_flipped_bit_of_a_record_costs_that_record() -> None:
    found = _run(_module.RECORD_KINDS, FLIPS)
    assert found == {kind: {"quarantined_records": FLIPS} for kind in _module.RECORD_KINDS}


def test_a_flipped_bit_around_the_records_costs_nothing() -> None:
    found = _run(_module.HARMLESS_KINDS, FLIPS)
    assert found == {kind: {"fine": FLIPS} for kind in _module.HARMLESS_KINDS}


def test_a_flipped_bit_of_the_catalog_costs_nothing_that_the_segments_hold() -> None:
    print("\n", _run(_module.CATALOG_KINDS, 3 * FLIPS))  # which pages were in use is up to chance


def test_damaged_files_cost_only_what_lay_in_them() -> None:
    seeds = max(1, FLIPS // 2)
    found = _run(_module.SHAPES, seeds)
    assert {kind for kind, outcomes in found.items() if "refused" in outcomes} == set(_module.REFUSED)
    assert not any("opened" in outcomes for outcomes in found.values())
    for kind in ("zeroed_catalog", "random_catalog", "missing_catalog"):
        assert found[kind] == {"catalog_rebuilt": seeds}, kind
    for kind in ("extended_segment", "extended_catalog", "random_locks", "foreign_files", "one_superblock_missing"):
        assert found[kind] == {"fine": seeds}, kind


def test_a_flipped_bit_of_a_member_costs_it_and_one_of_a_donor_its_members_too() -> None:
    flips = max(1, FLIPS // 2)
    found = _run(_families.KINDS, flips, FAMILY_CASES)
    records = {kind: {"quarantined_records": flips} for kind in _families.KINDS if kind != "catalog_donors"}
    assert found == {**records, "catalog_donors": {"mended_entries": flips}}
