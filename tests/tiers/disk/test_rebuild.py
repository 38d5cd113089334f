"""A catalog that is damaged is made anew: records from the segments, sessions from its own pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sessioncases import saved, session, tokens_in, write_format_1

from kvstore.config import KIB, MIB, PAGE_BYTES
from kvstore.core.keys import chain_key
from kvstore.core.record import Donor, RecordHeader, key_tag, padded, seal
from kvstore.core.session_record import SessionChange
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.entry import entry_of
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.rebuild import rebuild, salvage_sessions, scan_segment
from kvstore.tiers.disk.segment import Extent
from kvstore.tiers.disk.segment_file import segment_header

FS = FileSystem()
SEGMENT = 64 * KIB
NAMESPACE = b"n" * 32
ROOT = b"r" * 32


def record(number: int, parent: bytes = ROOT, start: int = 0, payload: int = 100, **changes: object) -> bytes:
    ids = np.arange(number, number + 4, dtype=np.uint32)
    header = RecordHeader(
        key=chain_key(parent, ids),
        parent=parent,
        namespace=NAMESPACE,
        codec=0,
        record_id=number,
        start=start,
        tokens=ids,
        layer_sizes=(payload,),
        raw_bytes=payload,
        **changes,  # type: ignore[arg-type]
    )
    memory = bytearray(padded(header.record_bytes))
    seal(header, memoryview(memory))
    return bytes(memory)


def key_of(number: int, parent: bytes = ROOT) -> bytes:
    return chain_key(parent, np.arange(number, number + 4, dtype=np.uint32))


def write_segment(path: Path, number: int, *records: bytes, size: int = SEGMENT) -> None:
    data = segment_header(number, SEGMENT, bytes(16)) + b"".join(records)
    (path / f"{number:08x}.seg").write_bytes(data.ljust(size, b"\0"))


def scanned(path: Path, number: int = 1) -> list[tuple[int, Extent]]:
    found = scan_segment(FS, str(path / f"{number:08x}.seg"), number, SEGMENT)
    return [(header.record_id, extent) for header, extent in found]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Catalog]]:
    catalogs: list[Catalog] = []
    yield catalogs
    for catalog in catalogs:
        catalog.close()


def rebuilt(tmp_path: Path, made: list[Catalog], numbers: list[int], old: str = "none") -> Catalog:
    (tmp_path / "catalog").mkdir(exist_ok=True)

    def make() -> Catalog:
        made.append(Catalog(str(tmp_path / "catalog"), 64 * MIB, readonly=False))
        return made[-1]

    return rebuild(FS, str(tmp_path), str(tmp_path / old), numbers, SEGMENT, make)[0]


def test_records_are_found_in_order_with_their_extents(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, record(1), record(2, payload=9000), record(3))
    assert scanned(tmp_path) == [
        (1, Extent(1, PAGE_BYTES, PAGE_BYTES)),
        (2, Extent(1, 2 * PAGE_BYTES, 3 * PAGE_BYTES)),
        (3, Extent(1, 5 * PAGE_BYTES, PAGE_BYTES)),
    ]


def test_after_a_damaged_header_the_search_goes_on(tmp_path: Path) -> None:
    broken = bytearray(record(2, payload=9000))
    broken[20] ^= 1
    write_segment(tmp_path, 1, record(1), bytes(broken), record(3))
    assert [number for number, _ in scanned(tmp_path)] == [1, 3]


def test_a_record_whose_header_is_larger_than_a_page_is_found(tmp_path: Path) -> None:
    ids = np.arange(3000, dtype=np.uint32)
    header = RecordHeader(chain_key(ROOT, ids), ROOT, NAMESPACE, 0, 7, 0, ids, (100,), 100)
    assert header.payload_offset > PAGE_BYTES
    memory = bytearray(padded(header.record_bytes))
    seal(header, memoryview(memory))
    write_segment(tmp_path, 1, bytes(memory), record(8))
    assert [number for number, _ in scanned(tmp_path)] == [7, 8]


def test_a_segment_cut_inside_a_record_gives_the_records_before(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, record(1), record(2, payload=9000))
    os.truncate(tmp_path / "00000001.seg", 3 * PAGE_BYTES)
    assert [number for number, _ in scanned(tmp_path)] == [1]


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * SEGMENT, bytes(SEGMENT)], ids=["empty", "short", "ff", "0"])
def test_a_segment_of_anything_else_gives_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "00000001.seg").write_bytes(data)
    assert scanned(tmp_path) == []


def test_a_segment_that_is_missing_gives_nothing(tmp_path: Path) -> None:
    assert scanned(tmp_path, 5) == []


def test_an_entry_has_the_fields_of_its_header() -> None:
    ids = np.arange(4, dtype=np.uint32)
    header = RecordHeader(
        key_of(1), ROOT, NAMESPACE, 16, 9, 64, ids, (5,), 5, bits=2.0, expiry=3.0, flags=1
    )  # fmt: skip
    entry = entry_of(header, Extent(1, PAGE_BYTES, PAGE_BYTES), 8, 2)
    assert (entry.record, entry.parent, entry.namespace, entry.start) == (9, 8, 2, 64)
    assert (entry.tag, entry.parent_tag) == (key_tag(key_of(1)), key_tag(ROOT))
    assert (entry.codec, entry.bits, entry.expiry, entry.flags) == (16, 2.0, 3.0, 1)


def test_a_first_block_has_no_parent_tag() -> None:
    header = RecordHeader(key_of(1), ROOT, NAMESPACE, 16, 9, 0, np.arange(4, dtype=np.uint32), (5,), 5)
    assert entry_of(header, Extent(1, PAGE_BYTES, PAGE_BYTES), 0, 1).parent_tag == 0


def test_a_rebuilt_catalog_has_all_records_and_links_them_to_their_parents(tmp_path: Path, made: list[Catalog]) -> None:
    child_parent = key_of(5)
    write_segment(tmp_path, 1, record(9, child_parent, start=4))
    write_segment(tmp_path, 2, record(5))
    catalog = rebuilt(tmp_path, made, [1, 2])
    scan = catalog.scan()
    assert scan.entries[["record", "parent", "segment", "start"]].tolist() == [(5, 0, 2, 0), (9, 5, 1, 4)]
    assert scan.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert catalog.namespaces() == {NAMESPACE: 1}
    assert [e.record for e in catalog.in_segment(1)] == [9]


def test_the_entry_of_a_member_names_its_donors() -> None:
    ids = np.arange(4, dtype=np.uint32)
    donors = (Donor(3, key_of(3)), Donor(1, key_of(1)))
    header = RecordHeader(key_of(1), ROOT, NAMESPACE, 3, 9, 0, ids, (5,), 5, donors=donors)
    assert entry_of(header, Extent(1, PAGE_BYTES, PAGE_BYTES), 0, 1).donors == (3, 1)


def test_a_rebuilt_catalog_links_members_to_their_donors_by_key(tmp_path: Path, made: list[Catalog]) -> None:
    member = record(7, donors=(Donor(5, key_of(5)), Donor(3, key_of(3))))
    write_segment(tmp_path, 1, member, record(3), record(5))
    scan = rebuilt(tmp_path, made, [1]).scan()
    assert scan.entries["record"].tolist() == [3, 5, 7]
    assert scan.donors == {7: (5, 3)}


def test_a_rebuilt_catalog_finds_donors_that_got_other_numbers(tmp_path: Path, made: list[Catalog]) -> None:
    """Two blocks have the number 5; the member names the one that its key says."""
    ids = np.arange(100, 104, dtype=np.uint32)
    other = RecordHeader(chain_key(ROOT, ids), ROOT, NAMESPACE, 0, 5, 0, ids, (100,), 100)
    memory = bytearray(padded(other.record_bytes))
    seal(other, memoryview(memory))
    write_segment(tmp_path, 1, record(5), bytes(memory), record(9, donors=(Donor(5, other.key),)))
    scan = rebuilt(tmp_path, made, [1]).scan()
    by_tag = dict(zip(scan.entries["tag"].tolist(), scan.entries["record"].tolist(), strict=True))
    assert by_tag[key_tag(other.key)] != by_tag[key_tag(key_of(5))]
    assert scan.donors == {by_tag[key_tag(key_of(9))]: (by_tag[key_tag(other.key)],)}


def test_a_rebuilt_catalog_gives_a_donor_that_is_gone_no_number(tmp_path: Path, made: list[Catalog]) -> None:
    write_segment(tmp_path, 1, record(9, donors=(Donor(4, key_of(4)), Donor(3, key_of(3)))), record(3))
    assert rebuilt(tmp_path, made, [1]).scan().donors == {9: (0, 3)}


def test_of_two_copies_of_a_block_the_newer_one_stays(tmp_path: Path, made: list[Catalog]) -> None:
    ids = np.arange(1, 5, dtype=np.uint32)

    def copy(number: int) -> bytes:
        header = RecordHeader(chain_key(ROOT, ids), ROOT, NAMESPACE, 0, number, 0, ids, (100,), 100)
        memory = bytearray(padded(header.record_bytes))
        seal(header, memoryview(memory))
        return bytes(memory)

    write_segment(tmp_path, 1, copy(8), copy(3))
    assert rebuilt(tmp_path, made, [1]).scan().entries["record"].tolist() == [8]


def test_two_blocks_with_the_same_number_both_stay(tmp_path: Path, made: list[Catalog]) -> None:
    """A number is given again when its record was gone at an open; the old bytes may still lie somewhere."""
    ids = np.arange(100, 104, dtype=np.uint32)
    other = RecordHeader(chain_key(ROOT, ids), ROOT, NAMESPACE, 0, 5, 0, ids, (100,), 100)
    memory = bytearray(padded(other.record_bytes))
    seal(other, memoryview(memory))
    write_segment(tmp_path, 1, record(5), record(9, key_of(5), start=4))
    write_segment(tmp_path, 2, bytes(memory))
    scan = rebuilt(tmp_path, made, [1, 2]).scan()
    by_tag = dict(zip(scan.entries["tag"].tolist(), scan.entries["record"].tolist(), strict=True))
    assert set(by_tag) == {key_tag(key_of(5)), key_tag(other.key), key_tag(key_of(9, key_of(5)))}
    assert len(set(by_tag.values())) == 3
    parent = scan.entries["parent"][scan.entries["start"] == 4]
    assert parent.tolist() == [by_tag[key_tag(key_of(5))]]


# ---- sessions ----------------------------------------------------------------------------------------------------


def old_catalog(tmp_path: Path, *commits: list[SessionChange]) -> Path:
    (tmp_path / "old").mkdir()
    catalog = Catalog(str(tmp_path / "old"), 64 * MIB, readonly=False)
    for sessions in commits:
        catalog.commit(sessions=sessions)
    catalog.close()
    return tmp_path / "old" / "data.mdb"


def salvaged(path: Path) -> dict[str, list[int]]:
    found = salvage_sessions(FS, str(path))
    assert all(key == record.key for key, record in found.items())
    return {record.name: record.tokens.tolist() for record in found.values()}


def lists(*changes: SessionChange) -> dict[str, list[int]]:
    return {change.record.name: change.record.tokens.tolist() for change in changes if change.record is not None}


def test_sessions_are_found_in_the_pages_of_a_damaged_catalog(tmp_path: Path) -> None:
    changes = [saved(f"s{n}", count=n, sequence=n) for n in range(1, 600, 3)]
    path = old_catalog(tmp_path, changes)
    data = bytearray(path.read_bytes())
    data[: 2 * PAGE_BYTES] = bytes(2 * PAGE_BYTES)  # both meta pages gone
    path.write_bytes(data)
    assert salvaged(path) == lists(*changes)


def test_a_session_of_many_pages_is_found(tmp_path: Path) -> None:
    change = saved("long", count=20_000)
    assert salvaged(old_catalog(tmp_path, [change])) == lists(change)


def test_of_a_session_the_newest_value_is_taken(tmp_path: Path) -> None:
    path = old_catalog(tmp_path, *[[saved("s", count=n, sequence=n)] for n in range(1, 30)])
    assert salvaged(path) == lists(saved("s", count=29))


def test_a_session_in_a_damaged_page_is_lost_alone(tmp_path: Path) -> None:
    changes = [saved(f"s{n}", sequence=n) for n in range(1, 10)]
    path = old_catalog(tmp_path, changes)
    assert changes[4].record is not None
    victim = changes[4].record.head().pack()
    assert victim in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(victim, bytes(len(victim))))
    assert salvaged(path) == lists(*changes[:4], *changes[5:])


def test_a_text_in_a_damaged_page_is_lost_with_the_sessions_that_need_it(tmp_path: Path) -> None:
    changes = [saved("short", 200), saved("one", 300, first=1000), saved("two", 310, first=1000), saved("other", 300)]
    path = old_catalog(tmp_path, changes)
    victim = np.arange(1000, 1256, dtype=np.uint32).tobytes()
    assert path.read_bytes().count(victim) == 1  # both have it together
    path.write_bytes(path.read_bytes().replace(victim, bytes(len(victim))))
    assert salvaged(path) == lists(changes[0], changes[3])


@pytest.mark.parametrize("seed", range(5))
def test_salvage_of_pages_full_of_noise_gives_only_true_sessions(tmp_path: Path, seed: int) -> None:
    changes = [saved(f"s{n}", count=4 * n, sequence=n) for n in range(1, 100)]
    path = old_catalog(tmp_path, changes)
    data = bytearray(path.read_bytes())
    generator = np.random.default_rng(seed)
    for where in generator.integers(0, len(data), len(data) // 512):
        data[where] = int(generator.integers(256))
    path.write_bytes(data)
    assert salvaged(path).items() <= lists(*changes).items()


@pytest.mark.parametrize("data", [b"", b"x", b"\xff" * 3 * PAGE_BYTES, b"\x02" * 5 * PAGE_BYTES])
def test_salvage_of_no_catalog_gives_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(data)
    assert salvaged(tmp_path / "data.mdb") == {}
    assert salvaged(tmp_path / "missing.mdb") == {}


def test_a_rebuilt_catalog_has_the_sessions(tmp_path: Path, made: list[Catalog]) -> None:
    changes = [saved(f"s{n}", count=150 * n, sequence=n) for n in range(1, 5)]
    old = old_catalog(tmp_path, changes)
    catalog = rebuilt(tmp_path, made, [], old=str(old.relative_to(tmp_path)))
    assert tokens_in(catalog) == lists(*changes)
    assert catalog.session_problems() == (4, [])


def test_sessions_of_format_1_are_found_in_the_pages_of_a_damaged_catalog(tmp_path: Path, made: list[Catalog]) -> None:
    (tmp_path / "old").mkdir()
    records = [session(f"s{n}", count=200 * n, sequence=n) for n in range(1, 30)]
    write_format_1(tmp_path / "old", records)
    catalog = rebuilt(tmp_path, made, [], old="old/data.mdb")
    assert tokens_in(catalog) == {record.name: record.tokens.tolist() for record in records}
    assert catalog.session_problems() == (29, [])
