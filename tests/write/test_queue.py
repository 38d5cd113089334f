"""Write-behind: a bounded queue, whole puts, and back-pressure that can be seen."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcases import SMALL, GatedFS, kv_of, open_store, same_kv, tokens
from queuecases import Sink, batch, numbers
from threadruns import HANGS_S

from kvstore import KVStore
from kvstore.config import PAGE_BYTES
from kvstore.core.results import FlushResult
from kvstore.errors import BlocksLost
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk.writes import SealedRecord
from kvstore.write import queue
from kvstore.write.queue import WriteBatch, WriteQueue

RAW = SMALL.bytes_per_token


# ---- the queue itself --------------------------------------------------------------------------------------------


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def make(sink: Sink) -> Iterator[Callable[..., WriteQueue]]:
    made: list[WriteQueue] = []

    def make_one(queue_bytes: int = 100, group_bytes: int = 30, tick_s: float = 60.0) -> WriteQueue:
        made.append(WriteQueue(queue_bytes, group_bytes, sink.encode, sink, sink.ticks.set, Metrics(), tick_s))
        return made[-1]

    yield make_one
    sink.gate.set()
    for writer in made:
        writer.close()


def test_the_thread_that_encodes_is_not_woken_for_nothing(
    make: Callable[..., WriteQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, woken = make(), []
    monkeypatch.setattr(writer._submitted, "ring", lambda: woken.append(len(writer._open)))
    writer.begin()
    assert writer.wait_for_space(10, 1.0) is not None
    assert woken == []
    writer.submit(batch(1))
    writer.begin()
    assert woken == [1]


def stall(writer: WriteQueue, sink: Sink) -> None:
    """Leaves the writing thread waiting on batch 1 and the encoding thread on batch 2: what follows queues up."""
    sink.gate.clear()
    sink.entered.clear()
    writer.submit(batch(1))
    assert sink.entered.wait(HANGS_S)
    writer.submit(batch(2))
    assert sink.second.wait(HANGS_S)


def test_jobs_are_persisted_in_order(make: Callable[..., WriteQueue], sink: Sink) -> None:
    writer = make()
    for record in range(1, 20):
        writer.submit(batch(record))
    writer.flush()
    assert [record for group in numbers(sink) for record in group] == list(range(1, 20))


def test_what_queues_up_is_written_in_groups_of_whole_jobs(make: Callable[..., WriteQueue], sink: Sink) -> None:
    page = PAGE_BYTES
    writer = make(queue_bytes=100 * page, group_bytes=3 * page)
    stall(writer, sink)
    for record, nbytes in ((3, page), (4, page), (5, 10), (6, 2 * page + 1), (7, page), (8, 50 * page), (9, 1)):
        writer.submit(batch(record, nbytes))
    sink.gate.set()
    writer.flush()
    assert numbers(sink) == [[1], [2], [3, 4, 5], [6], [7], [8], [9]]


def test_small_blocks_count_with_the_page_that_each_takes(make: Callable[..., WriteQueue], sink: Sink) -> None:
    """A group is all held until its commit: it must not take much more of the disk than it was meant to."""
    writer = make(group_bytes=2 * PAGE_BYTES)
    stall(writer, sink)
    for record in range(3, 8):
        writer.submit(batch(record, 1))
    sink.gate.set()
    writer.flush()
    assert numbers(sink) == [[1], [2], [3, 4], [5, 6], [7]]


@pytest.mark.parametrize("few", [0, 3, 1_024])
def test_the_bytes_of_a_queue_of_any_length_come_to_what_waits(
    make: Callable[..., WriteQueue], sink: Sink, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(queue, "_FEW", few)
    writer = make(queue_bytes=1000, group_bytes=2 * PAGE_BYTES)
    stall(writer, sink)
    for record in range(3, 9):
        writer.submit(batch(record, record))
    assert writer._bytes == sum(x.nbytes for x in writer._open) == 20 + sum(range(3, 9))
    sink.gate.set()
    writer.flush()
    assert (writer._bytes, len(writer._open)) == (0, 0)


def test_flush_counts_since_the_last_flush(make: Callable[..., WriteQueue]) -> None:
    writer = make()
    writer.submit(batch(1))
    writer.submit(batch(2))
    assert writer.flush() == FlushResult(2, 0)
    assert writer.flush() == FlushResult(0, 0)
    writer.submit(batch(3))
    assert writer.flush() == FlushResult(1, 0)


def test_who_tidies_finds_nothing_that_refers_to_a_group_that_was_written() -> None:
    left: list[int] = []
    tidied = threading.Event()

    def tidy() -> None:
        left.append(sum(written() is not None for written in gone))
        tidied.set()

    class Notes(Sink):
        def finish(self, group: Sequence[WriteBatch], begun: Any) -> FlushResult:
            gone.extend(weakref.ref(batch) for batch in group)
            return FlushResult(len(group), 0)

    gone: list[weakref.ref[WriteBatch]] = []
    writer = WriteQueue(100, 30, lambda blocks: [], Notes(), lambda: None, Metrics(), tidy=tidy)
    writer.submit(batch(1))
    writer.begin()
    assert tidied.wait(HANGS_S)
    writer.close()
    assert (len(gone), left) == (1, [0])


def test_flush_of_nothing_returns(make: Callable[..., WriteQueue]) -> None:
    assert make().flush() == FlushResult(0, 0)


def test_pending_bytes_are_those_not_yet_persisted(make: Callable[..., WriteQueue], sink: Sink) -> None:
    writer = make()
    stall(writer, sink)
    writer.submit(batch(3, 25))
    assert writer.pending_bytes == 45
    sink.gate.set()
    writer.flush()
    assert writer.pending_bytes == 0


def test_there_is_room_up_to_the_last_byte(make: Callable[..., WriteQueue], sink: Sink) -> None:
    writer = make(queue_bytes=100)
    stall(writer, sink)
    assert writer.wait_for_space(80, 0) is not None
    assert writer.wait_for_space(81, 0) is None


def test_more_than_the_whole_queue_fits_when_it_is_empty(make: Callable[..., WriteQueue], sink: Sink) -> None:
    writer = make(queue_bytes=100)
    assert writer.wait_for_space(1000, 0) is not None
    stall(writer, sink)
    assert writer.wait_for_space(1000, 0) is None


def test_whoever_waits_for_room_goes_on_when_there_is(make: Callable[..., WriteQueue], sink: Sink) -> None:
    writer = make(queue_bytes=100)
    stall(writer, sink)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(writer.wait_for_space, 95, 60)
        sink.gate.set()
        assert waiting.result() is not None


def test_closing_writes_what_is_queued(make: Callable[..., WriteQueue], sink: Sink) -> None:
    writer = make()
    stall(writer, sink)
    for record in (3, 4, 5):
        writer.submit(batch(record))
    sink.gate.set()
    writer.close()
    assert [record for group in numbers(sink) for record in group] == [1, 2, 3, 4, 5]


def test_the_tick_comes_without_any_job(make: Callable[..., WriteQueue], sink: Sink) -> None:
    make(tick_s=0.001)
    assert sink.ticks.wait(HANGS_S)


def test_blocks_that_cannot_be_encoded_are_dropped_and_what_follows_is_written(sink: Sink) -> None:
    metrics, encode = Metrics(), sink.encode

    def fails_at_first(blocks: Sequence[Any]) -> list[SealedRecord]:
        if blocks[0].record == 1:
            raise MemoryError
        return encode(blocks)

    writer = WriteQueue(100, 5, fails_at_first, sink, sink.ticks.set, metrics)
    writer.submit(batch(1))
    writer.submit(batch(2))
    writer.wait()
    assert (numbers(sink), sink.encoded) == ([[1], [2]], [2])
    assert metrics[Metric.DROPPED_ENCODING] == 1
    writer.close()


@pytest.mark.parametrize("step", ["exclusive", "begin", "finish"])
def test_a_thread_that_dies_makes_flush_say_so(sink: Sink, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def dies(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(sink, step, dies)
    writer = WriteQueue(100, 30, sink.encode, sink, sink.ticks.set, Metrics())
    writer.submit(batch(1))
    with pytest.raises(BlocksLost, match="1 blocks were not written") as error:
        writer.flush()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert writer.wait_for_space(1 << 40, 60) is not None  # nobody waits for it any more
    writer.close()


def test_a_batch_is_written_once_however_often_it_is_submitted(make: Callable[..., WriteQueue], sink: Sink) -> None:
    writer, one = make(), batch(3)
    stall(writer, sink)
    for _ in range(3):
        writer.submit(one)
    assert writer.pending_bytes == 30
    sink.gate.set()
    writer.flush()
    assert numbers(sink) == [[1], [2], [3]]


# ---- in the store ------------------------------------------------------------------------------------------------


def put(store: KVStore, ids: np.ndarray) -> Any:
    return store.put(ids, kv_of(ids))


def stalled(store: KVStore, fs: GatedFS) -> None:
    put(store, tokens(8, seed=901))
    store.flush()
    fs.shut()
    put(store, tokens(8, seed=902))
    assert fs.waiting.wait(HANGS_S)


def test_puts_return_while_the_disk_stands_still_and_can_be_got(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs) as store:
        stalled(store, fs)
        for seed in range(10):
            put(store, tokens(20, seed))
        for seed in range(10):
            assert same_kv(store.get(tokens(20, seed)).layers, kv_of(tokens(20, seed)))
        stats = store.stats()
        assert stats["queue"]["bytes"] == (8 + 10 * 20) * RAW
        assert stats["queue"]["records"] == 31
        fs.gate.set()
        assert store.flush().durable_blocks == 31
        assert store.stats()["queue"] == {"bytes": 0, "records": 0}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a put finds no room."""
    found_full, has_room = threading.Event(), WriteQueue._has_space

    def seen_has_room(self: WriteQueue, nbytes: int) -> bool:
        found = has_room(self, nbytes)
        if not found:
            found_full.set()
        return found

    monkeypatch.setattr(WriteQueue, "_has_space", seen_has_room)
    return found_full


