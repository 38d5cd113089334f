"""Segment files: filled from front to back, one in reserve, recycled when empty."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import KIB, PAGE_BYTES
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.segment import Extent
from kvstore.tiers.disk.segment_file import is_segment_of, segment_header, segment_numbers
from kvstore.tiers.disk.segments import OutOfSpace, Segments
from kvstore.tiers.disk.unsynced import Unsynced

SEGMENT = 64 * KIB
ROOM = SEGMENT - PAGE_BYTES
STORE = bytes(range(16))


class FailingSync(FileSystem):
    """Every fdatasync fails while `failing`; counts them."""

    failing = False
    calls = 0

    def fdatasync(self, fd: int) -> None:
        self.calls += 1
        if self.failing:
            raise OSError(errno.EIO, "injected")
        super().fdatasync(fd)


def opened(path: Path, max_segments: int = 4, fs: FileSystem | None = None, used=None, writable=True) -> Segments:
    segments = Segments(fs or FileSystem(), str(path), SEGMENT, max_segments, STORE)
    segments.open_existing(used or {}, writable)
    return segments


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[Segments]:
    made = opened(tmp_path)
    yield made
    made.close()


def commit(segments: Segments, extent: Extent) -> None:
    """What the disk tier does when the catalog has the record."""
    segments.born(extent)
    segments.settle(extent)


def fill(segments: Segments, pages: int = 3) -> list[Extent]:
    """Commits records until only the reserve is left."""
    extents = []
    while segments.has_room([pages * PAGE_BYTES]):
        extents.append(segments.place(pages * PAGE_BYTES))
        commit(segments, extents[-1])
    return extents


def test_a_new_segment_is_a_whole_preallocated_file_with_a_header(segments: Segments, tmp_path: Path) -> None:
    segments.place(PAGE_BYTES)
    (path,) = tmp_path.iterdir()
    assert path.name == "00000001.seg"
    assert path.stat().st_size == SEGMENT
    assert path.stat().st_blocks * 512 >= SEGMENT
    assert is_segment_of(path.read_bytes()[:PAGE_BYTES], 1, STORE)


def test_records_follow_each_other_after_the_header(segments: Segments) -> None:
    extents = [segments.place(n * PAGE_BYTES) for n in (1, 3, 2)]
    assert [(e.segment, e.offset) for e in extents] == [(1, PAGE_BYTES), (1, 2 * PAGE_BYTES), (1, 5 * PAGE_BYTES)]


def test_a_record_that_does_not_fit_starts_the_next_segment(segments: Segments) -> None:
    segments.place(ROOM - PAGE_BYTES)
    assert segments.place(2 * PAGE_BYTES) == Extent(2, PAGE_BYTES, 2 * PAGE_BYTES)


def test_a_record_as_large_as_a_segment_fits_exactly(segments: Segments) -> None:
    assert segments.place(ROOM) == Extent(1, PAGE_BYTES, ROOM)
    assert segments.place(ROOM) == Extent(2, PAGE_BYTES, ROOM)


def test_a_record_is_placed_in_the_current_segment_or_nowhere(segments: Segments) -> None:
    assert segments.place_here(PAGE_BYTES) is None  # none is being filled
    segments.place(PAGE_BYTES)
    assert segments.place_here(2 * PAGE_BYTES) == Extent(1, 2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert segments.place_here(ROOM) is None
    assert segments.place(PAGE_BYTES) == Extent(1, 4 * PAGE_BYTES, PAGE_BYTES)


def test_what_is_written_is_read_back(segments: Segments) -> None:
    pool = BufferPool(0)
    extents = [segments.place(n * PAGE_BYTES) for n in (1, 2, 14, 1)]
    buffers = []
    for number, extent in enumerate(extents):
        buffer = pool.take(extent.nbytes)
        buffer.view[:] = bytes([number + 1]) * extent.nbytes
        buffers.append(buffer)
    group = Unsynced(segments, segments.seal)
    group.write(extents, [b.view for b in buffers])
    group.sync({e.segment for e in extents})
    for number, extent in enumerate(extents):
        buffer = pool.take(extent.nbytes)
        segments.read(extent.segment, [buffer.view], extent.offset)
        assert bytes(buffer.view) == bytes([number + 1]) * extent.nbytes
    assert {e.segment for e in extents} == {1, 2}


def test_one_segment_stays_in_reserve(segments: Segments) -> None:
    fill(segments)
    assert len(segments.by_number) == 3
    assert segments.available() == 1
    with pytest.raises(OutOfSpace):
        segments.place(3 * PAGE_BYTES)


def test_the_reserve_can_be_used_on_demand_and_no_more_than_that(segments: Segments) -> None:
    fill(segments)
    assert segments.place(3 * PAGE_BYTES, reserve=True).segment == 4
    segments.place(ROOM - 3 * PAGE_BYTES, reserve=True)
    with pytest.raises(OutOfSpace):
        segments.place(PAGE_BYTES, reserve=True)


def test_an_empty_segment_is_filled_again_without_a_new_file(segments: Segments, tmp_path: Path) -> None:
    extents = fill(segments)
    for extent in extents:
        if extent.segment == 1:
            segments.died(extent)
    assert list(segments.free) == [1]
    names = sorted(p.name for p in tmp_path.iterdir())
    assert segments.place(3 * PAGE_BYTES) == Extent(1, PAGE_BYTES, 3 * PAGE_BYTES)
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_a_segment_with_one_live_record_is_not_recycled(segments: Segments) -> None:
    extents = [e for e in fill(segments) if e.segment == 1]
    for extent in extents[:-1]:
        segments.died(extent)
    assert segments.free == {}
    segments.died(extents[-1])
    assert len(segments.free) == 1


def test_a_segment_that_is_being_read_is_recycled_only_after(segments: Segments) -> None:
    extents = [e for e in fill(segments) if e.segment == 1]
    one, other = segments.hold(1), segments.hold(1)
    for extent in extents:
        segments.died(extent)
    del one
    segments.released([1])
    assert segments.free == {}
    del other
    segments.released([1])
    assert list(segments.free) == [1]


def test_a_segment_is_recycled_though_nobody_says_that_its_reads_ended(segments: Segments) -> None:
    extents = [e for e in fill(segments) if e.segment == 1]
    held = segments.hold(1)
    for extent in extents:
        segments.died(extent)
    before = segments.available()
    del held
    assert segments.available() == before + 1
    assert list(segments.free) == [1]


def test_a_segment_that_is_being_written_is_recycled_only_after(segments: Segments) -> None:
    first = segments.place(ROOM)
    commit(segments, segments.place(ROOM))
    assert segments.free == {}
    segments.settle(first)  # given up: never born
    assert list(segments.free) == [1]


def test_the_segment_that_is_being_filled_is_not_recycled(segments: Segments) -> None:
    extent = segments.place(PAGE_BYTES)
    commit(segments, extent)
    segments.died(extent)
    assert segments.free == {}
    assert segments.place(PAGE_BYTES) == Extent(1, 2 * PAGE_BYTES, PAGE_BYTES)


def test_a_segment_that_is_not_there_cannot_be_held(segments: Segments) -> None:
    assert not segments.hold(7)


def test_a_failed_sync_seals_the_segment_and_is_not_repeated(tmp_path: Path) -> None:
    fs = FailingSync()
    segments = opened(tmp_path, fs=fs)
    extent = segments.place(PAGE_BYTES)
    commit(segments, extent)
    fs.failing, fs.calls = True, 0
    with pytest.raises(OSError, match="injected"):
        Unsynced(segments, segments.seal).sync({1})
    assert fs.calls == 1
    fs.failing = False
    assert segments.by_number[1].sealed
    assert segments.place(PAGE_BYTES).segment == 2
    segments.close()


def test_a_sealed_segment_is_unlinked_when_empty(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    extent = segments.place(PAGE_BYTES)
    commit(segments, extent)
    segments.seal(1)
    assert (tmp_path / "00000001.seg").exists()
    segments.died(extent)
    assert not (tmp_path / "00000001.seg").exists()
    assert (segments.free, segments.by_number) == ({}, {})
    segments.close()


def test_live_and_file_bytes_are_sums(segments: Segments) -> None:
    extents = fill(segments)
    assert segments.live_bytes == len(extents) * 3 * PAGE_BYTES
    assert segments.file_bytes == 3 * SEGMENT
    segments.died(extents[0])
    assert segments.live_bytes == (len(extents) - 1) * 3 * PAGE_BYTES


def test_the_emptiest_segment_is_found_and_is_not_the_one_being_filled(segments: Segments) -> None:
    extents = fill(segments)
    for extent in [e for e in extents if e.segment == 2][:2]:
        segments.died(extent)
    emptiest = segments.emptiest(SEGMENT)
    assert emptiest is not None
    assert emptiest.number == 2
    other = segments.emptiest(SEGMENT, last=[2])
    assert other is not None
    assert other.number != 2
    assert segments.emptiest(emptiest.live, last=[2]) is emptiest
    assert segments.emptiest(emptiest.live - 1) is None


def test_what_was_placed_in_vain_takes_no_segment(segments: Segments) -> None:
    before = segments.available()
    extent = segments.place(PAGE_BYTES)
    segments.give_back_current()
    assert segments.available() == before - 1
    segments.settle(extent)
    segments.give_back_current()
    assert (segments.available(), segments.current) == (before, None)
    kept = segments.place(PAGE_BYTES)
    assert kept == extent
    segments.born(kept)
    segments.settle(kept)
    segments.give_back_current()
    assert segments.current is not None


def test_segments_of_an_empty_directory(segments: Segments) -> None:
    assert (segments.emptiest(SEGMENT), segments.live_bytes, segments.file_bytes, segments.available()) == (
        None,
        0,
        0,
        4,
    )


# ---- opening -----------------------------------------------------------------------------------------------------


def test_after_reopening_filling_goes_on_behind_the_last_live_record(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    for _ in range(3):
        commit(segments, segments.place(2 * PAGE_BYTES))
    segments.close()
    again = opened(tmp_path, used={1: (5 * PAGE_BYTES, 4 * PAGE_BYTES)})
    assert again.place(PAGE_BYTES) == Extent(1, 5 * PAGE_BYTES, PAGE_BYTES)
    assert again.live_bytes == 4 * PAGE_BYTES
    again.close()


def test_after_reopening_segments_that_nobody_mentions_are_free(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    fill(segments)
    segments.close()
    again = opened(tmp_path, used={2: (SEGMENT, ROOM)})
    assert list(again.free) == [1, 3]
    assert again.next_number == 4
    again.close()


def test_a_segment_that_is_missing_is_reported(tmp_path: Path) -> None:
    segments = Segments(FileSystem(), str(tmp_path), SEGMENT, 4, STORE)
    assert segments.open_existing({3: (2 * PAGE_BYTES, PAGE_BYTES)}, True) == [3]
    assert not segments.hold(3)
    segments.close()


def test_a_segment_cut_short_is_reported_read_and_never_written_again(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    extent = segments.place(PAGE_BYTES)
    segments.close()
    os.truncate(tmp_path / "00000001.seg", 3 * PAGE_BYTES)
    again = Segments(FileSystem(), str(tmp_path), SEGMENT, 4, STORE)
    assert again.open_existing({1: (2 * PAGE_BYTES, PAGE_BYTES)}, True) == [1]
    again.read(1, [BufferPool(0).take(PAGE_BYTES).view], extent.offset)
    assert again.place(PAGE_BYTES).segment == 2
    again.close()


def test_an_empty_segment_cut_short_is_removed_by_a_writer_and_left_by_a_reader(tmp_path: Path) -> None:
    (tmp_path / "00000001.seg").write_bytes(b"half made")
    reader = opened(tmp_path, writable=False)
    assert (tmp_path / "00000001.seg").exists()
    assert reader.by_number == {}
    reader.close()
    writer = opened(tmp_path)
    assert not (tmp_path / "00000001.seg").exists()
    assert writer.place(PAGE_BYTES).segment == 2
    writer.close()


def test_other_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    for name in ("0000001.seg", "x0000001.seg", "00000001.seg.bak", "0000000G.seg", "notes.txt", "ABCDEF01.seg"):
        (tmp_path / name).write_bytes(b"mine")
    assert segment_numbers(FileSystem(), str(tmp_path)) == []
    segments = opened(tmp_path)
    fill(segments)
    segments.close()
    assert (tmp_path / "notes.txt").read_bytes() == b"mine"
    assert segment_numbers(FileSystem(), str(tmp_path)) == [1, 2, 3]


def test_a_reader_opens_segments_that_were_made_since(tmp_path: Path) -> None:
    writer, reader = opened(tmp_path), opened(tmp_path, writable=False)
    writer.place(PAGE_BYTES)
    assert not reader.hold(1)
    assert reader.add_for_reading(1)
    assert reader.hold(1)
    assert not reader.add_for_reading(2)
    writer.close()
    reader.close()


def test_a_smaller_budget_gives_empty_segments_back(tmp_path: Path) -> None:
    segments = opened(tmp_path, max_segments=6)
    extents = fill(segments)
    assert len(segments.by_number) == 5
    for extent in extents:
        if extent.segment < 5:
            segments.died(extent)
    segments.max_segments = 3
    segments.place(ROOM)
    assert len(segments.by_number) == 3
    assert len(list(tmp_path.iterdir())) == 3
    segments.close()


@pytest.mark.parametrize("change", ["magic", "number", "store", "sum", "short"])
def test_a_foreign_first_page_is_noticed(change: str) -> None:
    page = bytearray(segment_header(5, SEGMENT, STORE))
    assert len(page) == PAGE_BYTES
    assert is_segment_of(bytes(page), 5, STORE)
    if change == "magic":
        page[0] ^= 1
    elif change == "sum":
        page[50] ^= 1
    number, store = (6 if change == "number" else 5), (bytes(16) if change == "store" else STORE)
    assert not is_segment_of(bytes(page[:30] if change == "short" else page), number, store)


def test_room_for_several_records_counts_the_ends_of_segments_that_are_too_short(segments: Segments) -> None:
    whole = SEGMENT - PAGE_BYTES
    assert segments.has_room([whole] * 3)  # of four segments one is the reserve
    assert not segments.has_room([whole] * 4)
    assert not segments.has_room([whole + PAGE_BYTES])
    commit(segments, segments.place(PAGE_BYTES))
    assert not segments.has_room([whole] * 3)
    assert segments.has_room([whole] * 2)
    assert segments.has_room([whole - PAGE_BYTES, *[whole] * 2])
    fill(segments, 1)
    assert segments.has_room([])
    assert not segments.has_room([PAGE_BYTES])
