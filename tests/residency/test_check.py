"""`KVStore.check` finds each kind of inconsistency that it is for: every one is planted here, and must be named."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import family_stores
import pytest
import small_stores
from sessioncases import saved, session
from threadruns import HANGS_S

from kvstore import KVStore
from kvstore.core.session_record import SessionChange
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.segment_file import segment_header
from kvstore.tiers.disk.tier import DiskTier

TEXT = family_stores.passage(1)
MEMBER = family_stores.behind(10, TEXT)


@pytest.fixture
def store() -> Iterator[KVStore]:
    """Two sequences, one of them pinned, a session, and everything on disk and in the host tier."""
    with (
        small_stores.scratch() as folder,
        KVStore(folder / "store", small_stores.IDENTITY, small_stores.config()) as opened,
    ):
        small_stores.put(opened, small_stores.tokens_of(1, 21), pin=True)
        small_stores.put(opened, small_stores.tokens_of(2, 21), ttl=3600.0)
        opened.session("a").save(small_stores.tokens_of(3, 8), small_stores.kv_of(small_stores.tokens_of(3, 8)))
        opened.flush()
        assert opened.check(deep=True).problems == ()
        yield opened


@pytest.fixture
def family() -> Iterator[KVStore]:
    """Four donors, and behind another beginning four members of theirs."""
    with (
        small_stores.scratch() as folder,
        KVStore(folder / "store", family_stores.IDENTITY, family_stores.config()) as opened,
    ):
        family_stores.put(opened, TEXT)
        family_stores.put(opened, MEMBER)
        opened.flush()
        assert family_stores.members(opened) == 4
        assert opened.check(deep=True).problems == ()
        yield opened


def problem(store: KVStore, deep: bool = False) -> str:
    found = store.check(deep=deep).problems
    assert found
    return "\n".join(found)


def test_a_sound_store_is_counted(store: KVStore, family: KVStore) -> None:
    report = store.check(deep=True)
    assert report.ok
    assert (report.records, report.disk_records, report.host_records, report.verified_records) == (14, 14, 14, 14)
    assert (report.pinned, report.sessions, report.members, report.queued_records) == (1, 1, 0, 0)
    assert store.check().verified_records == 0
    assert family.check().members == 4


def _index_lost(residency: Any) -> None:
    residency.index.remove(14)


def _disk_lost(residency: Any) -> None:
    residency.host.remove([14])
    residency.disk.remove([14])


def _unpinned(residency: Any) -> None:
    residency._pins._kept.pop(1)


def _pin_left_over(residency: Any) -> None:
    residency._pins._pinned.add(99)


def _nobody_waits(residency: Any) -> None:
    residency._expiry._heap.clear()


def _expires_and_gone(residency: Any) -> None:
    residency._expiry.set(99, 1e12)


def _unwritten_and_durable(residency: Any) -> None:
    residency._unwritten.add(14)


def _replaced_and_indexed(residency: Any) -> None:
    residency._replaced[99] = [14]


def _wrong_sum(residency: Any) -> None:
    residency.host._bytes += 1


def _over_budget(residency: Any) -> None:
    residency.host._budget = 5


def _held_and_unknown(residency: Any) -> None:
    item = residency.host.get(14)
    residency.host.add(99, item)


def _dead_bytes(residency: Any) -> None:
    residency.disk.segments.current.live += 4096


def _held_segment(residency: Any) -> None:
    segments = residency.disk.segments
    residency.kept_hold = segments.hold(segments.current.number)


def _write_under_way(residency: Any) -> None:
    residency.disk.segments.current.writes += 1


def _free_and_used(residency: Any) -> None:
    current = residency.disk.segments.current
    residency.disk.segments.free[current.number] = current


def _free_and_unknown(residency: Any) -> None:
    residency.disk.segments.free[50] = Segment(50)


def _unknown_file(residency: Any) -> None:
    segments = residency.disk.segments
    content = segment_header(255, small_stores.SEGMENT, segments.store_id).ljust(small_stores.SEGMENT, b"\0")
    (Path(segments.directory) / "000000ff.seg").write_bytes(content)


def _counted_wrong(residency: Any) -> None:
    residency.disk._records += 1


def _one_place_twice(residency: Any) -> None:
    entries = residency.disk.catalog.get([13, 14])
    residency.disk.catalog.commit([replace(entries[1], extent=entries[0].extent)])


def _broken_session(residency: Any) -> None:
    residency.disk.catalog.commit(sessions=[SessionChange(b"k" * 20, session("another"), 1)])


def _referred_too_often(residency: Any) -> None:
    catalog, change = residency.disk.catalog, saved("long", 300)
    catalog.commit(sessions=[change])
    with catalog.environment.writing() as txn:
        catalog._saved._refer(txn, change.record.texts())


PLANTED: list[tuple[Callable[[Any], None], str]] = [
    (_index_lost, "record 14 is in the catalog, not in the index, and nothing is to remove it"),
    (_disk_lost, "record 14 is in the index, and nowhere else"),
    (_unpinned, "kept without a pin, or pinned and not kept"),
    (_pin_left_over, "pinned record 99 is not in the index"),
    (_nobody_waits, "has an end of life that is not in the queue of ends"),
    (_expires_and_gone, "record 99 (gone) is marked with an end of life"),
    (_unwritten_and_durable, "record 14 (durable) is marked as unwritten"),
    (_replaced_and_indexed, "record 14 (replaced) is in the index"),
    (_wrong_sum, "the host tier counts"),
    (_over_budget, "more than its budget of 5"),
    (_held_and_unknown, "record 99 (unwritten) is not in the index"),
    (_dead_bytes, "live bytes, the catalog"),
    (_held_segment, "1 reads hold it, and no call is under way"),
    (_write_under_way, "1 writes are under way"),
    (_free_and_used, "is in use and free"),
    (_free_and_unknown, "segment 50: is free, but the store does not know it"),
    (_unknown_file, "segment 255: the store does not know its file"),
    (_counted_wrong, "the disk tier counts (records, tokens)"),
    (_one_place_twice, "lie in the same place"),
    (_broken_session, "its entry is damaged"),
    (_referred_too_often, "2 references are noted, 1 are there"),
]


@pytest.mark.parametrize(("plant", "words"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_each_planted_inconsistency_is_found(store: KVStore, plant: Any, words: str) -> None:
    residency: Any = store._residency
    plant(residency)
    assert words in problem(store)


FAMILY: list[tuple[Callable[[Any], None], str]] = [
    (lambda r: r._families.remove(9), "the catalog names other donors than the families do"),
    (lambda r: r._families.add(4, [6]), "is coded against a member"),
    (lambda r: r._families._members.clear(), "the list of its members differs from the members that name it"),
    (lambda r: r._families.add(99, [1]), "record 99 (gone) is a member of a family"),
    (lambda r: r.disk.remove(r._forget_without_members(1)), "is on disk without its donors [1]"),
    (
        lambda r: r.content.insert(b"n" * 32, 99, 0, TEXT[: family_stores.BLOCK]),
        "in the content index are not in the index",
    ),
    (
        lambda r: r.content.insert(b"n" * 32, 9, 0, TEXT[: family_stores.BLOCK]),
        "record 9 is in the content index and may not",
    ),
    (lambda r: r.set_expiry(1, 1e12), "record 1 is in the content index and may not be a donor"),
]


@pytest.mark.parametrize(("plant", "words"), FAMILY, ids=[words[-24:] for _, words in FAMILY])
def test_each_planted_family_trouble_is_found(family: KVStore, plant: Any, words: str) -> None:
    residency: Any = family._residency
    residency._forget_without_members = lambda record: [record] if residency.index.remove(record) else []
    plant(residency)
    assert words in problem(family)


def _flip(store: KVStore, record: int, where: int) -> None:
    disk = store._residency.disk
    assert disk is not None
    entry = disk.entry(record)
    assert entry is not None
    file = Path(disk.segments.directory) / f"{entry.extent.segment:08x}.seg"
    content = bytearray(file.read_bytes())
    content[entry.extent.offset + where] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("where", "words"), [(0, "do not begin a record"), (40, "the header's checksum"), (330, "the payload's checksum")]
)
def test_damage_is_found_in_depth_and_not_repaired(store: KVStore, where: int, words: str) -> None:
    _flip(store, 8, where)
    assert store.check().ok
    for _ in range(2):
        assert words in problem(store, deep=True)
    assert "quarantined_records" not in store.stats()["counters"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": 4}, "are not those of its catalog entry"),
        ({"tag": 5}, "are not those of its catalog entry"),
        ({"tokens": small_stores.tokens_of(77, 4)}, "its tokens are not those of its catalog entry"),
        ({"parent_tag": 5}, "its parent's key is not the one of its catalog entry"),
        ({"namespace": 9}, "its namespace is not the one of its catalog entry"),
    ],
)
def test_a_catalog_that_says_something_else_than_the_record_is_found(
    store: KVStore, change: dict[str, Any], words: str
) -> None:
    disk = store._residency.disk
    assert disk is not None
    entry = disk.entry(9)
    assert entry is not None
    disk.catalog.commit([replace(entry, **change)])
    assert f"record 9: {words}" in problem(store, deep=True).replace("key, position, codec, size or donors ", "")


def test_a_donor_that_became_another_block_is_found(family: KVStore) -> None:
    disk = family._residency.disk
    assert disk is not None
    entry = disk.entry(9)
    assert entry is not None
    (donor,) = entry.donors
    disk.catalog.commit([replace(entry, donors=(donor % 4 + 1,))])
    assert f"record 9: donor {donor % 4 + 1} is another block" in problem(family, deep=True)


def test_no_false_alarm_while_others_put_get_and_delete() -> None:
    stop, failures = threading.Event(), []

    def work(store: KVStore, number: int) -> None:
        try:
            round_ = 0
            while not stop.is_set():
                tokens = small_stores.tokens_of(number * 1000 + round_ % 40, 30)
                small_stores.put(store, tokens)
                small_stores.stored(store, tokens)
                store.prefetch(tokens)
                if round_ % 3 == 0:
                    store.delete(tokens)
                round_ += 1
        except BaseException as error:
            failures.append(error)

    with small_stores.scratch() as folder:
        config = small_stores.config(host=40_000, disk=6 * small_stores.SEGMENT)
        with KVStore(folder / "store", small_stores.IDENTITY, config) as store:
            threads = [threading.Thread(target=work, args=(store, number)) for number in (1, 2)]
            for thread in threads:
                thread.start()
            try:
                reports = [store.check(deep=i % 5 == 4) for i in range(25)]
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            assert [report.problems for report in reports if not report.ok] == []
            assert not failures
            store.flush()
            assert store.check(deep=True).ok


@pytest.mark.parametrize("how", ["delete", "delete_namespace", "quarantine"])
def test_what_another_call_is_about_to_remove_is_no_problem(
    store: KVStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """However long it takes until it is this call's turn to write the catalog."""
    residency, begun, go_on = store._residency, threading.Event(), threading.Event()
    disk, tokens = residency.disk, small_stores.tokens_of(2, 21)
    assert disk is not None
    remove, record = disk.remove, small_stores.catalog_entries(store)[-1].record

    def remove_later(records: list[int]) -> int:
        begun.set()
        assert go_on.wait(HANGS_S)
        return remove(records)

    monkeypatch.setattr(disk, "remove", remove_later)
    calls: dict[str, Callable[[], Any]] = {
        "delete": lambda: store.delete(tokens),
        "delete_namespace": lambda: store.delete_namespace(b""),
        "quarantine": lambda: residency.quarantine(record),
    }
    other = threading.Thread(target=calls[how])
    other.start()
    assert begun.wait(HANGS_S)
    try:
        assert store.check().problems == ()
    finally:
        go_on.set()
        other.join()
    small_stores.all_is_well(store)
    assert residency.census().leaving == frozenset()


