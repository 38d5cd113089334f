"""The catalog's file is read at once only where a look step by step finds nothing wrong, and the same entries."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import small_stores
import xxhash
from wholefiles import is_same, step_by_step

from kvstore import KVStore
from kvstore.core.record import FLAG_CUT
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk._catalog import read, xxh3_64
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.catalog_file import DATA_FILE, META_BYTES, Metas
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.segment import Extent
from kvstore.tiers.disk.whole_file import WholeFile, read_whole

pytestmark = pytest.mark.native

PAGE = 4096
LAST_PAGE, PAD = 16 + 120, 16 + 72  # where a meta page has them; the second is of the main tree


def entry(record: int, tokens: int = 64, **more: object) -> Entry:
    ids = np.random.default_rng(record).integers(0, 2**32, tokens, dtype=np.uint32)
    extent = Extent(1 + record % 3, PAGE * (1 + record), PAGE)
    return Entry(record, record - 1, record * 7, record * 5, extent, 64 * record, 1, codec=7, tokens=ids, **more)  # type: ignore[arg-type]


def made(folder: Path, count: int = 400) -> Path:
    """A catalog with members, cuts, holes, long values, free pages and sessions; its file."""
    folder.mkdir()
    catalog = Catalog(str(folder), 1 << 26, readonly=False)
    catalog.namespace(b"n" * 32)
    entries = [entry(i, tokens=1 + i % 64) for i in range(1, count + 1)]
    entries[5] = entry(6, donors=(1, 2, 3))
    entries[8] = entry(9, flags=FLAG_CUT, cut=77)
    entries[11] = entry(12).as_hole()
    entries[14] = entry(15, tokens=2000)  # lies in pages of its own
    catalog.commit(entries)
    catalog.commit(removed=entries[100:250])
    catalog.save_traffic(np.arange(1, 90, dtype=np.uint64), np.arange(1, 90, dtype=np.uint32), b"")
    catalog.close()
    return folder / DATA_FILE


def test_it_finds_what_is_found_step_by_step(tmp_path: Path) -> None:
    file = made(tmp_path / "catalog")
    found, want = read_whole(FileSystem(), str(file)), step_by_step(file)
    assert isinstance(found, WholeFile)
    assert want is not None
    assert is_same(found.scan, want)
    assert found.commit == max(Metas.read(FileSystem(), str(file)).commits)
    assert want.donors == {6: (1, 2, 3)}
    assert want.cuts == {9: 77}
    assert len(want.holes) == 1
    assert len(want.entries) == 400 - 150 - 1


def test_the_first_scan_of_that_commit_gives_it_and_no_other(tmp_path: Path) -> None:
    file = made(tmp_path / "catalog")
    whole = read_whole(FileSystem(), str(file))
    assert isinstance(whole, WholeFile)
    catalog = Catalog(str(file.parent), 1 << 26, readonly=False)
    catalog.offer(*whole)
    assert catalog.scan() is whole.scan
    assert catalog.scan() is not whole.scan
    catalog.offer(*whole)
    catalog.commit([entry(900)])
    assert catalog.scan().last_record == 900
    catalog.close()


def test_a_file_that_a_writer_changes_is_read_again_and_then_left_to_others(tmp_path: Path) -> None:
    file = made(tmp_path / "catalog")
    catalog = Catalog(str(file.parent), 1 << 26, readonly=False)

    class Busy(FileSystem):
        commits = 0

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            done = super().preadv(fd, buffers, offset)
            if sum(len(buffer) for buffer in buffers) > META_BYTES and self.commits:
                self.commits -= 1
                catalog.commit([entry(1000 + self.commits)])
            return done

    fs = Busy()
    for commits in (1, 2):
        fs.commits = commits
        found = read_whole(fs, str(file))
        assert isinstance(found, WholeFile)
        assert is_same(found.scan, catalog.scan())
    fs.commits = 3
    assert read_whole(fs, str(file)) == "it is changed all the while"
    catalog.close()


def test_an_empty_catalog_is_read(tmp_path: Path) -> None:
    Catalog(str(tmp_path), 1 << 24, readonly=False).close()
    found = read_whole(FileSystem(), str(tmp_path / DATA_FILE))
    assert isinstance(found, WholeFile)
    assert not len(found.scan.entries)


def test_nothing_is_believed_that_is_refused_step_by_step(tmp_path: Path) -> None:
    """Flipped bits, numbers and pages in any place: it never takes what the careful way refuses."""
    file, rng = made(tmp_path / "catalog", 120), random.Random(7)
    sound = file.read_bytes()
    believed = 0
    for trial in range(250):
        damaged = bytearray(sound)
        # The first bytes of a page and its ends are where the structure stands.
        page = rng.randrange(len(sound) // PAGE) * PAGE
        place = page + rng.choice([rng.randrange(16), rng.randrange(16, 200), rng.randrange(PAGE)])
        if trial % 3 == 0:
            damaged[place] ^= 1 << rng.randrange(8)
        elif trial % 3 == 1:
            damaged[place : place + 2] = rng.choice([b"\0\0", b"\xff\xff", b"\x01\0", sound[page : page + 2]])
        else:
            other = rng.randrange(len(sound) // PAGE) * PAGE
            damaged[page : page + PAGE] = sound[other : other + PAGE]
        file.write_bytes(damaged)
        whole = read_whole(FileSystem(), str(file))
        if isinstance(whole, str):
            continue
        believed += 1
        want = step_by_step(file)
        assert want is not None, (trial, place)
        assert is_same(whole.scan, want), (trial, place)
    assert 0 < believed < 250  # gaps and free pages may hold anything


def test_any_bytes_of_any_length_are_refused_or_read(tmp_path: Path) -> None:
    sound, rng = made(tmp_path / "catalog", 60).read_bytes(), random.Random(3)
    assert isinstance(read(np.zeros(0, np.uint8)), str)
    for size in (1, PAGE, 2 * PAGE, 2 * PAGE + 1, len(sound) - PAGE, len(sound) - 1):
        assert isinstance(read(np.frombuffer(bytearray(sound[:size]), np.uint8)), str)
    for _ in range(300):
        damaged = bytearray(sound)
        for _ in range(rng.randrange(1, 40)):
            at = rng.randrange(len(damaged) - 8)
            damaged[at : at + rng.choice([1, 2, 4, 8])] = rng.choice([os.urandom(8), b"\xff" * 8, bytes(8)])[:8]
        read(np.frombuffer(bytearray(damaged), np.uint8))


def test_a_tree_that_says_it_has_no_levels_does_not_lead_anywhere(tmp_path: Path) -> None:
    damaged = bytearray(made(tmp_path / "catalog").read_bytes())
    for meta in (0, PAGE):
        damaged[meta + 16 + 24 + 48 + 6 : meta + 16 + 24 + 48 + 8] = b"\0\0"  # depth of the main tree
    assert isinstance(read(np.frombuffer(bytearray(damaged), np.uint8)), str)


def test_the_checksum_is_the_one_of_the_package() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8)
    for size in [*range(17, 1200), 2048, 3000]:
        assert xxh3_64(data[:size]) == xxhash.xxh3_64_intdigest(data[:size].tobytes())
    with pytest.raises(ValueError, match="17 bytes"):
        xxh3_64(data[:16])


def test_what_lies_behind_the_last_page_is_not_read(tmp_path: Path) -> None:
    """A hole of any size takes no memory."""
    file = made(tmp_path / "catalog", 60)
    before = read_whole(FileSystem(), str(file))
    assert isinstance(before, WholeFile)
    os.truncate(file, 1 << 42)
    found = read_whole(FileSystem(), str(file))
    assert isinstance(found, WholeFile)
    assert is_same(found.scan, before.scan)


def test_a_file_that_takes_more_memory_than_there_is_is_left_to_others(tmp_path: Path) -> None:
    file = made(tmp_path / "catalog", 60)
    grown = bytearray(file.read_bytes())
    for meta in (0, PAGE):
        grown[meta + LAST_PAGE : meta + LAST_PAGE + 8] = (1 << 38).to_bytes(8, "little")
    file.write_bytes(grown)

    class Endless(FileSystem):
        def size(self, path: str) -> int:
            return 1 << 50

    assert "allocate" in str(read_whole(Endless(), str(file)))


def test_entries_within_entries_are_refused(tmp_path: Path) -> None:
    """Each of them sound, they could name many times the bytes of the file."""
    folder = tmp_path / "catalog"
    folder.mkdir()
    catalog = Catalog(str(folder), 1 << 24, readonly=False)
    catalog.commit([entry(1, tokens=400), entry(2, tokens=8)])
    catalog.close()
    file = bytearray((folder / DATA_FILE).read_bytes())
    assert not isinstance(read(np.frombuffer(bytearray(file), np.uint8)), str)
    page, at = node_of(file, 1)
    value = page + at + 16  # behind the node's head and the key
    within, inner = value + 200, entry(2, tokens=300).pack()
    file[within : within + 16 + len(inner)] = struct.pack("<IHH", len(inner), 0, 8) + (2).to_bytes(8, "big") + inner
    file[page + 16 + 2 : page + 16 + 4] = (within - page).to_bytes(2, "little")
    file[value : value + 8] = xxhash.xxh3_64_intdigest(bytes(file[value + 8 : value + 80 + 1600])).to_bytes(8, "little")
    assert read(np.frombuffer(bytearray(file), np.uint8)) == "a node is longer or shorter than the room it takes"


def node_of(file: bytearray, record: int) -> tuple[int, int]:
    """(page, place in it) of the newest node of an entry."""
    pages = [page for page in range(2 * PAGE, len(file), PAGE) if file[page + 10] == 2]
    found = [
        (page, at)
        for page in pages
        for slot in range(page + 16, page + int.from_bytes(file[page + 12 : page + 14], "little"), 2)
        if file[page + (at := int.from_bytes(file[slot : slot + 2], "little")) + 8 :][:8] == record.to_bytes(8, "big")
        and int.from_bytes(file[page + at : page + at + 4], "little") >= 80
    ]
    return found[-1]


def test_leaving_it_to_others_is_counted_and_said(tmp_path: Path) -> None:
    """A number that LMDB does not look at is no damage to it."""
    with KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config()) as store:
        small_stores.put(store, small_stores.tokens_of(1, 40))
    with KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config()) as store:
        assert "fallback_catalog_scan" not in store.stats()["counters"]
    path = tmp_path / "store" / "catalog" / DATA_FILE
    file = bytearray(path.read_bytes())
    for meta in (0, PAGE):
        file[meta + PAD] = 1
    path.write_bytes(file)
    assert read_whole(FileSystem(), str(path)) == "a database has unknown flags"
    with KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config()) as store:
        counters = store.stats()["counters"]
        assert counters["fallback_catalog_scan"] == 1
        assert "catalog_damaged" not in counters
        assert small_stores.stored(store, small_stores.tokens_of(1, 40)) == 40


def test_a_scan_that_is_done_again_is_counted(tmp_path: Path) -> None:
    file, metrics = made(tmp_path / "catalog", 20), Metrics()
    whole = read_whole(FileSystem(), str(file))
    assert isinstance(whole, WholeFile)
    catalog = Catalog(str(file.parent), 1 << 26, readonly=False, metrics=metrics)
    catalog.offer(*whole)
    catalog.commit([entry(900)])
    assert catalog.scan().last_record == 900
    assert metrics[Metric.FALLBACK_CATALOG_SCAN] == 1
    catalog.close()
