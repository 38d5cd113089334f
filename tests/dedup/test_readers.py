"""A reader beside a writer in another process whose blocks become members, stand alone again, and leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import family_stores
import pytest
import small_stores
from child_writer import Writer
from family_stores import IDENTITY, behind, config, counter, members, passage, stored

from kvstore import KVStore

TEXT, OTHER = passage(1), passage(2)
MEMBER = behind(10, TEXT)
PUTS = """
import sys
from family_stores import *
def opened():
    return KVStore(sys.argv[1], IDENTITY, config(disk=int(sys.argv[2])))
def puts(*sequences):
    for tokens in sequences:
        put(store, tokens)
    store.flush()
TEXT, OTHER = passage(1), passage(2)
MEMBER = behind(10, TEXT)
store = opened()
"""


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    one = Writer(PUTS, path, 8 << 20)
    yield one
    one.end()


def reader(path: Path, host: int = 0, disk: int = 8 << 20) -> KVStore:
    return KVStore(path, IDENTITY, config(host=host, disk=disk), read_only=True)


def test_a_reader_follows_a_family_through_its_life(path: Path, writer: Writer) -> None:
    """All with one writer process, which takes seconds to start."""
    writer.do("puts(TEXT, OTHER)")
    with reader(path) as store:
        assert stored(store, TEXT) == len(TEXT)
        writer.do("puts(MEMBER, behind(11, OTHER, 9))")
        assert stored(store, MEMBER) == len(MEMBER)
        assert members(store) >= 7
        for limit in (1, 40, 100, 159):
            assert stored(store, MEMBER, max_tokens=limit) == limit

        # The donor is deleted: its members stand alone, under other numbers.
        writer.do("store.delete(TEXT)")
        assert stored(store, MEMBER) == len(MEMBER)
        assert stored(store, TEXT) == 0
        assert stored(store, behind(11, OTHER, 9)) == len(OTHER) + 9
        writer.do("assert store.stats()['families']['members'] >= 3")
        assert counter(store, "quarantined_records") == 0
        family_stores.families_hold(store)

        # Numbers are given again after the writer was opened anew.
        writer.do("store.delete(MEMBER); store.delete(behind(11, OTHER, 9)); store.close(); store = opened()")
        writer.do("puts(behind(12, OTHER, 20), TEXT, MEMBER)")
        for tokens in (behind(12, OTHER, 20), TEXT, MEMBER, OTHER):
            stored(store, tokens)  # what the reader knew under those numbers is gone; nothing is wrong
        assert counter(store, "damaged_donor") == 0
    with reader(path, host=1 << 20) as store:
        assert members(store) >= 3
        for tokens in (behind(12, OTHER, 20), TEXT, MEMBER, OTHER):
            assert stored(store, tokens) == len(tokens)
            assert store.prefetch(tokens).result() == len(tokens)
            assert stored(store, tokens) == len(tokens)
        writer.do("store.delete(TEXT); store.delete(OTHER)")
        for tokens in (behind(12, OTHER, 20), MEMBER):
            assert stored(store, tokens) == len(tokens)
        assert counter(store, "quarantined_records") == 0


def test_a_reader_gets_nothing_wrong_while_donors_are_evicted(path: Path) -> None:
    disk = 6 * small_stores.SEGMENT
    writer = Writer(PUTS, path, disk)
    try:
        writer.do("puts(TEXT, OTHER)")
        with reader(path, disk=disk) as store:
            seen = 0
            for first in range(20, 120, 10):
                writer.do(f"puts(*[behind(n, passage(n % 3), n % 32 + 1) for n in range({first}, {first + 10})])")
                for number in range(20, first + 10):
                    stored(store, behind(number, passage(number % 3), number % 32 + 1))
                seen += members(store)
            assert seen > 0
            assert counter(store, "quarantined_records") == 0
        writer.do("assert store.stats()['counters']['disk_evicted_records'] > 0")
    finally:
        writer.end()


def test_a_reader_takes_in_what_is_behind_holes_and_what_fills_them(path: Path, writer: Writer) -> None:
    """Numbers do not say what comes before what: a block that fills a hole has a higher one than what is behind it."""
    damage = "store._residency.quarantine(store._residency.path(store._residency.index.counts()[0][-1])[1])"
    long = family_stores.join(TEXT, OTHER)
    writer.do("puts(TEXT)")
    with reader(path) as store:
        assert stored(store, TEXT) == len(TEXT)
        writer.do(f"{damage}; store.flush()")
        writer.do("puts(join(TEXT, OTHER))")
        assert stored(store, long) == len(long)
        # All of this between two looks of the reader: what the blocks behind the hole name as their parent is gone.
        third = passage(3)
        writer.do("puts(passage(3)[:64]); puts(passage(3))")
        writer.do(f"{damage}; store.flush()")
        assert stored(store, third) == 32
        writer.do("puts(behind(12, passage(3)))")
        writer.do("puts(passage(3))")
        assert stored(store, third) == len(third)
        assert stored(store, behind(12, third)) == len(third) + 32
        assert counter(store, "unreachable_records") == 0
    with reader(path) as store:
        assert stored(store, long) == len(long)
        assert stored(store, third) == len(third)
