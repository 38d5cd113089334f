"""What others are coded against is deleted: members stand alone first, and stay."""

from __future__ import annotations

import threading
from pathlib import Path

import family_stores
import pytest
import small_stores
from family_stores import BLOCK, IDENTITY, behind, config, counter, join, members, passage, stored
from faultfs import FaultFS
from threadruns import HANGS_S

from kvstore import KVStore

TEXT = passage(1)
VARIANTS = [behind(10, TEXT), behind(11, TEXT, 13), join(TEXT[2 * BLOCK :], passage(12, 40))]


def family(path: Path, host: int = 0, **settings: object) -> KVStore:
    """A store with a passage and those coded against it, flushed."""
    store = KVStore(path, IDENTITY, config(host=host, **settings))  # type: ignore[arg-type]
    family_stores.put(store, TEXT)
    store.flush()
    for tokens in VARIANTS:
        family_stores.put(store, tokens)
    store.flush()
    assert members(store) >= 2 * len(VARIANTS)
    return store


def all_there(store: KVStore) -> None:
    for tokens in VARIANTS:
        assert stored(store, tokens) == len(tokens)
    assert counter(store, "quarantined_records") == counter(store, "lost_members") == 0
    family_stores.families_hold(store)
    small_stores.all_is_well(store)


@pytest.mark.parametrize("host", [0, 1 << 20])
def test_members_stand_alone_before_their_donors_are_deleted(path: Path, host: int) -> None:
    with family(path, host) as store:
        found = members(store)
        assert store.delete(TEXT) == 4
        assert counter(store, "recoded_members") == found
        assert members(store) == 0
        assert stored(store, TEXT) == 0
        # The deleted passage's bytes are gone, and nothing needs them.
        assert not any(entry.record <= 4 for entry in small_stores.catalog_entries(store))
        all_there(store)
    with KVStore(path, IDENTITY, config(host=host)) as store:
        assert stored(store, TEXT) == 0
        assert store.stats()["families"] == {"members": 0, "donors": 0}
        all_there(store)


def test_what_was_recoded_serves_as_donor(path: Path) -> None:
    with family(path) as store:
        store.delete(TEXT)
        assert members(store) == 0
        late = behind(13, TEXT, 9)
        family_stores.put(store, late)
        store.flush()
        assert members(store) >= 3
        assert stored(store, late) == len(late)
        all_there(store)


def test_deleting_members_leaves_their_donors(path: Path) -> None:
    with family(path) as store:
        for tokens in VARIANTS:
            assert store.delete(tokens)
        assert counter(store, "recoded_members") == 0
        assert store.stats()["families"] == {"members": 0, "donors": 0}
        assert stored(store, TEXT) == len(TEXT)
        small_stores.all_is_well(store)
    with KVStore(path, IDENTITY, config()) as store:
        assert stored(store, TEXT) == len(TEXT)
        assert [stored(store, tokens) for tokens in VARIANTS] == [0, 0, 0]


def test_deleting_everything_leaves_nothing(path: Path) -> None:
    with family(path) as store:
        for tokens in (TEXT, *VARIANTS):
            assert store.delete(tokens)
        assert small_stores.catalog_entries(store) == []
        assert store.stats()["families"] == {"members": 0, "donors": 0}
        assert store.stats()["content"]["records"] == 0
        assert family_stores.disk_bytes(store) == 0
        small_stores.all_is_well(store)


def test_a_sequence_is_not_coded_against_itself(path: Path) -> None:
    twice = join(TEXT, passage(20, 7), TEXT)
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, twice)
        store.flush()
        assert members(store) == 0
        family_stores.put(store, behind(10, TEXT))  # what it holds twice serves others all the same
        store.flush()
        assert members(store) >= 2
        assert store.delete(twice)
        assert members(store) == 0
        assert stored(store, behind(10, TEXT)) == len(behind(10, TEXT))


def test_deleting_the_end_of_a_donor_recodes_only_what_needs_it(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT[: 3 * BLOCK])
        family_stores.put(store, TEXT)
        store.flush()
        family_stores.put(store, VARIANTS[0])
        store.flush()
        before = members(store)
        assert before == 4
        last = [e.record for e in small_stores.catalog_entries(store) if e.start == 3 * BLOCK and not e.donors]
        needing = {m for record in last for m in store._residency.members_of([record])}
        fork = join(TEXT[: 3 * BLOCK], passage(30))
        family_stores.put(store, fork)  # the first three blocks have another owner
        store.flush()
        assert store.delete(TEXT) == 1
        assert counter(store, "recoded_members") == len(needing) == before - members(store) == 1
        assert stored(store, VARIANTS[0]) == len(VARIANTS[0])
        assert stored(store, fork) == len(fork)
        family_stores.families_hold(store)


