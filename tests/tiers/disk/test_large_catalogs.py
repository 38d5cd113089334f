"""The file of a large catalog is looked through by several threads, and read past the page cache."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from length import part
from wholefiles import is_same, step_by_step

from kvstore.core.record import FLAG_CUT
from kvstore.tiers.disk import whole_file
from kvstore.tiers.disk._catalog import read
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.catalog_file import DATA_FILE
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.fs import O_DIRECT, FileSystem
from kvstore.tiers.disk.segment import Extent
from kvstore.tiers.disk.whole_file import WholeFile, read_whole

pytestmark = pytest.mark.native
PAGE = 4096


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog whose trees of records and of places have three levels."""
    folder, rng = tmp_path_factory.mktemp("catalog"), np.random.default_rng(0)
    catalog = Catalog(str(folder), 1 << 28, readonly=False)
    catalog.namespace(b"n" * 32)
    entries = []
    for i in range(1, 40_001):
        tokens = rng.integers(0, 2**32, i % 30 + 1 if i % 997 else 1500, dtype=np.uint32)
        more: dict[str, Any] = {"flags": FLAG_CUT, "cut": i} if i % 501 == 0 else {}
        more |= {"donors": (i - 1, i - 2)} if i % 503 == 0 else {}
        extent = Extent(i % 3, PAGE * i, PAGE)
        entries.append(Entry(i, i - 1, i * 7, i * 5, extent, 64 * i, 1, codec=7, tokens=tokens, **more))
    catalog.commit(entries)
    catalog.commit(removed=entries[9000:9100])
    catalog.close()
    return folder / DATA_FILE


def outcome(file: bytes | bytearray, threads: int) -> tuple[Any, ...] | str:
    memory = np.frombuffer(bytearray(file), np.uint8)
    found = read(memory, threads)
    if isinstance(found, str):
        return found
    commit, heads, count, token_at, longer = found
    return commit, heads.tobytes(), memory[: 4 * count].tobytes(), token_at.tobytes(), longer


def test_threads_find_together_what_one_finds(file: Path) -> None:
    data = file.read_bytes()
    alone = outcome(data, 1)
    assert not isinstance(alone, str)
    assert len(alone[1]) == 80 * 39_900
    for threads in (2, 3, 7, 64):
        assert outcome(data, threads) == alone
    for threads in (0, 65):
        with pytest.raises(ValueError, match="threads"):
            read(np.frombuffer(bytearray(data), np.uint8), threads)


def test_threads_refuse_what_one_refuses(file: Path) -> None:
    sound, rng = file.read_bytes(), random.Random(5)
    refused = 0
    for _ in range(part(40)):
        damaged = bytearray(sound)
        at = rng.randrange(len(sound) // PAGE) * PAGE + rng.choice([rng.randrange(40), rng.randrange(PAGE)])
        damaged[at : at + 8] = rng.choice([rng.randbytes(8), sound[at + PAGE : at + PAGE + 8].ljust(8, b"\0")])
        alone, together = outcome(damaged, 1), outcome(damaged, 3)
        if isinstance(alone, str):
            refused += 1
            assert isinstance(together, str)
        else:
            assert together == alone
    assert refused


def test_a_page_that_two_threads_come_by_is_refused(file: Path) -> None:
    """The root of a tree names one of its pages twice, at its two ends."""
    data = bytearray(file.read_bytes())
    swapped = 0
    for page in range(2 * PAGE, len(data), PAGE):
        flags, lower = (int.from_bytes(data[page + at : page + at + 2], "little") for at in (10, 12))
        if flags != 1 or lower < 16 + 2 * 20:
            continue
        nodes = [int.from_bytes(data[page + at : page + at + 2], "little") for at in range(16, lower, 2)]
        data[page + nodes[-1] : page + nodes[-1] + 6] = data[page + nodes[0] : page + nodes[0] + 6]
        swapped += 1
    assert swapped
    assert isinstance(outcome(data, 1), str)
    assert isinstance(outcome(data, 2), str)


class Watched(FileSystem):
    """Notes how files are opened; refuses O_DIRECT at open, or with the first read, where it is told to."""

    def __init__(self, at_open: int = 0, at_read: int = 0) -> None:
        self.at_open, self.at_read = at_open, at_read
        self.direct: set[int] = set()
        self.opened: list[bool] = []
        self.read_directly = 0

    def open(self, path: str, flags: int) -> int:
        direct = bool(flags & O_DIRECT)
        if direct and self.at_open:
            raise OSError(self.at_open, "no")
        self.opened.append(direct)
        fd = super().open(path, flags)
        (self.direct.add if direct else self.direct.discard)(fd)
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd in self.direct:
            if self.at_read:
                raise OSError(self.at_read, "no")
            self.read_directly += sum(len(buffer) for buffer in buffers)
        return super().preadv(fd, buffers, offset)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_file, "_LARGE", PAGE)
    monkeypatch.setattr(whole_file, "_PART", 3 * PAGE)


@pytest.mark.usefixtures("small_limits")
def test_a_large_file_is_read_past_the_page_cache(file: Path) -> None:
    fs, want = Watched(), step_by_step(file)
    found = read_whole(fs, str(file))
    assert isinstance(found, WholeFile)
    assert want is not None
    assert is_same(found.scan, want)
    assert fs.read_directly > 39_900 * 80 or not O_DIRECT


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("when", ["at_open", "at_read"])
def test_where_there_is_no_direct_reading_it_is_read_by_way_of_the_page_cache(
    file: Path, number: int, when: str
) -> None:
    fs = Watched(**{when: number})
    found = read_whole(fs, str(file))
    assert isinstance(found, WholeFile)
    assert len(found.scan.entries) == 39_900
    assert fs.read_directly == 0


@pytest.mark.usefixtures("small_limits")
def test_a_disk_that_cannot_be_read_is_left_to_others(file: Path) -> None:
    assert "no" in str(read_whole(Watched(at_read=errno.EIO), str(file)))


@pytest.mark.usefixtures("small_limits")
def test_a_file_that_ends_within_a_page_is_refused_and_not_read_directly(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    cut = tmp_path / DATA_FILE
    cut.write_bytes(data[: len(data) // 2 // PAGE * PAGE + 5])
    fs = Watched()
    assert isinstance(read_whole(fs, str(cut)), str)
    assert fs.read_directly == 0


def test_a_small_file_is_read_by_way_of_the_page_cache(file: Path) -> None:
    fs = Watched()
    assert os.path.getsize(file) < whole_file._LARGE
    assert isinstance(read_whole(fs, str(file)), WholeFile)
    assert not any(fs.opened)
