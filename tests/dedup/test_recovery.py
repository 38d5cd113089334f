"""Families whose catalog, or an entry of it, is made anew from the records."""

from __future__ import annotations

import shutil
from pathlib import Path

import family_stores
import small_stores
from family_stores import counter, members, stored
from two_families import MEMBER, OTHER, TEXT, UNHARMED, built, opened


def test_a_rebuilt_catalog_keeps_members_readable(path: Path) -> None:
    built(path)
    (path / "catalog" / "data.mdb").unlink()
    with opened(path) as store:
        assert counter(store, "catalog_rebuilt") == 1
        assert members(store) == 8
        for tokens in (TEXT, OTHER, MEMBER, UNHARMED):
            assert stored(store, tokens) == len(tokens)
        family_stores.families_hold(store)
        small_stores.all_is_well(store)
        assert store.delete(TEXT) == 4
        assert stored(store, MEMBER) == len(MEMBER)


def test_a_rebuilt_catalog_after_numbers_were_given_again(path: Path) -> None:
    """Old bytes of deleted records have the numbers, or the tokens, of live ones."""
    built(path)
    for _ in range(3):
        with opened(path) as store:
            store.delete(MEMBER)
            store.delete(UNHARMED)
        with opened(path) as store:
            family_stores.put(store, UNHARMED)
            family_stores.put(store, MEMBER)
    with opened(path) as store:
        assert members(store) >= 4
        for tokens in (TEXT, OTHER, MEMBER, UNHARMED):
            assert stored(store, tokens) == len(tokens)
    shutil.rmtree(path / "catalog")
    with opened(path) as store:
        assert counter(store, "catalog_rebuilt") == 1
        for tokens in (TEXT, OTHER, MEMBER, UNHARMED):
            assert stored(store, tokens) == len(tokens)
        assert counter(store, "quarantined_records") == 0
        small_stores.all_is_well(store)


def test_a_rebuilt_catalog_after_donors_were_deleted(path: Path) -> None:
    """Records that were deleted come back, as members without donors too: those are no more than misses."""
    built(path)
    with opened(path) as store:
        store.delete(TEXT)
        assert counter(store, "recoded_members") == 4
    shutil.rmtree(path / "catalog")
    with opened(path) as store:
        assert stored(store, MEMBER) == len(MEMBER)
        assert stored(store, UNHARMED) == len(UNHARMED)
        assert stored(store, TEXT) in (0, len(TEXT))
        family_stores.families_hold(store)
        small_stores.all_is_well(store)


def test_an_entry_that_is_damaged_is_mended_with_its_donors(path: Path) -> None:
    built(path)
    with opened(path) as store:
        entry = family_stores.member_entries(store)[2]
    file = path / "catalog" / "data.mdb"
    data = file.read_bytes()
    packed = entry.pack()
    assert packed in data
    file.write_bytes(data.replace(packed, packed[:-1] + bytes([packed[-1] ^ 1])))  # a bit of its donors' numbers
    with opened(path) as store:
        assert counter(store, "mended_entries") == 1
        assert members(store) == 8
        assert stored(store, MEMBER) == len(MEMBER)
        family_stores.families_hold(store)