@pytest.mark.parametrize("first", ["donor", "member"])
def test_deletes_while_everything_is_queued(path: Path, first: str) -> None:
    disk_goes_on = threading.Event()
    fs = FaultFS(before=lambda call: disk_goes_on.wait(HANGS_S) if call == "pwritev" else None)
    disk_goes_on.set()
    with KVStore(path, IDENTITY, config(), fs=fs) as store:
        family_stores.put(store, passage(40))
        store.flush()
        disk_goes_on.clear()
        for tokens in (TEXT, *VARIANTS):
            family_stores.put(store, tokens)
        threading.Timer(0.3, disk_goes_on.set).start()
        assert store.delete(TEXT if first == "donor" else VARIANTS[0])
        store.flush()
        gone, kept = (TEXT, VARIANTS) if first == "donor" else (VARIANTS[0], [TEXT, *VARIANTS[1:]])
        assert stored(store, gone) == 0
        for tokens in kept:
            assert stored(store, tokens) == len(tokens)
        assert counter(store, "dropped_members") == 0
        family_stores.families_hold(store)
        small_stores.all_is_well(store)
    with KVStore(path, IDENTITY, config()) as store:
        assert stored(store, gone) == 0
        for tokens in kept:
            assert stored(store, tokens) == len(tokens)


def test_a_member_keeps_its_end_of_life_when_it_is_recoded(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT)
        store.flush()
        family_stores.put(store, VARIANTS[0], ttl=3600)
        store.flush()
        assert members(store) >= 3
        before = {e.expiry for e in small_stores.catalog_entries(store) if e.donors}
        store.delete(TEXT)
        assert {e.expiry for e in small_stores.catalog_entries(store)} == before != {0.0}
        assert stored(store, VARIANTS[0]) == len(VARIANTS[0])


def test_a_session_survives_the_donor_of_its_blocks(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT)
        store.flush()
        store.session("chat").save(VARIANTS[0], family_stores.kv_of(VARIANTS[0]))
        store.flush()
        assert members(store) >= 3
        store.delete(TEXT)
        hit = store.session("chat").resume()
        assert hit is not None
        assert family_stores.is_exact(hit, VARIANTS[0])
        assert hit.tokens == len(VARIANTS[0])


def test_a_member_whose_parent_is_gone_does_not_stop_a_delete(path: Path) -> None:
    with family(path) as store:
        victims = [e for e in family_stores.member_entries(store) if e.start == BLOCK]
        assert victims
        for entry in victims:
            store._residency.quarantine(entry.record)
        left = members(store)
        assert left
        assert store.delete(TEXT) == 4
        assert members(store) == 0
        for tokens in VARIANTS:
            family_stores.put(store, tokens)
        store.flush()
        for tokens in VARIANTS:
            assert stored(store, tokens) == len(tokens)
        family_stores.families_hold(store)
        small_stores.all_is_well(store)


def test_the_members_of_a_large_family_are_not_all_in_memory_at_once(path: Path) -> None:
    block = BLOCK * family_stores.LAYOUT.bytes_per_token
    sequences = [behind(number, TEXT[:BLOCK]) for number in range(10, 40)]
    with KVStore(path, IDENTITY, config(write_queue_bytes=2 * block)) as store:
        family_stores.put(store, TEXT[:BLOCK])
        for tokens in sequences:
            family_stores.put(store, tokens)
        store.flush()
        assert members(store) == len(sequences)
        writer = store._engine.put_path.queue  # type: ignore[union-attr]
        submit, queued = writer.submit, []

        def counted(job: object) -> None:
            submit(job)  # type: ignore[arg-type]
            queued.append(writer.pending_bytes)

        writer.submit = counted  # type: ignore[method-assign]
        assert store.delete(TEXT[:BLOCK]) == 1
        assert len(queued) == len(sequences)
        assert 0 < max(queued) <= 2 * block
        for tokens in sequences:
            assert stored(store, tokens) == len(tokens)


def test_gets_while_donors_come_and_go_are_exact(path: Path) -> None:
    """Readers in other threads meet members whose donors are being deleted, and only ever miss."""
    done, wrong = threading.Event(), []

    def read() -> None:
        try:
            while not done.is_set():
                for tokens in VARIANTS:
                    stored(store, tokens)
        except BaseException as error:
            wrong.append(error)

    with family(path, host=1 << 18) as store:
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            store.delete(TEXT)
            for tokens in VARIANTS:
                store.delete(tokens)
            for tokens in (TEXT, *VARIANTS):
                family_stores.put(store, tokens)
            store.flush()
        done.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert counter(store, "quarantined_records") == 0
        for tokens in (TEXT, *VARIANTS):
            family_stores.put(store, tokens)
            assert stored(store, tokens) == len(tokens)
        store.flush()
        family_stores.families_hold(store)
        small_stores.all_is_well(store)
