"""Large records go into the spaces that dead ones left between those that live; nothing is moved for them."""

from __future__ import annotations

import errno
import itertools
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvcases import identity

from kvstore import KVLayout, StoreConfig, TierConfig
from kvstore.config import KIB, MIB, PAGE_BYTES
from kvstore.core.keys import chain_key
from kvstore.core.record import RecordHeader, check_payload, padded, seal
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk.budget import BESIDE_BYTES
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.rebuild import scan_segment
from kvstore.tiers.disk.reclaim import live_limit, spaces_between
from kvstore.tiers.disk.segment import Extent, taken
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.writes import GroupWrite, SealedRecord

SEGMENT, SEGMENTS = 2 * MIB, 12
LEAST, MOST = 130 * KIB, 300 * KIB
LAYOUT = KVLayout.uniform(num_layers=1, heads=150, head_dim=128)  # of whose blocks of 4 tokens MOST is the raw size


class FailingWrites(FileSystem):
    """Every pwritev fails while `failing`."""

    failing = False

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.failing:
            raise OSError(errno.EIO, "injected")
        return super().pwritev(fd, buffers, offset)


class Full:
    """A disk tier that gives up records in an order of chance, so that dead ones lie everywhere, and what it holds."""

    def __init__(self, path: Path, seed: int, fs: FileSystem | None = None, least: int = LEAST) -> None:
        self.least = least
        self.chance, self.sizes, self.next = random.Random(seed), dict[int, int](), 1
        self.metrics, self.pool, self.path = Metrics(), BufferPool(0), path
        budget = TierConfig(SEGMENTS * SEGMENT + BESIDE_BYTES, "raw")
        self.config = StoreConfig(disk=budget, segment_bytes=SEGMENT, block_tokens=4)
        self.fs = fs or FileSystem()
        self.tier = self._opened()

    def _opened(self) -> DiskTier:
        return DiskTier(
            self.fs, str(self.path), identity(LAYOUT), self.config, False, self.metrics, self.pool, self._evict,
            alive=lambda record: True,
        )  # fmt: skip

    def reopen(self) -> None:
        self.tier.close()
        self.tier = self._opened()
        self.tier.take_scan()

    def _evict(self) -> list[int]:
        gone = [self.chance.choice(sorted(self.sizes))] if self.sizes else []
        for record in gone:
            del self.sizes[record]
        return gone

    def draft(self, record: int, nbytes: int) -> SealedRecord:
        ids = np.arange(record, record + 4, dtype=np.uint32)
        header = RecordHeader(
            chain_key(b"r" * 32, ids), b"r" * 32, b"n" * 32, 0, record, start=0, tokens=ids,
            layer_sizes=(nbytes,), raw_bytes=nbytes,
        )  # fmt: skip
        buffer = self.pool.take(padded(header.record_bytes))
        buffer.view[header.payload_offset : header.record_bytes] = content(record, nbytes)
        seal(header, buffer.view)
        return SealedRecord(header, 0, buffer)

    def write(self, count: int = 3) -> set[int]:
        rows = {self.next + i: self.chance.randint(self.least, MOST) for i in range(count)}
        self.next += count
        written = self.tier.write([self.draft(record, nbytes) for record, nbytes in rows.items()]) or set()
        self.sizes |= {record: rows[record] for record in written}
        return written

    def write_in_a_row(self, groups: int, count: int = 3) -> None:
        """As `write`, so many groups, the bytes of each beside the commit of the one before."""
        begun: deque[tuple[dict[int, int], GroupWrite]] = deque()
        with self.tier.paused():
            for _ in range(groups):
                rows = {self.next + i: self.chance.randint(self.least, MOST) for i in range(count)}
                self.next += count
                drafts = [self.draft(record, nbytes) for record, nbytes in rows.items()]
                begun.append((rows, self.tier.begin(drafts, beside=bool(begun))))
                if len(begun) > 1:
                    self._finish(*begun.popleft())
            self._finish(*begun.popleft())

    def _finish(self, rows: dict[int, int], group: GroupWrite) -> None:
        written = self.tier.finish(group) or set()
        self.sizes |= {record: rows[record] for record in written}

    def read(self, entry: Entry) -> bytes:
        buffer = self.pool.take(entry.extent.nbytes)
        self.tier.read([entry], [buffer])
        return bytes(buffer.view)

    def check(self) -> None:
        """Every record that should be there is, bit for bit; the books agree, and the budget is held."""
        assert self.tier.survey().problems == ()
        assert self.tier.stats()["used_bytes"] <= self.config.disk.bytes
        for record, nbytes in self.sizes.items():
            (entry,) = self.tier.locate([record])
            assert entry is not None
            assert content(record, nbytes) in self.read(entry)
            self.tier.release([entry])

    def count(self, metric: Metric) -> float:
        return self.metrics[metric]


