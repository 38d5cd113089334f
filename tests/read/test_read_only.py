"""Readers beside a writer in another process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from child_writer import PUTS, Writer
from kvcases import BLOCK, kv_of, open_store, quick_directory, same_kv, tokens
from threadruns import HANGS_S

from kvstore import TierConfig
from kvstore.errors import ConfigError, ReadOnlyStore, StoreNotFound
from kvstore.residency.residency import Residency


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    one = Writer(PUTS, tmp_path, "{}")
    yield one
    one.end()


def stored(store, ids) -> int:
    hit = store.get(ids)
    assert hit is None or same_kv(hit.layers, kv_of(ids[: hit.tokens]))
    return 0 if hit is None else hit.tokens


def test_a_reader_follows_a_writer(tmp_path: Path, writer: Writer) -> None:
    writer.do("put(20); store.flush()")
    with open_store(tmp_path, read_only=True) as reader:
        assert stored(reader, tokens(20)) == 20
        assert stored(reader, tokens(20, seed=1)) == 0
        writer.do("put(20, 1); store.flush()")
        assert stored(reader, tokens(20, seed=1)) == 20
        assert reader.contains(tokens(20, seed=1)) == 20


def test_a_reader_that_looks_while_the_writer_commits_misses_nothing_afterwards(tmp_path: Path, writer: Writer) -> None:
    """It looks all the time, so also while a commit is on its way to the disk, after which nothing else is written."""
    ids, flushed = [tokens(20, seed=number) for number in range(20)], threading.Event()
    with open_store(tmp_path, read_only=True) as reader:

        def write(number: int) -> None:
            writer.do(f"put(20, {number}); store.flush()")
            flushed.set()

        for number, wanted in enumerate(ids):
            flushed.clear()
            writing = threading.Thread(target=write, args=(number,))
            writing.start()
            while not flushed.is_set():
                reader.contains(wanted)
            writing.join(HANGS_S)
            assert stored(reader, wanted) == 20


def test_a_get_finds_what_was_committed_before_it_while_another_thread_takes_it_in(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive, half, goes_on = Residency.arrive, threading.Event(), threading.Event()

    def arriving(*arguments: Any, **options: Any) -> Any:
        if half.is_set():
            goes_on.wait(HANGS_S)
        half.set()
        return arrive(*arguments, **options)

    with open_store(tmp_path, read_only=True) as reader:
        writer.do("put(20); put(20, 1); store.flush()")
        monkeypatch.setattr(Residency, "arrive", arriving)
        first = threading.Thread(target=reader.contains, args=(tokens(20),))
        first.start()
        assert half.wait(HANGS_S)  # one of the two sequences is known, and the other is not
        threading.Timer(0.1, goes_on.set).start()
        assert [stored(reader, tokens(20, seed=seed)) for seed in (0, 1)] == [20, 20]
        first.join(HANGS_S)


def test_what_could_not_be_taken_in_is_taken_in_by_the_next_get(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise MemoryError

    with open_store(tmp_path, read_only=True) as reader:
        writer.do("put(20); store.flush()")
        with monkeypatch.context() as patch:
            patch.setattr(Residency, "arrive", fail)
            with pytest.raises(MemoryError):
                reader.get(tokens(20))
        assert stored(reader, tokens(20)) == 20


def test_the_blocks_of_a_sequence_arrive_at_once(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive, seen = Residency.arrive, list[list[int]]()

    def arriving(self: Any, of: Any, blocks: Any, *arguments: Any, **options: Any) -> Any:
        seen.append([block.end for block in blocks])
        return arrive(self, of, blocks, *arguments, **options)

    monkeypatch.setattr(Residency, "arrive", arriving)
    with open_store(tmp_path, read_only=True) as reader:
        writer.do("put(20)")
        writer.do("ids = tokens(40); ids[9:] += 1; store.put(ids, kv_of(ids)); store.flush()")
        assert reader.contains(tokens(20)) == 20
        fork = tokens(40)
        fork[9:] += 1
        assert stored(reader, fork) == 40
    whole, branch = sorted(seen)
    assert whole == [*range(BLOCK, 20, BLOCK), 20]
    assert branch == [*range(9 // BLOCK * BLOCK + BLOCK, 40, BLOCK), 40]


def test_a_reader_sees_growth_and_forks(tmp_path: Path, writer: Writer) -> None:
    ids = tokens(40)
    with open_store(tmp_path, read_only=True) as reader:
        for count in (12, 13, 20, 40):
            writer.do(f"put(40) if {count} == 40 else store.put(tokens(40)[:{count}], kv_of(tokens(40)[:{count}]))")
            writer.do("store.flush()")
            assert stored(reader, ids) == count
        writer.do("ids = tokens(40); ids[17:] += 1; store.put(ids, kv_of(ids)); store.flush()")
        other = ids.copy()
        other[17:] += 1
        assert stored(reader, other) == 40
        assert stored(reader, ids) == 40


def test_a_reader_sees_new_namespaces(tmp_path: Path, writer: Writer) -> None:
    with open_store(tmp_path, read_only=True) as reader:
        writer.do("put(20, namespace=b'new'); store.flush()")
        assert stored(reader, tokens(20)) == 0
        assert reader.get(tokens(20), namespace=b"new").tokens == 20


def test_a_reader_misses_what_was_deleted(tmp_path: Path, writer: Writer) -> None:
    writer.do("put(20); put(20, 1); store.flush()")
    with open_store(tmp_path, read_only=True, host=TierConfig(0)) as reader:
        assert stored(reader, tokens(20)) == 20
        writer.do("store.delete(tokens(20))")
        assert stored(reader, tokens(20)) == 0
        assert stored(reader, tokens(20, seed=1)) == 20


def test_a_reader_never_gives_wrong_bytes_while_space_is_reused() -> None:
    with quick_directory() as path:
        writer = Writer(PUTS, path, "{'disk': TierConfig(8 * 65536, 'raw')}")
        try:
            writer.do("put(20); store.flush()")
            with open_store(path, read_only=True, host=TierConfig(0), disk=TierConfig(8 * 65536, "raw")) as reader:
                for last in range(15, 150, 15):
                    seeds = range(last - 15, last)
                    writer.do(f"[(put(20, seed), store.flush()) for seed in {seeds}]")
                    lengths = [stored(reader, tokens(20, seed)) for seed in range(last)]
                    assert lengths[-10:] == [20] * 10
                assert lengths[0] == 0
        finally:
            writer.end()


def test_a_reader_sees_sessions_and_cannot_change_them(tmp_path: Path, writer: Writer) -> None:
    with open_store(tmp_path, read_only=True) as reader:
        writer.do("store.session('chat').save(tokens(20), kv_of(tokens(20))); store.flush()")
        assert [info.id for info in reader.sessions()] == ["chat"]
        assert same_kv(reader.session("chat").resume().layers, kv_of(tokens(20)))
        with pytest.raises(ReadOnlyStore):
            reader.session("chat").delete()
        with pytest.raises(ReadOnlyStore):
            reader.session("chat").fork("other")
        with pytest.raises(ReadOnlyStore):
            reader.session("chat").save(tokens(3), kv_of(tokens(3)))
        writer.do("store.session('chat').delete(); store.flush()")
        assert reader.sessions() == []


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.put(tokens(3), kv_of(tokens(3))),
        lambda store: store.delete(tokens(3)),
        lambda store: store.flush(),
    ],
    ids=["put", "delete", "flush"],
)
def test_a_reader_refuses_to_write(tmp_path: Path, call) -> None:
    with open_store(tmp_path) as store:
        store.put(tokens(20), kv_of(tokens(20)))
    with open_store(tmp_path, read_only=True) as reader:
        with pytest.raises(ReadOnlyStore, match="read_only=True; open it for writing in one process"):
            call(reader)
        assert stored(reader, tokens(20)) == 20


def test_a_reader_without_any_writer_reads(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put(tokens(20), kv_of(tokens(20)))
        store.session("chat").save(tokens(20), kv_of(tokens(20)))
    with open_store(tmp_path, read_only=True) as reader:
        assert stored(reader, tokens(20)) == 20
        assert reader.prefetch(tokens(20)).result() == 20
        assert reader.session("chat").resume().tokens == 20
        assert reader.stats()["disk"]["records"] == 3


def test_a_reader_changes_no_file_but_lmdbs_lock(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put(tokens(20), kv_of(tokens(20)))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock.mdb"}
    with open_store(tmp_path, read_only=True) as reader:
        assert stored(reader, tokens(20)) == 20
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock.mdb"}
    assert after == before


def test_a_damaged_record_is_a_miss_for_a_reader_and_stays_for_the_writer(tmp_path: Path) -> None:
    with open_store(tmp_path, disk=TierConfig(8 * 65536, "raw")) as store:
        store.put(tokens(20), kv_of(tokens(20)))
    path = tmp_path / "segments" / "00000001.seg"
    data = bytearray(path.read_bytes())
    data[4096 + 4096 + 1000] ^= 1  # in the second block's payload
    path.write_bytes(data)
    with open_store(tmp_path, read_only=True, disk=TierConfig(8 * 65536, "raw")) as reader:
        assert stored(reader, tokens(20)) == 8
        assert reader.stats()["counters"]["damaged_payload_sum"] == 1
        assert reader.stats()["disk"]["records"] == 3


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        open_store(tmp_path, read_only=True)
    with pytest.raises(StoreNotFound):
        open_store(tmp_path / "missing", read_only=True)
    assert not (tmp_path / "missing").exists()


def test_a_reader_needs_a_disk_tier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="read_only: a store without a disk tier has nothing to read"):
        open_store(tmp_path, read_only=True, disk=TierConfig(0))


def test_two_readers_and_a_writer_at_once(tmp_path: Path, writer: Writer) -> None:
    writer.do("put(20); store.flush()")
    code = """
import sys
from kvcases import *
with open_store(sys.argv[1], read_only=True) as store:
    print(store.get(tokens(20)).tokens)
"""
    with open_store(tmp_path, read_only=True) as reader:
        assert stored(reader, tokens(20)) == 20
        second = forked.run(code, tmp_path)
        assert second.returncode == 0, second.stderr
        assert second.stdout.strip() == "20"
        writer.do("put(20, 1); store.flush()")
        assert stored(reader, tokens(20, seed=1)) == 20
