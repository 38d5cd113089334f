"""Pinned sequences hold no members: what they are coded against might be evicted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import family_stores
import pytest
import small_stores
from family_stores import BLOCK, IDENTITY, behind, config, counter, join, members, passage, stored
from threadruns import HANGS_S

from kvstore import KVStore
from kvstore.dedup.match import DonorMatcher
from kvstore.residency.families import Families
from kvstore.residency.residency import Residency

TEXT = passage(1)
VARIANTS = [behind(10, TEXT), behind(11, TEXT, 13), join(TEXT[2 * BLOCK :], passage(12, 40))]


def pinned_stand_alone(store: KVStore) -> None:
    residency = store._residency
    for record in residency._pins.snapshot()[1]:
        assert not residency.donors_of(record), f"record {record} is pinned, and a member"


def test_what_is_pinned_is_no_member(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT)
        store.flush()
        family_stores.put(store, VARIANTS[0], pin=True)
        store.flush()
        assert members(store) == 0
        family_stores.put(store, VARIANTS[1])  # the control
        store.flush()
        assert members(store) >= 3
        assert stored(store, VARIANTS[0]) == len(VARIANTS[0])


@pytest.mark.parametrize("flushed", [True, False])
def test_members_that_are_pinned_later_stand_alone(path: Path, flushed: bool) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT)
        store.flush()
        family_stores.put(store, VARIANTS[0])
        if flushed:
            store.flush()
            assert members(store) >= 3
        family_stores.put(store, VARIANTS[0], pin=True)
        store.flush()
        assert members(store) == 0
        pinned_stand_alone(store)
        assert stored(store, VARIANTS[0]) == len(VARIANTS[0])
        assert sum(e.flags & 1 for e in small_stores.catalog_entries(store)) == 1
        family_stores.families_hold(store)
        small_stores.all_is_well(store)
    with KVStore(path, IDENTITY, config()) as store:
        assert stored(store, VARIANTS[0]) == len(VARIANTS[0])
        assert members(store) == 0
        assert len(store._residency._pins.snapshot()[0]) == 1


@pytest.mark.parametrize("moment", ["while it is planned", "just before it is pinned"])
def test_a_block_that_is_pinned_while_it_is_queued_is_no_member(
    path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The first block of the sequence has donors; it is held up where its donors are looked for."""
    planned, goes_on, joined = threading.Event(), threading.Event(), threading.Event()
    match, pin, add = DonorMatcher._match, Residency.pin, Families.add

    def slow_match(self: DonorMatcher, *looked_for: Any) -> Any:
        found = match(self, *looked_for)
        planned.set()
        assert goes_on.wait(HANGS_S)
        return found

    def seen_add(self: Families, member: int, donors: Any) -> None:
        add(self, member, donors)
        joined.set()

    def late_pin(self: Residency, record: int) -> None:
        goes_on.set()
        assert joined.wait(HANGS_S)
        pin(self, record)

    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT)
        store.flush()
        monkeypatch.setattr(DonorMatcher, "_match", slow_match)
        if moment != "while it is planned":
            monkeypatch.setattr(Residency, "pin", late_pin)
            monkeypatch.setattr(Families, "add", seen_add)
        family_stores.put(store, VARIANTS[2])
        assert planned.wait(HANGS_S)
        family_stores.put(store, VARIANTS[2], pin=True)
        goes_on.set()
        store.flush()
        pinned_stand_alone(store)
        assert store._residency._pins.snapshot()[1]
        assert stored(store, VARIANTS[2]) == len(VARIANTS[2])
        family_stores.families_hold(store)
        small_stores.all_is_well(store)


def test_members_that_a_pinned_sequence_continues_stand_alone(path: Path) -> None:
    longer = join(VARIANTS[0], TEXT[:50])
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT)
        store.flush()
        family_stores.put(store, VARIANTS[0])
        store.flush()
        assert members(store) >= 3
        family_stores.put(store, longer, pin=True)
        store.flush()
        assert members(store) == 0
        pinned_stand_alone(store)
        assert stored(store, longer) == len(longer)
    with KVStore(path, IDENTITY, config()) as store:
        assert stored(store, longer) == len(longer)
        store.delete(TEXT)
        assert counter(store, "recoded_members") == 0
        assert stored(store, longer) == len(longer)


def test_a_pinned_donor_stays_when_others_are_evicted(path: Path) -> None:
    with KVStore(path, IDENTITY, config(disk=6 * small_stores.SEGMENT)) as store:
        family_stores.put(store, TEXT, pin=True)
        store.flush()
        for number in range(10, 80):
            tokens = behind(number, TEXT, 20 + number % 32)
            family_stores.put(store, tokens)
            store.flush()
            assert stored(store, tokens) == len(tokens)
        assert counter(store, "disk_evicted_records") > 0
        assert members(store) > 0
        assert stored(store, TEXT) == len(TEXT)
        family_stores.families_hold(store)
