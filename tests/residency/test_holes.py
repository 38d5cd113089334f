"""Finding 4: what is behind a record that left the middle of its sequence stays, through close and open as well."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import family_stores
import numpy as np
import pytest
import small_stores
from family_stores import BLOCK, IDENTITY, counter, join, members, passage, put, stored
from faultfs import Fault, FaultFS
from store_histories import held
from threadruns import HANGS_S

from kvstore import KVStore, Reason
from kvstore.core.keys import namespace_digest
from kvstore.tiers.disk.catalog import Catalog

TEXT, MINE, LATE = passage(1), passage(20, 2 * BLOCK), passage(30, BLOCK)
OLD = join(TEXT, MINE)  # stands alone
NEW = join(passage(10, BLOCK), TEXT, LATE)  # its middle is coded against OLD
NEWEST = join(passage(11, BLOCK), LATE)  # its end is coded against that of NEW
SPACE = namespace_digest(b"")


@pytest.fixture
def path() -> Any:
    with small_stores.scratch() as folder:
        yield folder / "store"


def opened(path: Path, **settings: Any) -> KVStore:
    return KVStore(path, IDENTITY, family_stores.config(**settings))


def records(store: KVStore, tokens: np.ndarray) -> list[int]:
    found: list[int] = store._residency.index.match(SPACE, tokens, touch=False).records.tolist()
    return found


def holes(store: KVStore) -> list[int]:
    found: list[int] = store._residency.index.holes()[0].tolist()
    return found


def fill(path: Path) -> None:
    with opened(path) as store:
        for tokens in (OLD, NEW, NEWEST):
            put(store, tokens)
            store.flush()
        assert members(store) == 5


def flip_record(path: Path, tokens: np.ndarray, block: int) -> None:
    """One bit in the payload of the record of a block, in a closed store."""
    with opened(path) as store:
        entry = store._residency.disk.entry(records(store, tokens)[block])
    file = path / "segments" / f"{entry.extent.segment:08x}.seg"
    small_stores.flip(file, entry.extent.offset + entry.extent.nbytes // 2, 4)


def reopened_as_it_was(path: Path, **settings: Any) -> None:
    """The store holds exactly what it held before, after it was opened once and again."""
    with opened(path, **settings) as store:
        before = held(store, [OLD, NEW, NEWEST])
        assert store.check(deep=True).ok
    for _ in range(2):
        with opened(path, **settings) as store:
            assert held(store, [OLD, NEW, NEWEST]) == before
            assert store.check(deep=True).problems == ()
            assert not counter(store, "unreachable_records") + counter(store, "lost_members")


def test_finding_4_a_flipped_bit_in_an_old_record_costs_what_needs_it_alone(path: Path) -> None:
    fill(path)
    flip_record(path, OLD, 1)
    with opened(path) as store:
        assert stored(store, OLD) == BLOCK
        assert stored(store, NEW) == 2 * BLOCK  # its third block was coded against the damaged one
        assert stored(store, NEWEST) == len(NEWEST)  # and the donor of this one is behind that
        assert counter(store, "quarantined_records") == 2
        assert len(holes(store)) == 2
        assert store.stats()["disk"]["holes"] == 2
        assert store.stats()["disk"]["hole_bytes"] == 2 * (80 + 4 * BLOCK)
    reopened_as_it_was(path)
    with opened(path) as store:
        assert stored(store, NEWEST) == len(NEWEST)
        assert put(store, OLD).new_tokens == put(store, NEW).new_tokens == BLOCK
        store.flush()
        assert stored(store, OLD), stored(store, NEW) == (len(OLD), len(NEW))
        assert holes(store) == []
        assert store.stats()["disk"]["holes"] == 0
    reopened_as_it_was(path)  # what filled the holes has higher numbers than what is behind it


def test_finding_4_a_donor_that_is_evicted_leaves_what_is_behind_its_members(path: Path) -> None:
    fill(path)
    with opened(path) as store:
        residency = store._residency
        before = residency.index.counts()[0].tolist()
        for tokens in (NEW, NEWEST):
            residency.index.touch(SPACE, tokens)
        while not holes(store):
            residency.disk.remove(residency.evict())
        assert len(residency.index.counts()[0]) < len(before)
        assert stored(store, NEWEST) == len(NEWEST)
        assert store.check(deep=True).ok
    reopened_as_it_was(path)


@pytest.mark.parametrize("namespace", [b"", b"other"])
def test_holes_go_with_the_last_record_behind_them(path: Path, namespace: bytes) -> None:
    with opened(path) as store:
        put(store, OLD, namespace)
        store.flush()
        for record in (2, 4):
            store._residency.quarantine(record)
        assert holes(store) == [2, 4]
        assert store.stats()["disk"]["holes"] == 2
        store._residency.disk.remove(store._residency.forget([6], Reason.DELETED))
        assert holes(store) == [2, 4]
        store._residency.disk.remove(store._residency.forget([5], Reason.DELETED))
        assert holes(store) == [2]
        assert store.stats()["disk"]["holes"] == 1
        assert store.check().ok
        assert store.delete(OLD[: 3 * BLOCK], namespace=namespace) == 2
        assert holes(store) == []
        assert [store.stats()["disk"][name] for name in ("holes", "hole_bytes", "records")] == [0, 0, 0]
        assert store.check().ok


def test_no_tokens_of_a_deleted_sequence_stay_in_a_hole(path: Path) -> None:
    with opened(path) as store:
        put(store, OLD)
        store.flush()
        store._residency.quarantine(2)
        store.delete(OLD)
        scan = store._residency.disk.catalog.scan()
        assert (len(scan.entries), len(scan.holes), len(scan.tokens)) == (0, 0, 0)


def test_a_hole_stays_on_disk_until_the_block_that_fills_it_is_there(path: Path, tmp_path: Path) -> None:
    """A kill between a put and its commit loses nothing that was flushed."""
    goes_on = threading.Event()
    goes_on.set()
    fs = FaultFS(before=lambda call: goes_on.wait(HANGS_S) if call == "pwritev" else None)
    with KVStore(path, IDENTITY, family_stores.config(), fs=fs) as store:
        put(store, OLD)
        store.flush()
        store._residency.quarantine(2)
        goes_on.clear()
        try:
            put(store, OLD)  # waits to be written
            assert holes(store) == []
            assert store.stats()["disk"]["holes"] == 1
            assert stored(store, OLD) == len(OLD)
            catalog = copied_catalog(path, tmp_path)
        finally:
            goes_on.set()
        assert catalog.holes["record"].tolist() == [2]
        store.flush()
        assert store.stats()["disk"]["holes"] == 0
        assert store.check().problems == ()


def copied_catalog(path: Path, into: Path) -> Any:
    """What the catalog holds at this moment, as a kill would leave it."""
    (into / "data.mdb").write_bytes((path / "catalog" / "data.mdb").read_bytes())
    catalog = Catalog(str(into), 1 << 24, readonly=False)
    try:
        return catalog.scan()
    finally:
        catalog.close()


def test_what_is_behind_a_block_that_could_not_be_written_is_there_after_an_open(path: Path) -> None:
    """The first block of a put finds no space, the others do: they are behind a hole."""
    fs = FaultFS()
    with KVStore(path, IDENTITY, family_stores.config(host=1 << 20), fs=fs) as store:
        put(store, OLD[:BLOCK])
        store.flush()
        fs.fault = Fault("pwritev", 1, 5)
        put(store, OLD[: 2 * BLOCK])
        store.flush()
        assert fs.fault.hits
        fs.fault = None
        unwritten = store._residency.index.counts()[0].tolist()[-1]
        # Behind it, as if it had been queued before the disk failed: a put of now would write both.
        store._residency._unwritten.discard(unwritten)
        put(store, OLD)
        store.flush()
        store._residency._unwritten.add(unwritten)
        assert stored(store, OLD) == len(OLD)
    with opened(path) as store:
        assert stored(store, OLD) == BLOCK
        assert put(store, OLD).new_tokens in (BLOCK, len(OLD) - BLOCK)
        store.flush()
        assert stored(store, OLD) == len(OLD)
        assert store.check(deep=True).ok


def test_a_put_whose_beginning_is_evicted_under_its_hands_stores_all_of_it(path: Path) -> None:
    """The disk makes space between the look of a put and its blocks: nothing may be stored behind nothing."""
    with opened(path) as store:
        put(store, OLD[: 2 * BLOCK])
        store.flush()
        residency = store._residency
        arrive, calls = residency.arrive, []

        def evicted_first(*args: Any, **kwargs: Any) -> Any:
            calls.append(residency.disk.remove(residency.evict()) if not calls else 0)
            return arrive(*args, **kwargs)

        residency.arrive = evicted_first
        assert put(store, OLD).new_tokens == len(OLD) - BLOCK
        assert len(calls) == 2
        store.flush()
        assert stored(store, OLD) == len(OLD)
        assert store.check(deep=True).problems == ()
    reopened_as_it_was(path)


def test_what_a_donors_beginning_needs_is_used_with_the_donor(path: Path) -> None:
    """NEWEST needs the end of NEW, whose beginning needs OLD: uses of NEWEST keep all of that."""
    fill(path)
    with opened(path) as store:
        residency = store._residency
        for number in range(60, 66):
            put(store, passage(number))
        store.flush()
        assert stored(store, NEWEST) == len(NEWEST)
        kept = {*records(store, NEW), *records(store, TEXT), *records(store, NEWEST)}
        for _ in range(6 * 4):
            assert not kept & set(residency.evict())
        assert stored(store, NEW) == len(NEW)


def test_a_hole_that_the_catalog_lacks_is_found(path: Path) -> None:
    with opened(path) as store:
        put(store, OLD)
        store.flush()
        residency: Any = store._residency
        residency.quarantine(2)
        (hole,) = (entry for entry in residency.disk.catalog.get([2]) if entry is not None)
        residency.disk.catalog.commit(removed=[hole])
        found = store.check().problems
        assert "record 2 left a hole that is not in the catalog" in found
        assert "record 3 is on disk, and what comes before it is not, nor a hole in its place" in found
        residency.disk.catalog.commit(added=[hole])
        assert store.check().ok


def test_a_reader_holds_what_the_writer_held(path: Path) -> None:
    fill(path)
    flip_record(path, OLD, 1)
    with opened(path) as store:
        stored(store, OLD), stored(store, NEW)
        before = held(store, [OLD, NEW, NEWEST])
    with KVStore(path, IDENTITY, family_stores.config(), read_only=True) as reader:
        assert held(reader, [OLD, NEW, NEWEST]) == before
        assert stored(reader, NEWEST) == len(NEWEST)


@pytest.mark.parametrize("kept", [True, False])
def test_a_rebuilt_catalog_keeps_what_is_behind_a_hole_if_its_tokens_are_still_known(path: Path, kept: bool) -> None:
    """Records say nothing of the tokens before them; the raw pages of the damaged catalog do, where they are left."""
    fill(path)
    with opened(path) as store:
        entry = store._residency.disk.entry(records(store, OLD)[1])
        store._residency.quarantine(entry.record)
    segment = path / "segments" / f"{entry.extent.segment:08x}.seg"
    content = bytearray(segment.read_bytes())
    content[entry.extent.offset : entry.extent.offset + 8] = bytes(8)
    segment.write_bytes(content)
    if kept:
        small_stores.flip(path / "catalog" / "data.mdb", 144, 0x10)  # its two meta pages disagree now
    else:
        (path / "catalog" / "data.mdb").unlink()
    with opened(path) as store:
        assert counter(store, "catalog_rebuilt") == 1
        assert store.check(deep=True).problems == ()
        # The member goes whose donor it was, and without tokens all that is behind it, too: five blocks, two members.
        assert counter(store, "lost_members") == (1 if kept else 3)
        assert (counter(store, "unreachable_records") > 1) != kept
        assert stored(store, OLD) == BLOCK
        if kept:
            assert put(store, OLD).new_tokens == BLOCK
        else:
            assert put(store, OLD).new_tokens == len(OLD) - BLOCK
        store.flush()
        assert stored(store, OLD) == len(OLD)
    reopened_as_it_was(path)


def test_what_is_behind_the_records_of_a_lost_segment_stays(path: Path) -> None:
    with opened(path) as store:
        put(store, OLD[:BLOCK])
        for number in range(40, 60):
            put(store, passage(number))
        store.flush()
        put(store, OLD)
        store.flush()
        first, later = (store._residency.disk.entry(record).extent.segment for record in records(store, OLD)[:2])
        assert first != later
    (path / "segments" / f"{first:08x}.seg").unlink()
    with opened(path) as store:
        assert counter(store, "lost_entries") > 0
        assert stored(store, OLD) == 0
        assert put(store, OLD).new_tokens == BLOCK
        store.flush()
        assert stored(store, OLD) == len(OLD)
        assert store.check(deep=True).problems == ()
    reopened_as_it_was(path)
