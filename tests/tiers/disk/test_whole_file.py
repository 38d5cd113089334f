"""The catalog's file is read at once only where a look step by step finds nothing wrong, and the same entries."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.core.record import FLAG_CUT
from kvstore.tiers.disk import environment
from kvstore.tiers.disk._catalog import read, xxh3_64
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.catalog_file import DATA_FILE, META_BYTES, Metas, is_cut_short
from kvstore.tiers.disk.entry import Entry, Scan
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.segment import Extent
from kvstore.tiers.disk.whole_file import read_whole

pytestmark = pytest.mark.native

PAGE = 4096


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


def step_by_step(file: Path) -> Scan | None:
    """What is found without `read_whole`; None where anything is wrong."""
    fs = FileSystem()
    if environment.check(str(file.parent)) or is_cut_short(fs, str(file)) or not Metas.read(fs, str(file)).agree:
        return None
    try:
        catalog = Catalog(str(file.parent), 1 << 26, readonly=True)
    except CatalogError:
        return None
    try:
        scan = catalog.scan() if catalog.is_sound() else None
    except CatalogError:
        return None
    finally:
        catalog.close()
    return scan if scan is not None and not scan.damaged else None


def same(a: Scan, b: Scan) -> bool:
    arrays = ("entries", "tokens", "holes", "hole_tokens")
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in arrays) and (
        (a.donors, a.cuts, a.damaged) == (b.donors, b.cuts, b.damaged)
    )


def test_it_finds_what_is_found_step_by_step(tmp_path: Path) -> None:
    file = made(tmp_path / "catalog")
    found, want = read_whole(FileSystem(), str(file)), step_by_step(file)
    assert found is not None
    assert want is not None
    assert same(found.scan, want)
    assert found.commit == max(Metas.read(FileSystem(), str(file)).commits)
    assert want.donors == {6: (1, 2, 3)}
    assert want.cuts == {9: 77}
    assert len(want.holes) == 1
    assert len(want.entries) == 400 - 150 - 1


def test_the_first_scan_of_that_commit_gives_it_and_no_other(tmp_path: Path) -> None:
    file = made(tmp_path / "catalog")
    whole = read_whole(FileSystem(), str(file))
    assert whole is not None
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
        assert found is not None
        assert same(found.scan, catalog.scan())
    fs.commits = 3
    assert read_whole(fs, str(file)) is None
    catalog.close()


def test_an_empty_catalog_is_read(tmp_path: Path) -> None:
    Catalog(str(tmp_path), 1 << 24, readonly=False).close()
    found = read_whole(FileSystem(), str(tmp_path / DATA_FILE))
    assert found is not None
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
        if whole is None:
            continue
        believed += 1
        want = step_by_step(file)
        assert want is not None, (trial, place)
        assert same(whole.scan, want), (trial, place)
    assert 0 < believed < 250  # gaps and free pages may hold anything


def test_any_bytes_of_any_length_are_refused_or_read(tmp_path: Path) -> None:
    sound, rng = made(tmp_path / "catalog", 60).read_bytes(), random.Random(3)
    assert isinstance(read(np.zeros(0, np.uint8)), str)
    for size in (1, PAGE, 2 * PAGE, 2 * PAGE + 1, len(sound) - PAGE, len(sound) - 1):
        assert isinstance(read(np.frombuffer(sound[:size], np.uint8)), str)
    for _ in range(300):
        damaged = bytearray(sound)
        for _ in range(rng.randrange(1, 40)):
            at = rng.randrange(len(damaged) - 8)
            damaged[at : at + rng.choice([1, 2, 4, 8])] = rng.choice([os.urandom(8), b"\xff" * 8, bytes(8)])[:8]
        read(np.frombuffer(bytes(damaged), np.uint8))


def test_a_tree_that_says_it_has_no_levels_does_not_lead_anywhere(tmp_path: Path) -> None:
    damaged = bytearray(made(tmp_path / "catalog").read_bytes())
    for meta in (0, PAGE):
        damaged[meta + 16 + 24 + 48 + 6 : meta + 16 + 24 + 48 + 8] = b"\0\0"  # depth of the main tree
    assert isinstance(read(np.frombuffer(bytes(damaged), np.uint8)), str)


def test_the_checksum_is_the_one_of_the_package() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8)
    for size in [*range(17, 1200), 2048, 3000]:
        assert xxh3_64(data[:size]) == xxhash.xxh3_64_intdigest(data[:size].tobytes())
    with pytest.raises(ValueError, match="17 bytes"):
        xxh3_64(data[:16])
