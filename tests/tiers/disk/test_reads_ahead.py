"""Reads that are under way while something else is done, against plain ones; and what they leave to whom."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.config import PAGE_BYTES
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.disk import _files
from kvstore.tiers.disk.fs import O_DIRECT, FileSystem, reads_ahead

SIZE = 3 << 20
WAIT_S = 20.0


def memory(nbytes: int) -> memoryview:
    """Page-aligned memory."""
    return memoryview(mmap.mmap(-1, nbytes))


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(7).bytes(SIZE)


@pytest.fixture
def descriptor(tmp_path: Path, data: bytes) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(data)
    try:
        fd = os.open(path, os.O_RDONLY | O_DIRECT)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    yield fd
    os.close(fd)


@pytest.mark.parametrize("most_requests", [1, 2, 16])
@pytest.mark.parametrize("most_bytes", [PAGE_BYTES, 5 * PAGE_BYTES, 1 << 20])
def test_reads_are_those_of_preadv(descriptor: int, data: bytes, most_requests: int, most_bytes: int) -> None:
    rng = np.random.default_rng(most_requests)
    reads, expected, got, numbers = _files.Reads(most_requests, most_bytes), [], [], []
    for _ in range(40):
        sizes = [PAGE_BYTES * int(n) for n in rng.integers(1, 30, int(rng.integers(1, 9)))]
        offset = PAGE_BYTES * int(rng.integers(0, (SIZE - sum(sizes)) // PAGE_BYTES))
        buffers, plain = [memory(size) for size in sizes], [memory(size) for size in sizes]
        numbers.append(reads.begin(descriptor, buffers, offset, None))
        os.preadv(descriptor, plain, offset)
        expected.append(b"".join(plain))
        got.append(buffers)
    for number in rng.permutation(40).tolist():
        reads.wait(numbers[number])
        assert b"".join(got[number]) == expected[number]


@pytest.mark.parametrize("most_bytes", [PAGE_BYTES, 5 * PAGE_BYTES, 1 << 20])
def test_parts_that_lie_apart_are_one_read(descriptor: int, data: bytes, most_bytes: int) -> None:
    rng, reads = np.random.default_rng(3), _files.Reads(4, most_bytes)
    for _ in range(20):
        pages = rng.integers(0, SIZE // PAGE_BYTES - 8, 10).tolist()
        pages[4], pages[7] = pages[3] + 2, pages[6] + 8  # some follow each other
        sizes = [PAGE_BYTES * int(n) for n in rng.integers(1, 9, 10)]
        sizes[3] = 2 * PAGE_BYTES
        offsets = [min(page * PAGE_BYTES, SIZE - size) for page, size in zip(pages, sizes, strict=True)]
        buffers = [memory(size) for size in sizes]
        reads.wait(reads.begin_apart(descriptor, buffers, offsets, None))
        expected = [data[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        assert [bytes(buffer) for buffer in buffers] == expected


def test_a_part_behind_the_end_of_the_file_fails_the_read(descriptor: int) -> None:
    reads = _files.Reads(4, 1 << 20)
    number = reads.begin_apart(descriptor, [memory(PAGE_BYTES), memory(PAGE_BYTES)], [0, SIZE], None)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        reads.wait(number)


def test_parts_need_an_offset_each(descriptor: int) -> None:
    with pytest.raises(ValueError, match="offsets: expected 2 values, found 1"):
        _files.Reads(4, 1 << 20).begin_apart(descriptor, [memory(PAGE_BYTES), memory(PAGE_BYTES)], [0], None)


def test_many_requests_of_more_pieces_than_one_takes(descriptor: int, data: bytes) -> None:
    reads, buffers = _files.Reads(2, 1 << 30), [memory(PAGE_BYTES) for _ in range(SIZE // PAGE_BYTES)]
    assert len(buffers) > 512
    reads.wait(reads.begin(descriptor, buffers, 0, None))
    assert b"".join(buffers) == data


def test_threads_wait_for_reads_of_each_other(descriptor: int, data: bytes) -> None:
    reads, wrong = _files.Reads(2, 1 << 16), []

    def read(seed: int) -> None:
        for at in np.random.default_rng(seed).integers(0, SIZE // PAGE_BYTES - 40, 60).tolist():
            buffer = memory(40 * PAGE_BYTES)
            reads.wait(reads.begin(descriptor, [buffer], at * PAGE_BYTES, None))
            if bytes(buffer) != data[at * PAGE_BYTES :][: len(buffer)]:
                wrong.append(at)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert wrong == []


def test_a_file_that_ends_too_soon_is_an_error(descriptor: int) -> None:
    reads = _files.Reads(2, 1 << 20)
    good = reads.begin(descriptor, [memory(PAGE_BYTES)], 0, None)
    short = reads.begin(descriptor, [memory(2 << 20)], SIZE - (1 << 20), None)
    with pytest.raises(OSError) as raised:
        reads.wait(short)
    assert raised.value.errno == errno.EIO
    reads.wait(good)


def test_what_the_system_refuses_is_an_error_of_that_read(descriptor: int) -> None:
    reads = _files.Reads(2, 1 << 20)
    with pytest.raises(OSError) as raised:
        reads.wait(reads.begin(1 << 20, [memory(PAGE_BYTES)], 0, None))
    assert raised.value.errno == errno.EBADF
    reads.wait(reads.begin(descriptor, [memory(PAGE_BYTES)], 0, None))


def test_settling_waits_and_leaves_the_outcome_to_whoever_takes_it(descriptor: int, data: bytes) -> None:
    reads, buffer = _files.Reads(2, 1 << 20), memory(40 * PAGE_BYTES)
    good = reads.begin(descriptor, [buffer], PAGE_BYTES, None)
    short = reads.begin(descriptor, [memory(2 << 20)], SIZE - (1 << 20), None)
    for _ in range(2):
        for number in (short, good):
            reads.settle(number)
    assert bytes(buffer) == data[PAGE_BYTES : 41 * PAGE_BYTES]
    reads.wait(good)
    with pytest.raises(OSError):
        reads.wait(short)
    with pytest.raises(IndexError):
        reads.settle(2)


def test_each_read_is_waited_for_once(descriptor: int) -> None:
    reads = _files.Reads(2, 1 << 20)
    number = reads.begin(descriptor, [memory(PAGE_BYTES)], 0, None)
    reads.wait(number)
    for unknown in (number, number + 1):
        with pytest.raises(IndexError, match="no such read is under way"):
            reads.wait(unknown)
    with pytest.raises(BufferError):
        reads.begin(descriptor, [memoryview(bytes(PAGE_BYTES))], 0, None)


def test_nothing_is_written_into_memory_when_its_reads_are_gone(descriptor: int) -> None:
    buffer = memory(SIZE)
    array = np.frombuffer(buffer, np.uint8)
    for _ in range(20):
        reads = _files.Reads(16, 1 << 17)
        reads.begin(descriptor, [buffer], 0, None)
        del reads  # waits
        array[:] = 0
        time.sleep(0.001)
        assert not array.any()


def test_what_a_read_keeps_goes_when_it_was_waited_for(descriptor: int) -> None:
    pool = BufferPool(keep_bytes=SIZE)

    def begin(reads: _files.Reads) -> int:
        buffer = pool.take(PAGE_BYTES)
        return reads.begin(descriptor, [buffer.view], 0, (buffer,))

    for waits in (True, False):
        reads = _files.Reads(2, 1 << 20)
        number = begin(reads)
        assert pool.free_bytes == 0
        if waits:
            reads.wait(number)
        else:
            del reads
        assert pool.free_bytes == PAGE_BYTES
        taken: Buffer = pool.take(PAGE_BYTES)
        del taken
        pool = BufferPool(keep_bytes=SIZE)


def test_a_forked_child_leaves_them_to_its_parent(descriptor: int, data: bytes) -> None:
    reads, buffer = _files.Reads(1, 1 << 17), memory(SIZE)
    number = reads.begin(descriptor, [buffer], 0, None)
    child = os.fork()
    if not child:  # nothing of pytest may run here
        try:
            del reads
            own, mine = _files.Reads(1, 1 << 17), memory(PAGE_BYTES)
            own.wait(own.begin(descriptor, [mine], 0, None))
            os._exit(0 if bytes(mine) == data[:PAGE_BYTES] else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + WAIT_S
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < end, "the child waits for reads of its parent"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(found[1]) == 0
    reads.wait(number)
    assert bytes(buffer) == data


def test_a_file_system_of_tests_sees_every_read() -> None:
    class Watched(FileSystem):
        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            return super().preadv(fd, buffers, offset)

    assert isinstance(reads_ahead(FileSystem()), _files.Reads)
    assert reads_ahead(Watched()) is None