def test_a_session_is_resumed_while_a_put_waits_for_room(tmp_path: Path, full: threading.Event) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs, write_queue_bytes=30 * RAW, put_timeout_s=HANGS_S) as store:
        store.session("chat").save(tokens(8, seed=7), kv_of(tokens(8, seed=7)))
        store.flush()
        stalled(store, fs)
        put(store, tokens(16))
        with ThreadPoolExecutor(2) as executor:
            waiting = executor.submit(put, store, tokens(16, seed=1))
            try:
                assert full.wait(HANGS_S)
                hit = executor.submit(store.session("chat").resume).result(HANGS_S / 2)
                assert same_kv(hit.layers, kv_of(tokens(8, seed=7)))
                assert not waiting.done()
            finally:
                fs.gate.set()
        store.flush()
        assert [row.hits for row in store.sessions()] == [1]


def test_a_put_waits_for_room_and_says_how_long(tmp_path: Path, full: threading.Event) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs, write_queue_bytes=30 * RAW) as store:
        stalled(store, fs)
        assert put(store, tokens(16)).dropped_blocks == 0
        with ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(put, store, tokens(16, seed=1))
            assert full.wait(HANGS_S)
            assert store.stats()["queue"]["bytes"] <= 30 * RAW
            fs.gate.set()
            result = waiting.result()
        assert (result.new_blocks, result.dropped_blocks) == (2, 0)
        assert result.waited_s > 0
        assert store.stats()["counters"]["put_wait_s"] >= result.waited_s


