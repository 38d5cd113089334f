"""What was not there when the remote tier was listed is not asked for, and that is at worst a miss."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import remotestores as rc
import small_stores as small
from kvcases import BLOCK, open_store
from statecases import HYBRID
from windowcases import ONLY_SLIDING

from kvstore import KVLayout, KVStore, RemoteConfig
from kvstore.core.keys import chain_keys, namespace_digest
from kvstore.errors import ConfigError, RemoteUnavailable
from kvstore.tiers.remote.engines.memory import MemoryEngine
from kvstore.tiers.remote.listing import Listing
from kvstore.tiers.remote.names import mark_of

TOKENS = small.tokens_of(1, 6 * small.BLOCK)
OTHERS = small.tokens_of(2, 6 * small.BLOCK)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteConfig:
    return rc.settings(f"memory:{tmp_path.name}", list_s=3600.0)


def listed(store: KVStore) -> Listing:
    """The listing of a store, made after all that was written so far."""
    listing = store._engine.remote.tier.listing
    listing.refresh()
    return listing


def calls(store: KVStore) -> float:
    return store.stats()["remote"]["engine_calls"]


def test_what_is_not_there_takes_no_call_and_what_is_there_is_found(tmp_path: Path, remote: RemoteConfig) -> None:
    rc.filled(tmp_path / "a", remote, TOKENS)
    with rc.open_store(tmp_path / "b", remote) as store:
        assert listed(store).stats()["listed"] == 6
        before = calls(store)
        assert store.get(OTHERS) is None
        assert (calls(store), rc.counters(store)["remote_unlisted"] > 0) == (before, True)
        assert rc.got(store, TOKENS).tiers == {"remote": len(TOKENS)}


def test_what_another_store_wrote_since_is_a_miss_until_the_next_listing(tmp_path: Path, remote: RemoteConfig) -> None:
    with rc.open_store(tmp_path / "b", remote) as store:
        listed(store)
        rc.filled(tmp_path / "a", remote, TOKENS)
        assert store.get(TOKENS) is None
        listed(store)
        assert rc.got(store, TOKENS).tiers == {"remote": len(TOKENS)}


def test_what_this_store_wrote_since_is_found(tmp_path: Path, remote: RemoteConfig) -> None:
    with rc.open_store(tmp_path / "a", remote) as store:
        listed(store)
        small.put(store, TOKENS)
        assert store.flush(remote=True).remote_due == 0
        store.delete(TOKENS)
        store._engine.remote.tier.beliefs.forget(None)
        assert rc.got(store, TOKENS).tiers == {"remote": len(TOKENS)}


def test_a_listing_holds_for_two_turns_and_no_longer(tmp_path: Path, remote: RemoteConfig) -> None:
    with rc.open_store(tmp_path / "a", remote) as store:
        tier, now = store._engine.remote.tier, [0.0]
        listing = Listing(tier._link, tier._names, tier._metrics, 60.0, 20.0, lambda: now[0])
        try:
            listing.refresh()
            now[0] += 59
            assert listing.lacks(b"k" * 32)
            listing.add(None)  # anything may have changed
            assert not listing.lacks(b"k" * 32)
            listing.refresh()
            assert listing.lacks(b"k" * 32)
        finally:
            listing.close()
        now[0] += 121
        assert not listing.lacks(b"k" * 32)


def test_a_listing_that_fails_says_nothing(
    tmp_path: Path, remote: RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rc.filled(tmp_path / "a", remote, TOKENS)

    def fail(self: MemoryEngine, prefix: str, timeout_s: float) -> Iterator[str]:
        yield "kvs1/half"
        raise RemoteUnavailable("half way")

    monkeypatch.setattr(MemoryEngine, "list", fail)
    with rc.open_store(tmp_path / "b", remote) as store:
        assert listed(store).stats()["listed"] == 0
        assert rc.counters(store)["remote_read_errors"] > 0
        assert rc.got(store, TOKENS).tiers == {"remote": len(TOKENS)}


def test_what_this_store_writes_while_a_listing_passes_is_found(
    tmp_path: Path, remote: RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writing, goes_on = MemoryEngine.put, threading.Event(), threading.Event()

    def slowly(self: MemoryEngine, *arguments: Any) -> bool:
        writing.set()
        goes_on.wait(60)
        return write(self, *arguments)

    monkeypatch.setattr(MemoryEngine, "put", slowly)
    with rc.open_store(tmp_path / "a", remote) as store:
        listing = listed(store)
        small.put(store, TOKENS)
        store.flush()
        assert writing.wait(60)
        listing.refresh()  # begins and ends before the first value is there
        goes_on.set()
        assert store.flush(remote=True).remote_due == 0
        store.delete(TOKENS)
        store._engine.remote.tier.beliefs.forget(None)
        assert rc.got(store, TOKENS).tiers == {"remote": len(TOKENS)}


def test_a_listing_without_end_is_given_up(
    tmp_path: Path, remote: RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, whole = [0.0], MemoryEngine.list

    def without_end(self: MemoryEngine, prefix: str, timeout_s: float) -> Iterator[str]:
        while True:
            now[0] += 0.1
            yield "kvs1/name"

    with rc.open_store(tmp_path / "a", remote) as store:
        tier = listed(store) and store._engine.remote.tier
        monkeypatch.setattr(MemoryEngine, "list", without_end)
        listing = Listing(tier._link, tier._names, tier._metrics, 60.0, 20.0, lambda: now[0])
        try:
            listing.refresh()
            assert (listing.lacks(b"k" * 32), rc.counters(store)["remote_read_errors"] > 0) == (False, True)
            monkeypatch.setattr(MemoryEngine, "list", whole)
            listing.refresh()
            assert listing.lacks(b"k" * 32)
        finally:
            listing.close()


@pytest.mark.parametrize("layout", [None, ONLY_SLIDING, HYBRID], ids=["all tokens", "windows", "states"])
def test_what_wrongly_seems_to_be_there_takes_one_call(
    tmp_path: Path, remote: RemoteConfig, layout: KVLayout | None
) -> None:
    opened = (
        rc.open_store(tmp_path / "b", remote) if layout is None else open_store(tmp_path / "b", layout, remote=remote)
    )
    with opened as store:
        root = store._engine.getter.lookup.root(namespace_digest(b""))
        key = next(iter(chain_keys(root, OTHERS, small.BLOCK if layout is None else BLOCK)))
        listed(store).add([key if layout is None else mark_of(root)])
        before = calls(store)
        assert (store.get(OTHERS), calls(store)) == (None, before + 1)


def test_a_turn_shorter_than_a_second_is_refused() -> None:
    with pytest.raises(ConfigError, match="list_s"):
        RemoteConfig("memory:x", list_s=0.5)