def content(record: int, nbytes: int) -> bytes:
    return np.random.default_rng(record).bytes(nbytes)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Full]:
    made = Full(tmp_path, seed=5, fs=FailingWrites())
    for _ in range(40):
        made.write()
    yield made
    made.tier.close()


def test_records_of_one_size_are_hardly_ever_moved_and_most_of_the_files_lives(tmp_path: Path) -> None:
    full = Full(tmp_path, seed=6, least=MOST)
    for turn in range(100):
        assert len(full.write()) == 3
        if turn % 10 == 0:
            full.check()
    assert full.count(Metric.DISK_EVICTED_RECORDS) > 100
    # Only where the catalog grows by what a segment takes one has to be emptied.
    assert full.count(Metric.DISK_MOVED_RECORDS) < full.count(Metric.DISK_WRITTEN_RECORDS) / 10
    # Less than what may live by what the last groups needed ahead.
    most = live_limit(full.tier.segments.max_segments, SEGMENT)
    assert full.tier.nbytes > most - 2 * 3 * (MOST + PAGE_BYTES) - MOST
    full.tier.close()


def test_records_of_many_sizes_are_seldom_moved_and_never_dropped(full: Full) -> None:
    for turn in range(60):
        assert len(full.write()) == 3
        if turn % 10 == 0:
            full.check()
    full.check()
    assert full.count(Metric.DISK_EVICTED_RECORDS) > 100
    assert full.count(Metric.DISK_MOVED_RECORDS) < full.count(Metric.DISK_WRITTEN_RECORDS) / 2


def test_a_store_that_was_closed_goes_on_where_it_was(full: Full) -> None:
    for _ in range(5):
        full.reopen()
        for _ in range(5):
            full.write()
        full.check()


def test_whatever_looks_like_a_record_is_whole(full: Full) -> None:
    """A rebuild believes headers: none may be left of a record that was overwritten in part, and none of those that
    live may be hidden behind one."""
    for _ in range(30):
        full.write()
    numbers = sorted(full.tier.segments.by_number)
    full.tier.close()
    found = set[int]()
    for number in numbers:
        path = full.path / "segments" / f"{number:08x}.seg"
        data = path.read_bytes()
        for header, extent in scan_segment(FileSystem(), str(path), number, SEGMENT):
            check_payload(header, memoryview(data)[extent.offset : extent.offset + extent.nbytes])
            found.add(header.record_id)
    assert found >= set(full.sizes)
    assert len(found) > len(full.sizes)  # some that died are there, too


def test_a_catalog_that_is_lost_is_made_again_with_all_that_lived(full: Full) -> None:
    full.write()
    full.tier.close()
    (full.path / "catalog" / "data.mdb").write_bytes(b"lost")
    full.reopen()
    lived = dict(full.sizes)
    for record, nbytes in lived.items():
        (entry,) = full.tier.locate([record])
        assert entry is not None
        assert content(record, nbytes) in full.read(entry)
        full.tier.release([entry])


def test_what_is_being_read_is_not_overwritten(full: Full) -> None:
    held = [entry for entry in full.tier.locate(sorted(full.sizes)[:4]) if entry is not None]
    before = [full.read(entry) for entry in held]
    for entry in held:
        del full.sizes[entry.record]
    assert full.tier.remove([entry.record for entry in held]) == 4
    for _ in range(40):
        full.write()
    assert [full.read(entry) for entry in held] == before
    full.tier.release(held)
    full.check()


def test_a_read_that_began_after_a_death_keeps_no_space(full: Full) -> None:
    segments = full.tier.segments
    entry = next(e for e in full.tier.locate(sorted(full.sizes)) if e is not None)
    segment = segments.by_number[entry.extent.segment]
    assert segment.is_left
    neighbour = next(e for e in full.tier.catalog.in_segment(segment.number) if e.record != entry.record)
    del full.sizes[neighbour.record]
    full.tier.remove([neighbour.record])
    assert not segment.is_left  # the read may be of the one that died
    again = full.tier.locate([entry.record])
    full.tier.release([entry])
    assert segment.reads
    assert segment.is_left
    full.tier.release([found for found in again if found is not None])


