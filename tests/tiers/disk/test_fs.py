from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvstore.config import MIB
from kvstore.tiers.disk.fs import FileSystem, write_all


class Recording(FileSystem):
    """Notes each write; takes one byte less than it was given of those after the first `good`."""

    def __init__(self, good: int = 100) -> None:
        self.calls: list[tuple[int, int]] = []
        self._good = good

    def pwritev(self, fd, buffers, offset):
        self.calls.append((offset, sum(map(len, buffers))))
        done = super().pwritev(fd, buffers, offset)
        return done if len(self.calls) <= self._good else done - 1


@pytest.mark.parametrize("sizes", [[], [1], [4 * MIB] * 9, [12 * MIB, 12 * MIB, 36 * MIB, 1], [10] * 1100])
def test_long_writes_are_made_in_parts(tmp_path: Path, sizes: list[int]) -> None:
    fs, path = Recording(), os.fspath(tmp_path / "file")
    data = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    fd = fs.open(path, os.O_RDWR | os.O_CREAT)
    write_all(fs, fd, [memoryview(one) for one in data], 5)
    fs.close(fd)
    assert Path(path).read_bytes() == (b"\0" * 5 + b"".join(data) if sizes else b"")
    ends = [offset + count for offset, count in fs.calls]
    assert [offset for offset, _ in fs.calls] == [5, *ends[:-1]][: len(ends)]
    assert all(count <= 16 * MIB or count in sizes for _, count in fs.calls)
    assert len(fs.calls) <= len(sizes)


def test_a_short_part_is_an_error(tmp_path: Path) -> None:
    fs = Recording(good=1)
    fd = fs.open(os.fspath(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="short write") as raised:
        write_all(fs, fd, [memoryview(bytes(MIB))] * 24, 0)
    fs.close(fd)
    assert raised.value.errno == errno.EIO
    assert len(fs.calls) == 2