_WRITER = """
import sys
import small_stores
with small_stores.KVStore(sys.argv[1], small_stores.IDENTITY, small_stores.config(host=0)) as store:
    store.delete(small_stores.tokens_of(1, 21), erase=True)
    if sys.argv[2] == "moved":
        store.compact()
"""


@pytest.mark.parametrize("harm", ["erased", "moved"])
def test_what_leaves_or_moves_while_a_reader_checks_it_is_no_damage(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    really, done = DiskTier.read, list[int]()
    with small_stores.scratch() as folder:
        path, sequences = folder / "store", [small_stores.tokens_of(number, 21) for number in range(1, 5)]
        with KVStore(path, small_stores.IDENTITY, small_stores.config()) as store:
            for tokens in sequences:
                small_stores.put(store, tokens)

        def read(disk: DiskTier, *arguments: Any) -> None:
            if not done:  # by now it was asked where all of them lie
                command = [sys.executable, "-c", _WRITER, str(path), harm]
                done.append(subprocess.run(command, cwd=Path(small_stores.__file__).parent, check=True).returncode)
            really(disk, *arguments)

        with KVStore(path, small_stores.IDENTITY, small_stores.config(), read_only=True) as reader:
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(DiskTier, "read", read)
                found = reader.check(deep=True)
            assert (done, found.problems, found.verified_records) == ([0], (), 3 * 6)
            assert all(small_stores.stored(reader, tokens) == len(tokens) for tokens in sequences[1:])
