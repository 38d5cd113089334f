"""Donors that are damaged, missing, or another block than they were: members are counted misses, others stay."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import family_stores
import pytest
import small_stores
from family_stores import BLOCK, behind, counter, members, stored
from faultfs import Fault, FaultFS
from two_families import MEMBER, OTHER, TEXT, UNHARMED, built, opened

from kvstore import KVStore
from kvstore.core.record import parse, seal
from kvstore.tiers.disk.catalog import Catalog


def segment_of(path: Path, entry: Any) -> Path:
    return path / "segments" / f"{entry.extent.segment:08x}.seg"


def change_record(path: Path, entry: Any, change: Callable[[bytearray], None]) -> None:
    file = segment_of(path, entry)
    data = bytearray(file.read_bytes())
    record = data[entry.extent.offset : entry.extent.offset + entry.extent.nbytes]
    change(record)
    data[entry.extent.offset : entry.extent.offset + entry.extent.nbytes] = record
    file.write_bytes(data)


def flip_payload(record: bytearray) -> None:
    record[struct.unpack_from("<I", record, 12)[0] + 40] ^= 4


def change_catalog(path: Path, change: Callable[[Catalog], None]) -> None:
    catalog = Catalog(str(path / "catalog"), 64 << 20, readonly=False)
    change(catalog)
    catalog.close()


def entries_of(catalog: Catalog) -> list[Any]:
    return [entry for entry in catalog.get(range(1, 30)) if entry is not None]


def only_member_of(catalog: Catalog, donor: Any) -> Any:
    (member,) = [entry for entry in entries_of(catalog) if entry.donors == (donor.record,)]
    return member


def heals(store: KVStore) -> None:
    """What was lost can be put again; nothing that is stored is wrong."""
    for tokens in (TEXT, OTHER, MEMBER, UNHARMED):
        family_stores.put(store, tokens)
    assert store.flush().dropped_blocks == 0
    for tokens in (TEXT, OTHER, MEMBER, UNHARMED):
        assert stored(store, tokens) == len(tokens)
    family_stores.families_hold(store)
    small_stores.all_is_well(store)


@pytest.mark.parametrize("host", [0, 1 << 20])
@pytest.mark.parametrize("asked_first", ["member", "donor"])
def test_a_damaged_donor_costs_itself_and_its_members(path: Path, asked_first: str, host: int) -> None:
    donors = built(path)
    change_record(path, donors[BLOCK], flip_payload)
    with opened(path, host=host) as store:
        if asked_first == "member":
            assert stored(store, MEMBER) == 2 * BLOCK
            assert stored(store, TEXT) == BLOCK
        else:
            assert stored(store, TEXT) == BLOCK
            assert stored(store, MEMBER) == 2 * BLOCK
        assert counter(store, "damaged_payload_sum") == 1
        assert counter(store, "damaged_donor") == 1
        assert counter(store, "quarantined_records") == 2
        assert stored(store, UNHARMED) == len(UNHARMED)
        assert members(store) == 7
        family_stores.families_hold(store)
        heals(store)
    with opened(path) as store:
        assert stored(store, MEMBER) == len(MEMBER)


def test_a_prefetched_member_of_a_damaged_donor_is_a_miss(path: Path) -> None:
    donors = built(path)
    change_record(path, donors[0], flip_payload)
    with opened(path, host=1 << 20) as store:
        assert store.prefetch(MEMBER).result() == len(MEMBER)  # it is whole itself
        assert stored(store, MEMBER) == BLOCK
        assert counter(store, "damaged_donor") == 1
        assert counter(store, "quarantined_records") == 2
        assert stored(store, UNHARMED) == len(UNHARMED)
        heals(store)


def test_a_new_block_is_not_lost_with_a_donor_that_turns_out_damaged(path: Path) -> None:
    donors = built(path)
    for start in (BLOCK, 2 * BLOCK):
        change_record(path, donors[start], flip_payload)
    new = behind(20, TEXT, 9)
    with opened(path) as store:
        put = family_stores.put(store, new)
        flushed = store.flush()
        assert (flushed.durable_blocks, flushed.dropped_blocks) == (put.new_blocks, 0)
        assert counter(store, "donors_rejected") >= 2
        assert stored(store, new) == len(new)
        assert stored(store, UNHARMED) == len(UNHARMED)
        heals(store)
    with opened(path) as store:
        assert stored(store, new) == len(new)


def test_a_donor_that_the_catalog_lost_takes_its_members_at_the_next_opening(path: Path) -> None:
    donors = built(path)
    change_catalog(path, lambda catalog: catalog.commit(removed=[donors[3 * BLOCK]]))
    with opened(path) as store:
        assert counter(store, "lost_members") == 1
        assert members(store) == 7
        assert stored(store, MEMBER) == 4 * BLOCK
        assert stored(store, TEXT) == 3 * BLOCK
        assert stored(store, UNHARMED) == len(UNHARMED)
        heals(store)


def test_a_member_whose_parent_and_donor_are_both_lost_is_removed_once(path: Path) -> None:
    donors = built(path)

    def change(catalog: Catalog) -> None:
        catalog.commit(removed=[only_member_of(catalog, donors[2 * BLOCK]), donors[3 * BLOCK]])

    change_catalog(path, change)
    with opened(path) as store:
        assert stored(store, MEMBER) == 3 * BLOCK
        assert stored(store, UNHARMED) == len(UNHARMED)
        assert counter(store, "unreachable_records") == 1
        small_stores.all_is_well(store)
        heals(store)


def test_a_donor_that_leaves_the_catalog_of_an_open_store_makes_its_members_misses(path: Path) -> None:
    donors = built(path)
    with opened(path) as store:
        disk = store._residency.disk
        assert disk is not None
        disk.remove([donors[0].record])
        assert stored(store, MEMBER) == BLOCK
        assert counter(store, "damaged_donor") == 1
        assert counter(store, "quarantined_records") == 1
        assert stored(store, UNHARMED) == len(UNHARMED)
        assert stored(store, TEXT) == 0  # which the index learns here
        heals(store)


@pytest.mark.parametrize("other", ["a block that stands alone", "a member"])
def test_a_donors_number_that_another_block_has_makes_its_member_a_miss(path: Path, other: str) -> None:
    donors = built(path)

    def change(catalog: Catalog) -> None:
        needs = only_member_of(catalog, donors[0])
        others = [e.record for e in entries_of(catalog) if e.donors and e.record != needs.record]
        usurper = 5 if other != "a member" else max(others)
        catalog.commit(added=[replace(needs, donors=(usurper,))], removed=[needs])

    change_catalog(path, change)
    with opened(path) as store:
        assert stored(store, MEMBER) == BLOCK
        lost = "lost_members" if other == "a member" else "damaged_donor"
        assert counter(store, lost) == 1
        assert counter(store, "quarantined_records") == (lost == "damaged_donor")
        for tokens in (TEXT, OTHER, UNHARMED):
            assert stored(store, tokens) == len(tokens)
        heals(store)


def test_a_member_in_place_of_a_donor_is_not_harmed(path: Path) -> None:
    """Not at an opening, which notices it, but in a store that is open, and knows donors by number alone."""
    donors = built(path)
    with opened(path, host=1 << 20) as store:
        assert store.prefetch(MEMBER).result() == len(MEMBER)
        families = store._residency._families
        (needs,) = families.members(donors[0].record)
        (usurper,) = families.members(6)
        families.add(needs, [usurper])
        assert stored(store, MEMBER) == BLOCK
        assert counter(store, "damaged_donor") == counter(store, "quarantined_records") == 1
        assert stored(store, UNHARMED) == len(UNHARMED)
        heals(store)


def test_a_record_that_names_other_donors_than_the_catalog_is_a_miss(path: Path) -> None:
    donors = built(path)

    def change(catalog: Catalog) -> None:
        needs = only_member_of(catalog, donors[0])
        catalog.commit(added=[replace(needs, donors=(donors[0].record, donors[BLOCK].record))], removed=[needs])

    change_catalog(path, change)
    with opened(path) as store:
        assert stored(store, MEMBER) == BLOCK
        assert counter(store, "damaged_donor") == counter(store, "quarantined_records") == 1
        for tokens in (TEXT, OTHER, UNHARMED):
            assert stored(store, tokens) == len(tokens)


@pytest.mark.parametrize("what", ["namespace", "parent", "tokens"])
def test_a_donor_of_another_identity_is_not_believed(path: Path, what: str) -> None:
    """A whole record with right sums, of a block that is not the one that was coded with."""
    donors = built(path)

    def change(record: bytearray) -> None:
        header = parse(memoryview(record), len(record))
        if what == "namespace":  # as of another model's chain: another parent and so another key
            header = replace(header, namespace=bytes(32), parent=bytes(32), key=_key(bytes(32), header.tokens))
        elif what == "parent":
            header = replace(header, parent=bytes(32))
        else:
            tokens = header.tokens.copy()
            tokens[3] += 1
            header = replace(header, tokens=tokens, key=_key(header.parent, tokens))
        seal(header, memoryview(record))

    change_record(path, donors[0], change)
    with opened(path) as store:
        assert stored(store, MEMBER) == BLOCK
        assert counter(store, "damaged_donor") == 1
        assert stored(store, TEXT) == 0
        assert stored(store, UNHARMED) == len(UNHARMED)
        heals(store)


def test_a_donor_of_a_codec_that_is_unknown_here_stays_for_those_who_know_it(path: Path) -> None:
    donors = built(path)
    backup = segment_of(path, donors[0]).read_bytes()

    def change(record: bytearray) -> None:
        seal(replace(parse(memoryview(record), len(record)), codec=999), memoryview(record))

    change_record(path, donors[0], change)
    with opened(path) as store:
        assert stored(store, MEMBER) == BLOCK
        assert counter(store, "quarantined_records") == 0
        assert stored(store, TEXT) == 0
        assert stored(store, UNHARMED) == len(UNHARMED)
        assert members(store) == 8
    segment_of(path, donors[0]).write_bytes(backup)
    with opened(path) as store:
        assert stored(store, MEMBER) == len(MEMBER)
        assert stored(store, TEXT) == len(TEXT)


def test_a_damaged_member_costs_itself_alone(path: Path) -> None:
    built(path)
    with opened(path) as store:
        entry = family_stores.member_entries(store)[1]
    change_record(path, entry, flip_payload)
    with opened(path) as store:
        assert stored(store, MEMBER) == entry.start
        assert counter(store, "quarantined_records") == 1
        for tokens in (TEXT, OTHER, UNHARMED):
            assert stored(store, tokens) == len(tokens)
        heals(store)


def test_deleting_a_damaged_donor_leaves_what_can_be_read(path: Path) -> None:
    donors = built(path)
    change_record(path, donors[0], flip_payload)
    with opened(path) as store:
        assert store.delete(TEXT) == 4
        assert members(store) == 4
        assert stored(store, MEMBER) == BLOCK  # up to the block that nobody can read any more
        assert stored(store, UNHARMED) == len(UNHARMED)
        heals(store)


def _key(parent: bytes, tokens: Any) -> bytes:
    from kvstore.core.keys import chain_key

    return chain_key(parent, tokens)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_donor_that_cannot_be_read_for_a_moment_costs_nothing(tmp_path: Path, lasting: bool) -> None:
    """As where the process has too many files open: it is read again, or a miss, and there again at the next get."""
    text = family_stores.passage(1)
    alike = [behind(number, text) for number in (10, 11)]
    with KVStore(tmp_path, family_stores.IDENTITY, family_stores.config()) as store:
        for tokens in (text, *alike):
            family_stores.put(store, tokens)
            store.flush()
        assert store.stats()["counters"]["member_records"] > 0
    short = 0
    for nth in range(1, 100):
        fs = FaultFS()
        with KVStore(tmp_path, family_stores.IDENTITY, family_stores.config(), fs=fs) as store:
            fault = fs.fault = Fault("preadv", nth, errno.EMFILE, sticky=lasting)
            found = [stored(store, tokens) for tokens in alike]
            fs.fault = None
            assert [stored(store, tokens) for tokens in alike] == [len(tokens) for tokens in alike]
            short += sum(found) < sum(map(len, alike))
            assert "quarantined_records" not in store.stats()["counters"]
        if not fault.hits:
            break
    assert fault.hits == 0
    assert short > 0 or not lasting
