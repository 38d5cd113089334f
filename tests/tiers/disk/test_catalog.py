"""The catalog: entries, sessions and namespaces in LMDB, every value with its own checksum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from sessioncases import saved, tokens_in

from kvstore.config import MIB, PAGE_BYTES
from kvstore.core.record import FLAG_CUT
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.entry import ENTRY, Entry, checked
from kvstore.tiers.disk.environment import CatalogError, check
from kvstore.tiers.disk.segment import Extent

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
extents = st.builds(lambda segment, page, pages: Extent(segment, page * PAGE_BYTES, pages * PAGE_BYTES), U32, U32, U32)
entries = st.builds(
    Entry,
    **dict.fromkeys(("record", "parent", "tag", "parent_tag"), U64),
    **dict.fromkeys(("start", "namespace"), U32),
    codec=st.integers(0, 65535),
    flags=st.integers(0, 65535).map(lambda flags: flags & ~FLAG_CUT),
    extent=extents,
    tokens=st.lists(U32, max_size=70).map(lambda x: np.array(x, np.uint32)),
    donors=st.lists(U64, max_size=5).map(tuple),
    bits=st.floats(width=32, allow_nan=False),
    expiry=st.floats(allow_nan=False),
)


def entry(record: int, segment: int = 1, page: int | None = None, **changes: object) -> Entry:
    where = Extent(segment, (page if page is not None else record) * PAGE_BYTES, PAGE_BYTES)
    base = Entry(record, 0, record * 10, 0, where, 0, 1, 16, np.arange(record, record + 4, dtype=np.uint32), 64.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def equal(one: Entry | None, other: Entry | None) -> bool:
    if one is None or other is None:
        return one is other
    names = [n for n in Entry.__dataclass_fields__ if n != "tokens"]
    return all(getattr(one, n) == getattr(other, n) for n in names) and np.array_equal(one.tokens, other.tokens)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    yield opened
    opened.close()


# ---- entries -----------------------------------------------------------------------------------------------------


@given(entries, st.integers(1, (1 << 32) - 1))
def test_a_cut_comes_back_in_the_place_of_donors(given_entry: Entry, cut: int) -> None:
    cut_off = replace(given_entry, flags=given_entry.flags | FLAG_CUT, cut=cut, donors=())
    assert equal(Entry.unpack(cut_off.pack()), cut_off)
    assert len(cut_off.pack()) == cut_off.packed_bytes == ENTRY.itemsize + 4 * len(cut_off.tokens) + 8


@given(entries)
def test_an_entry_comes_back_from_its_bytes(given_entry: Entry) -> None:
    assert equal(Entry.unpack(given_entry.pack()), given_entry)


@given(entries, st.data())
def test_any_flipped_bit_of_an_entry_is_noticed(given_entry: Entry, data: st.DataObject) -> None:
    packed = bytearray(given_entry.pack())
    where = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[where // 8] ^= 1 << where % 8
    assert Entry.unpack(bytes(packed)) is None


@given(entries, st.integers(1, 50))
def test_a_cut_or_longer_entry_is_noticed(given_entry: Entry, amount: int) -> None:
    packed = given_entry.pack()
    assert Entry.unpack(packed[:-amount]) is None
    assert Entry.unpack(packed + bytes(amount)) is None


@given(entries, st.integers(1, 7))
def test_bytes_that_are_no_whole_donor_are_noticed_under_a_right_sum(given_entry: Entry, amount: int) -> None:
    body = given_entry.pack()[8:] + bytes(amount)
    assert Entry.unpack(xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body) is None


@given(entries.filter(lambda e: len(e.tokens) > 0), st.integers(1, 8))
def test_fewer_tokens_than_are_said_are_noticed_under_a_right_sum(given_entry: Entry, amount: int) -> None:
    body = replace(given_entry, donors=()).pack()[8:-amount]
    assert Entry.unpack(xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body) is None


@given(st.binary(max_size=200))
def test_noise_is_no_entry(noise: bytes) -> None:
    assert Entry.unpack(noise) is None


def test_an_entry_costs_its_tokens_and_80_bytes() -> None:
    assert len(entry(1).pack()) == ENTRY.itemsize + 16 == 80 + 16


def test_donors_cost_8_bytes_each_after_the_tokens() -> None:
    packed = entry(1, donors=(7, 1 << 60)).pack()
    assert len(packed) == 80 + 16 + 16
    assert packed[96:] == (7).to_bytes(8, "little") + (1 << 60).to_bytes(8, "little")


# ---- commits -----------------------------------------------------------------------------------------------------


def test_what_is_committed_is_got(catalog: Catalog) -> None:
    catalog.commit([entry(1), entry(2)])
    found = catalog.get([2, 3, 1])
    assert equal(found[0], entry(2))
    assert found[1] is None
    assert equal(found[2], entry(1))


def test_a_commit_survives_closing(tmp_path: Path) -> None:
    first = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    first.commit([entry(1)], sessions=[saved("s")])
    first.close()
    again = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    assert equal(again.get([1])[0], entry(1))
    assert tokens_in(again) == {"s": [0, 1, 2]}
    again.close()


def test_a_removed_entry_is_gone_and_its_place_with_it(catalog: Catalog) -> None:
    catalog.commit([entry(1), entry(2)])
    catalog.commit(removed=[entry(1)])
    assert catalog.get([1]) == [None]
    assert [e.record for e in catalog.in_segment(1)] == [2]


def test_removing_what_is_not_there_changes_nothing(catalog: Catalog) -> None:
    catalog.commit([entry(1)])
    catalog.commit(removed=[entry(7)])
    assert catalog.get([1])[0] is not None


def test_an_entry_that_moves_leaves_its_old_place(catalog: Catalog) -> None:
    catalog.commit([entry(1, segment=1), entry(2, segment=1)])
    catalog.commit([entry(1, segment=5)], [entry(1, segment=1)])
    assert [e.record for e in catalog.in_segment(1)] == [2]
    assert [e.record for e in catalog.in_segment(5)] == [1]
    assert catalog.get([1])[0].extent.segment == 5  # type: ignore[union-attr]


def test_an_entry_that_is_replaced_leaves_its_old_place(catalog: Catalog) -> None:
    catalog.commit([entry(1, segment=1)])
    catalog.commit([entry(1, segment=5)])
    assert catalog.in_segment(1) == []


def test_forgetting_an_old_owner_of_a_place_keeps_the_new_one(catalog: Catalog) -> None:
    """Space is reused after the commit that removed its record; a late second removal must not hide the new one."""
    catalog.commit([entry(1, page=3)])
    catalog.commit(removed=[entry(1, page=3)])
    catalog.commit([entry(2, page=3)])
    catalog.commit(removed=[entry(1, page=3)])
    assert [e.record for e in catalog.in_segment(1)] == [2]


def test_the_entries_of_a_segment_come_in_the_order_they_lie(catalog: Catalog) -> None:
    catalog.commit([entry(1, 2, page=9), entry(2, 2, page=1), entry(3, 3, page=1), entry(4, 2, page=300)])
    assert [e.record for e in catalog.in_segment(2)] == [2, 1, 4]
    assert [e.record for e in catalog.in_segment(3)] == [3]
    assert catalog.in_segment(4) == []


def test_a_commit_is_all_or_nothing(catalog: Catalog) -> None:
    catalog.commit([entry(1)])
    with pytest.raises(CatalogError):
        catalog.commit([entry(2)], [entry(1)], sessions=[saved("x" * 600)])  # longer than LMDB's keys
    assert catalog.get([2]) == [None]
    assert catalog.get([1])[0] is not None
    catalog.commit([entry(2)])
    assert catalog.get([2])[0] is not None


def test_a_full_map_is_a_catalog_error_and_changes_nothing(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path), 1 * MIB, readonly=False)
    catalog.commit([entry(1)])
    with pytest.raises(CatalogError):
        catalog.commit(entry(n, tokens=np.zeros(4000, np.uint32)) for n in range(2, 500))
    assert catalog.get([1, 2])[1] is None
    assert catalog.get([1])[0] is not None
    catalog.close()


def test_the_version_grows_with_every_commit(catalog: Catalog) -> None:
    before = catalog.environment.version()
    catalog.commit([entry(1)])
    assert catalog.environment.version() > before


# ---- scan --------------------------------------------------------------------------------------------------------


def test_a_scan_gives_all_entries_by_number_with_their_tokens(catalog: Catalog) -> None:
    catalog.commit([entry(300), entry(2, tokens=np.array([7], np.uint32)), entry(1)])
    scan = catalog.scan()
    assert scan.entries["record"].tolist() == [1, 2, 300]
    assert scan.tokens.tolist() == [1, 2, 3, 4, 7, 300, 301, 302, 303]
    assert scan.damaged == []


def test_a_scan_gives_the_donors_of_those_that_have_any(catalog: Catalog) -> None:
    catalog.commit([entry(1), entry(2, donors=(1,)), entry(3), entry(4, donors=(3, 1))])
    scan = catalog.scan()
    assert scan.tokens.tolist() == [1, 2, 3, 4, 2, 3, 4, 5, 3, 4, 5, 6, 4, 5, 6, 7]
    assert scan.donors == {2: (1,), 4: (3, 1)}
    assert catalog.scan(after=2).donors == {4: (3, 1)}
    assert scan.subset(np.array([True, True, True, False])).donors == {2: (1,)}
    assert [e.donors for e in catalog.get([1, 2, 4]) if e is not None] == [(), (1,), (3, 1)]


def test_an_entry_that_moves_keeps_its_donors(catalog: Catalog) -> None:
    catalog.commit([entry(2, donors=(1,))])
    catalog.commit([replace(entry(2, segment=5), donors=(1,))], [entry(2, donors=(1,))])
    assert [e.donors for e in catalog.in_segment(5)] == [(1,)]


def test_a_catalog_whose_entry_is_no_whole_one_is_not_sound(catalog: Catalog) -> None:
    catalog.commit([entry(1, donors=(9,))])
    assert catalog.is_sound()
    body = entry(2).pack()[8:] + b"abc"
    value = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body
    with catalog.environment.writing() as txn:
        txn.put((2).to_bytes(8, "big"), value, db=catalog._records)
    assert not catalog.is_sound()


def test_a_scan_can_start_after_a_number(catalog: Catalog) -> None:
    catalog.commit([entry(n) for n in (1, 2, 3)])
    assert catalog.scan(after=2).entries["record"].tolist() == [3]
    assert catalog.scan(after=3).entries["record"].tolist() == []


def test_an_empty_catalog_scans_to_nothing(catalog: Catalog) -> None:
    scan = catalog.scan()
    assert (len(scan.entries), scan.token_count, scan.damaged) == (0, 0, [])


def test_a_subset_keeps_rows_and_their_tokens_together(catalog: Catalog) -> None:
    catalog.commit([entry(1), entry(2, tokens=np.array([9], np.uint32)), entry(3)])
    scan = catalog.scan().subset(np.array([True, False, True]))
    assert scan.entries["record"].tolist() == [1, 3]
    assert scan.tokens_in_order().tolist() == [1, 2, 3, 4, 3, 4, 5, 6]
    assert (scan.token_count, scan.tokens_of(1).tolist()) == (8, [3, 4, 5, 6])


def test_a_damaged_value_is_left_out_and_its_key_reported(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.commit([entry(n) for n in (1, 2, 3)])
    catalog.close()
    data = (tmp_path / "data.mdb").read_bytes()
    packed = entry(2).pack()
    assert data.count(packed) >= 1
    (tmp_path / "data.mdb").write_bytes(data.replace(packed, packed[:-1] + bytes([packed[-1] ^ 1])))
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    scan = catalog.scan()
    assert scan.entries["record"].tolist() == [1, 3]
    assert scan.damaged == [(2).to_bytes(8, "big")]
    assert catalog.get([2]) == [None]
    assert [e.record for e in catalog.in_segment(1)] == [1, 3]
    catalog.purge(scan.damaged)
    assert catalog.scan().damaged == []
    catalog.close()


@pytest.mark.parametrize("wrong", [0, 2, 1 << 40], ids=["none", "another", "a large one"])
def test_an_entry_under_a_wrong_key_is_found(tmp_path: Path, wrong: int) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.commit([entry(1), entry(3)])
    catalog.close()
    data = (tmp_path / "data.mdb").read_bytes()
    packed = [entry(number).pack() for number in (1, 3)]
    number = 1 if wrong == 0 else 3  # the order of the keys stays
    old = number.to_bytes(8, "big") + packed[number // 2]
    assert data.count(old) >= 1
    (tmp_path / "data.mdb").write_bytes(data.replace(old, wrong.to_bytes(8, "big") + packed[number // 2]))
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    assert catalog.is_sound()
    scan = catalog.scan()
    assert (scan.damaged, len(scan.entries)) == ([wrong.to_bytes(8, "big")], 1)
    assert [each.pack() for each in catalog.misplaced(scan.damaged)] == [packed[number // 2]]
    catalog.close()


# ---- namespaces --------------------------------------------------------------------------------------------------


def test_a_namespace_keeps_its_number(catalog: Catalog) -> None:
    one, two = b"a" * 32, b"b" * 32
    assert (catalog.namespace(one), catalog.namespace(two), catalog.namespace(one)) == (1, 2, 1)
    assert catalog.namespaces() == {one: 1, two: 2}


# ---- the file ----------------------------------------------------------------------------------------------------


def test_an_intact_file_has_no_problems(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.commit(entry(n) for n in range(1, 500))
    catalog.close()
    assert check(str(tmp_path)) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "missing", "one page"])
def test_a_file_that_would_kill_the_process_is_a_problem_instead(tmp_path: Path, damage: str) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.commit(entry(n) for n in range(1, 500))
    catalog.close()
    path = tmp_path / "data.mdb"
    data = path.read_bytes()
    left = {"cut": data[: len(data) // 2], "empty": b"", "noise": b"\x5a" * len(data), "one page": data[:PAGE_BYTES]}
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(left[damage])
    assert check(str(tmp_path)) != []


def test_a_read_only_catalog_of_nothing_is_a_catalog_error(tmp_path: Path) -> None:
    with pytest.raises(CatalogError):
        Catalog(str(tmp_path), 64 * MIB, readonly=True)


@given(st.binary(max_size=100))
def test_noise_is_not_intact(noise: bytes) -> None:
    assert checked(noise) is None