def test_a_put_that_finds_no_room_in_time_is_dropped_and_counted(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs, write_queue_bytes=30 * RAW, put_timeout_s=0.0) as store:
        stalled(store, fs)
        put(store, tokens(16))
        result = put(store, tokens(20, seed=1))
        assert (result.tokens, result.new_tokens, result.new_blocks, result.dropped_blocks) == (20, 0, 0, 3)
        assert store.stats()["counters"]["dropped_queue_full"] == 3
        assert store.get(tokens(20, seed=1)) is None
        assert store.get(tokens(16)).tokens == 16
        fs.gate.set()
        store.flush()
        assert put(store, tokens(20, seed=1)).new_blocks == 3
        assert store.get(tokens(20, seed=1)).tokens == 20


def test_a_put_of_what_is_stored_needs_no_room(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs, write_queue_bytes=30 * RAW, put_timeout_s=0.0) as store:
        stalled(store, fs)
        put(store, tokens(16))
        assert put(store, tokens(16)).dropped_blocks == 0
        assert "dropped_queue_full" not in store.stats()["counters"]
        fs.gate.set()


def test_the_session_of_a_dropped_put_keeps_its_tokens(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs, write_queue_bytes=10 * RAW, put_timeout_s=0.0) as store:
        stalled(store, fs)
        assert store.session("chat").save(tokens(20), kv_of(tokens(20))).dropped_blocks == 3
        assert store.session("chat").resume() is None
        assert store.session("chat").tokens.tolist() == tokens(20).tolist()
        fs.gate.set()


def test_a_superseded_tail_that_still_waits_is_not_written(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs) as store:
        stalled(store, fs)
        put(store, tokens(20)[:12])
        put(store, tokens(20))
        fs.gate.set()
        store.flush()
        assert store.stats()["disk"]["records"] == 2 + 3
        assert store.get(tokens(20)).tokens == 20


def test_threads_may_put_and_get_at_once(tmp_path: Path) -> None:
    prompt = tokens(16)
    with open_store(tmp_path, threads=2) as store:

        def work(number: int) -> bool:
            right = True
            for turn in range(5):
                ids = np.concatenate([prompt, tokens(5 * turn + 3, seed=number)])
                put(store, ids)
                hit = store.get(ids)
                right &= hit is not None and hit.tokens == len(ids) and same_kv(hit.layers, kv_of(ids))
            return right

        with ThreadPoolExecutor(4) as executor:
            assert all(executor.map(work, range(1, 9)))
        store.flush()
        assert store.stats()["index"]["records"] == store.stats()["disk"]["records"]