def test_a_segment_that_fails_to_take_a_write_is_left_alone_until_it_is_empty(full: Full) -> None:
    assert isinstance(full.fs, FailingWrites)
    full.fs.failing = True
    assert not full.write()
    full.fs.failing = False
    worn = [segment for segment in full.tier.segments.by_number.values() if segment.worn]
    assert worn
    assert not {segment.number for segment in worn} & set(full.tier.segments.refills)
    before = {segment.number: {e.record for e in full.tier.catalog.in_segment(segment.number)} for segment in worn}
    for _ in range(10):
        assert len(full.write()) == 3
    for segment in worn:
        if segment.worn:
            assert {e.record for e in full.tier.catalog.in_segment(segment.number)} <= before[segment.number]
    full.check()


def test_groups_in_a_row_are_whole_while_others_are_evicted(full: Full) -> None:
    for turn in range(12):
        before = full.next
        full.write_in_a_row(8)
        assert full.next - before == 24
        assert full.next - 1 in full.sizes  # the last of them was written
        if turn % 4 == 3:
            full.check()
    assert not full.count(Metric.DROPPED_NO_SPACE)
    full.reopen()
    full.check()


def test_of_groups_in_a_row_those_are_dropped_whose_write_fails(full: Full) -> None:
    assert isinstance(full.fs, FailingWrites)
    with full.tier.paused():
        first = {full.next: LEAST}
        one = full.tier.begin([full.draft(full.next, LEAST)])
        full.fs.failing = True
        other = full.tier.begin([full.draft(full.next + 1, LEAST)], beside=True)
        other.wait()
        full.fs.failing = False
        full._finish(first, one)
        assert full.next in full.sizes
        assert full.tier.finish(other) == set()
    full.next += 2
    assert (full.count(Metric.DISK_WRITE_ERRORS), full.count(Metric.DROPPED_WRITE_ERROR)) == (1, 1)
    full.check()
    assert len(full.write()) == 3
    full.check()


def test_spaces_are_those_that_no_record_takes() -> None:
    chance, pages = random.Random(1), SEGMENT // PAGE_BYTES
    for _ in range(50):
        free, entries, page = [True] * pages, list[Entry](), 1
        free[0] = False
        while page < pages:
            length = min(chance.randrange(1, 80), pages - page)
            if chance.random() < 0.6:
                extent = Extent(1, page * PAGE_BYTES, length * PAGE_BYTES)
                entries.append(Entry(page, 0, 0, 0, extent, 0, 1, codec=0, tokens=np.zeros(1, np.uint32)))
                free[page : page + length] = [False] * length
            page += length
        largest = chance.randrange(1, 60) * PAGE_BYTES
        spaces = spaces_between(entries, SEGMENT, largest)
        assert all(begin < end and all(free[begin // PAGE_BYTES : end // PAGE_BYTES]) for begin, end in spaces)
        runs = "".join("." if here else "#" for here in free).split("#")
        assert sorted(end - begin for begin, end in spaces) == sorted(
            nbytes for run in runs if (nbytes := len(run) * PAGE_BYTES) >= max(largest, 128 * KIB)
        )


def test_room_is_promised_only_if_records_find_it(full: Full) -> None:
    chance, segments = random.Random(2), full.tier.segments
    for _ in range(30):
        sizes = [padded(chance.randrange(PAGE_BYTES, MOST)) for _ in range(chance.randrange(1, 9))]
        while full.tier._refill(max(sizes)) and chance.random() < 0.7:
            pass
        if segments.has_room(sizes):
            extents = [segments.place(nbytes) for nbytes in sizes]
            for one, other in itertools.pairwise(extents):
                assert one.segment != other.segment or one.offset != other.offset
            for extent in extents:
                segments.settle(extent)
        full.write(1)
    full.check()


def test_a_space_is_taken_from_its_front() -> None:
    spaces = [(0, 8), (20, 30)]
    assert [taken(spaces, nbytes) for nbytes in (9, 8, 2, 1)] == [20, 0, None, 29]
    assert spaces == []
