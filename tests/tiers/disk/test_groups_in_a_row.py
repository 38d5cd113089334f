"""Groups that are written one after another: the bytes of each while the one before it is committed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from disktiers import Harness, payload
from threadruns import HANGS_S

from kvstore.metrics import Metric
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.fs import FileSystem


class GatedWrites(FileSystem):
    """Writes of other threads than the test's wait while the gate is shut; every sync fails while `failing`."""

    def __init__(self) -> None:
        self.gate, self.failing = threading.Event(), False
        self.gate.set()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(HANGS_S)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        if self.failing:
            raise OSError(errno.EIO, "injected")
        super().fdatasync(fd)


def test_the_bytes_of_a_group_are_written_while_the_one_before_is_committed(tmp_path: Path) -> None:
    fs = GatedWrites()
    h = Harness(tmp_path, fs=fs)
    with h.tier.paused():
        one = h.tier.begin([h.draft(1), h.draft(2)])
        fs.gate.clear()
        other = h.tier.begin([h.draft(3)], beside=True)  # nobody else refers to its buffer
        assert h.tier.finish(one) == {1, 2}
        assert [h.tier.holds(n) for n in (1, 2, 3)] == [True, True, False]
        scribbled = [h.pool.take(8192) for _ in range(8)]
        for buffer in scribbled:
            buffer.view[:] = b"x" * 8192
        fs.gate.set()
        assert h.tier.finish(other) == {3}
    for number in (1, 2, 3):
        assert h.payload(number)[:3000] == payload(number, 3000)
    h.tier.take_scan()
    assert h.tier.survey().problems == ()
    h.tier.close()


def test_a_group_in_a_segment_whose_sync_failed_before_is_dropped(tmp_path: Path) -> None:
    fs = GatedWrites()
    h = Harness(tmp_path, fs=fs)
    h.write(1)
    with h.tier.paused():
        one = h.tier.begin([h.draft(2)])
        other = h.tier.begin([h.draft(3)], beside=True)
        other.wait()
        fs.failing = True
        assert h.tier.finish(one) == set()
        fs.failing = False
        assert h.tier.finish(other) == set()  # it is in the same segment: a second sync would prove nothing
    assert h.metrics[Metric.DROPPED_WRITE_ERROR] == 2
    assert h.write(4) == {4}
    assert [h.tier.holds(n) for n in (1, 2, 3, 4)] == [True, False, False, True]
    h.tier.take_scan()
    assert h.tier.survey().problems == ()
    h.tier.close()


def test_a_group_whose_namespace_cannot_be_noted_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(digest: bytes) -> int:
        raise CatalogError("injected")

    h = Harness(tmp_path)
    h.write(1)
    monkeypatch.setattr(h.tier.catalog, "namespace", refuses)
    assert h.tier.write([h.draft(2, namespace=b"m" * 32)]) is None
    assert h.metrics[Metric.CATALOG_ERRORS] == 1
    assert h.write(3) == {3}
    h.tier.take_scan()
    assert h.tier.survey().problems == ()
    h.tier.close()


class NoneLeft(GatedWrites):
    """Lacks a descriptor for each file that is made, until a file is synced; counts the syncs."""

    def __init__(self) -> None:
        super().__init__()
        self.lacking, self.syncs = False, 0

    def open(self, path: str, flags: int) -> int:
        if self.lacking and flags & os.O_CREAT and path.endswith(".seg"):
            raise OSError(errno.EMFILE, "injected")
        return super().open(path, flags)

    def fdatasync(self, fd: int) -> None:
        self.syncs += 1
        self.lacking = False
        super().fdatasync(fd)


@pytest.mark.parametrize("written", [True, False])
def test_who_lacks_descriptors_closes_the_files_of_groups_that_are_written(tmp_path: Path, written: bool) -> None:
    fs = NoneLeft()
    h = Harness(tmp_path, fs=fs)
    with h.tier.paused():
        one = h.tier.begin([h.draft(1)])
        if not written:
            fs.gate.clear()
        other = h.tier.begin([h.draft(2)], beside=True)
        if written:
            other.wait()
        assert h.tier.finish(one) == {1}
        before, fs.lacking = fs.syncs, True
        own = h.tier._unsynced()
        if written:
            own.with_descriptors(h.tier.segments.make)
            assert fs.syncs > before
        else:  # its file is still being written to: a sync now would prove nothing of what comes
            with pytest.raises(OSError, match="injected"):
                own.with_descriptors(h.tier.segments.make)
            assert fs.syncs == before
        fs.lacking = False
        fs.gate.set()
        assert h.tier.finish(other) == {2}
    assert [h.payload(number)[:3000] == payload(number, 3000) for number in (1, 2)] == [True, True]
    h.tier.close()
