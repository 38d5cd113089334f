"""Interleavings that once lost something, each forced."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import Any

import family_stores
import pytest
import small_stores
from faultfs import Fault, FaultFS
from threadruns import HANGS_S

from kvstore import KVStore
from kvstore.core.explanation import Reason
from kvstore.metrics import Metric
from kvstore.tiers.disk.environment import CatalogError

_SHORT = 0.3


def test_a_pin_while_another_pinned_record_leaves_is_kept() -> None:
    """What is kept shrinks when a pinned record goes: a pin meanwhile must not fall out of it."""
    with (
        small_stores.scratch() as folder,
        KVStore(folder / "store", small_stores.IDENTITY, small_stores.config()) as store,
    ):
        for number in (1, 2, 3):
            small_stores.put(store, small_stores.tokens_of(number, 4), pin=number < 3)
        store.flush()
        residency: Any = store._residency
        release, computing, pinned = residency._pins._release, threading.Event(), threading.Event()

        def slow_release(record: int) -> list[int]:
            computing.set()
            pinned.wait(_SHORT)  # the pin waits for the lock, so this runs out
            freed: list[int] = release(record)
            return freed

        residency._pins._release = slow_release
        leaves = threading.Thread(target=residency.forget, args=([1], Reason.DELETED))
        leaves.start()
        assert computing.wait(HANGS_S)

        def pin() -> None:
            residency.pin(3)
            pinned.set()

        pins = threading.Thread(target=pin)
        pins.start()
        for thread in (leaves, pins):
            thread.join(HANGS_S)
        assert [residency.is_kept(record) for record in (1, 2, 3)] == [False, True, True]


def test_a_member_that_joins_while_its_donor_is_deleted_is_seen_by_the_delete() -> None:
    with (
        small_stores.scratch() as folder,
        KVStore(folder / "store", family_stores.IDENTITY, family_stores.config()) as store,
    ):
        text = family_stores.passage(1, family_stores.BLOCK)
        family_stores.put(store, text)
        store.flush()
        residency: Any = store._residency
        may_serve, checked, seen = residency.may_serve, threading.Event(), threading.Event()

        def slow(record: int) -> bool:
            good: bool = may_serve(record)
            checked.set()
            seen.wait(_SHORT)  # the delete waits for the lock, so this runs out
            return good

        block = next(iter(_queued(store, family_stores.behind(10, text))))
        residency.may_serve = slow
        joins = threading.Thread(target=residency.join, args=(block, [1]))
        joins.start()
        assert checked.wait(HANGS_S)
        residency.erase(store._digest(b""), text)
        members = residency.members_of([1])
        seen.set()
        joins.join(HANGS_S)
        assert members == [block.record] or residency.donors_of(block.record) == ()
        residency.forget([1, block.record], Reason.DELETED)


def _queued(store: KVStore, tokens: Any) -> list[Any]:
    """A block that is queued, as far as the ledger knows: it was never handed to a thread."""
    from dataclasses import replace

    residency: Any = store._residency
    kept: list[Any] = []
    join, residency.join = residency.join, lambda block, donors: bool(kept.append(block))
    family_stores.put(store, tokens)
    store.flush()
    residency.join = join
    block = replace(kept[0], record=1000)
    residency._pending[1000] = block
    return [block]


def test_a_durable_put_leaves_the_counts_to_the_next_flush() -> None:
    config = small_stores.config(durability="put")
    with small_stores.scratch() as folder, KVStore(folder / "store", small_stores.IDENTITY, config) as store:
        put = small_stores.put(store, small_stores.tokens_of(1, 20))
        assert store.flush().durable_blocks == put.new_blocks == 5
        assert store.flush().durable_blocks == 0


def test_what_leaves_while_it_is_encoded_leaves_memory_too() -> None:
    with (
        small_stores.scratch() as folder,
        KVStore(folder / "store", small_stores.IDENTITY, small_stores.config()) as store,
    ):
        residency: Any = store._residency
        add = residency.host.add

        def late(record: int, item: Any) -> bool:
            residency.forget([record], Reason.DELETED)
            kept: bool = add(record, item)
            return kept

        residency.host.add = late
        small_stores.put(store, small_stores.tokens_of(1, 20))
        store.flush()
        assert len(residency.host) == 0
        assert store.check().ok


def test_a_block_that_fills_a_hole_in_a_pinned_sequence_is_kept() -> None:
    with (
        small_stores.scratch() as folder,
        KVStore(folder / "store", small_stores.IDENTITY, small_stores.config()) as store,
    ):
        tokens = small_stores.tokens_of(1, 20)
        small_stores.put(store, tokens, pin=True)
        store.flush()
        store._residency.quarantine(2)
        assert store.check().ok
        small_stores.put(store, tokens[:8])
        store.flush()
        assert store._residency.is_kept(6)
        assert store.check().ok


def test_of_two_threads_that_find_the_same_damage_one_counts_it() -> None:
    with (
        small_stores.scratch() as folder,
        KVStore(folder / "store", small_stores.IDENTITY, small_stores.config()) as store,
    ):
        small_stores.put(store, small_stores.tokens_of(1, 20))
        store.flush()
        residency: Any = store._residency
        source, quarantine = SimpleNamespace(tier="host"), residency.quarantine
        first_is_there, second_is_done = threading.Event(), threading.Event()

        def slow_quarantine(record: int) -> None:
            first_is_there.set()
            assert second_is_done.wait(HANGS_S)
            quarantine(record)

        residency.quarantine = slow_quarantine
        first = threading.Thread(target=residency.reject, args=(5, source, Metric.DAMAGED_CODEC))
        first.start()
        assert first_is_there.wait(HANGS_S)
        assert not residency.reject(5, source, Metric.DAMAGED_CODEC)
        second_is_done.set()
        first.join(HANGS_S)
        counters = store.stats()["counters"]
        names = ("damaged_codec", "quarantined_records", "stale_reads")
        assert [counters[name] for name in names] == [1, 1, 1]
        assert 5 not in residency.index
        assert store.check().ok


def test_pins_are_kept_after_reopening() -> None:
    with small_stores.scratch() as folder:
        with KVStore(folder / "store", small_stores.IDENTITY, small_stores.config()) as store:
            small_stores.put(store, small_stores.tokens_of(1, 20), pin=True)
        with KVStore(folder / "store", small_stores.IDENTITY, small_stores.config()) as store:
            assert all(store._residency.is_kept(record) for record in range(1, 6))
            assert store.check(deep=True).pinned == 1


def test_what_leaves_memory_while_the_catalog_cannot_be_asked_is_not_found_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record that could not be written is in memory alone; it leaves while the catalog is opened anew."""
    with small_stores.scratch() as folder:
        fs = FaultFS()
        with KVStore(folder / "store", small_stores.IDENTITY, small_stores.config(host=1 << 12), fs=fs) as store:
            fs.fault = Fault("pwritev", 1, errno.ENOSPC, sticky=True)
            lost, others = small_stores.tokens_of(1, 4), [small_stores.tokens_of(n, 4) for n in range(2, 60)]
            small_stores.put(store, lost)
            assert store.flush().dropped_blocks == 1
            assert store.contains(lost) == 4  # in memory

            def refuses(catalog: Any, records: Any) -> Any:
                raise CatalogError("it is being opened anew")

            disk: Any = store._residency.disk
            with monkeypatch.context() as patched:
                patched.setattr(type(disk.catalog), "get", refuses)
                store._residency.host.remove([1])
                assert not store._residency.drop_if_nowhere(1, Reason.DROPPED)
            fs.fault = None
            for tokens in others:
                small_stores.put(store, tokens)
                store.flush()
            assert store.contains(lost) == 0
            assert store.check(deep=True).problems == ()
