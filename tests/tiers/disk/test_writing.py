"""What writes a group of buffers: one call without the interpreter's lock, or calls that a test sees; alike."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.disk import _files, fs
from kvstore.tiers.disk.fs import FileSystem, write_all

pytestmark = pytest.mark.native


class Seen(FileSystem):
    """Sees every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls.append((offset, len(buffers), sum(map(len, buffers))))
        return super().pwritev(fd, buffers, offset)


def pieces(*sizes: int) -> list[memoryview]:
    rng = np.random.default_rng(0)
    return [memoryview(rng.bytes(size)) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [5, 0, 7],
        [100] * 1300,  # more buffers than a call takes
        [12 << 20, 4 << 20, 1, 20 << 20, 5, (16 << 20) + 1, 6 << 20, 6 << 20, 6 << 20],  # more bytes than that
    ],
)
def test_both_ways_write_the_same(tmp_path: Path, sizes: list[int]) -> None:
    buffers, contents, seen = pieces(*sizes), [], Seen()
    for name, system in (("a", FileSystem()), ("b", seen)):
        fd = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT)
        write_all(system, fd, buffers, 4096)
        os.close(fd)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]
    assert contents[0][4096:] == b"".join(buffers)
    assert all(nbytes <= 16 << 20 or count == 1 for _, count, nbytes in seen.calls)
    assert all(count <= 512 for _, count, _ in seen.calls)


@pytest.mark.parametrize("system", [FileSystem(), Seen()])
def test_errors_of_the_system_are_raised(system: FileSystem) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError) as caught:
            write_all(system, fd, pieces(10, 20), 0)
    finally:
        os.close(fd)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError) as caught:
        write_all(system, fd, pieces(10, 20), 0)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("system", [FileSystem(), Seen()])
def test_a_short_write_is_an_error(tmp_path: Path, system: FileSystem) -> None:
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    try:
        with pytest.raises(OSError, match="did not take all of 20000 bytes") as caught:
            write_all(system, fd, pieces(12_000, 8_000), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
        os.close(fd)
    assert caught.value.errno == errno.EIO


def test_a_file_system_that_replaces_the_call_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> int:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(FileSystem, "pwritev", refuses)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="no"):
        write_all(FileSystem(), fd, pieces(10), 0)
    os.close(fd)


def test_what_is_no_memory_is_refused_and_holds_nothing(tmp_path: Path) -> None:
    held = bytearray(10)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises((TypeError, BufferError)):
        _files.write_all(fd, [memoryview(held), 5], 0, 1 << 20, 512)  # type: ignore[list-item]
    held.extend(b"x")  # would fail if its buffer were still taken
    with pytest.raises(ValueError, match="most_pieces"):
        _files.write_all(fd, [memoryview(held)], 0, 1 << 20, 0)
    assert os.fstat(fd).st_size == 0
    os.close(fd)
    assert fs._PWRITEV is FileSystem.pwritev
