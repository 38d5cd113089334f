"""What is known of a session beside its tokens: times, resumes, metadata, an end, and what of it is stored."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from durable import lose_meta_pages
from kvcases import SMALL, kv_of, open_store, tokens

from kvstore import KVStore, MetadataError, TierConfig
from kvstore.config import MIB
from kvstore.core.keys import namespace_digest
from kvstore.residency.sessions import SessionTable
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.saved_sessions import SavedSessions

FACTS = {"user": "ann", "turn": 3, "tags": ["a", "b"], "raw": b"\0\xff", "nothing": None}


@pytest.fixture(params=["disk", "memory"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KVStore]:
    changes: dict[str, Any] = {"disk": TierConfig(0)} if request.param == "memory" else {}
    with open_store(tmp_path, **changes) as opened:
        yield opened
        assert opened.check().problems == ()


def save(store: KVStore, name: str, count: int = 20, **options: Any) -> None:
    store.session(name).save(tokens(count), kv_of(tokens(count)), **options)


def test_the_list_says_all_that_is_known(store: KVStore, clock: list[float]) -> None:
    before = time.time()
    store.session("chat", namespace="n").save(tokens(20), kv_of(tokens(20)), metadata=FACTS, ttl=500, pin=True)
    clock[0] += 10
    for _ in range(2):
        assert store.session("chat", namespace="n").resume() is not None
    store.flush()
    (row,) = store.sessions()
    assert (row.id, row.tokens, row.bytes, row.hits, row.pinned) == ("chat", 20, 20 * SMALL.bytes_per_token, 2, True)
    assert (row.namespace, row.metadata) == (namespace_digest("n"), FACTS)
    assert before <= row.created < row.last_use - 9 < row.expires - 450
    assert (row.stored_tokens, row.stored_bytes) == (None, None)
    (row,) = store.sessions(stored=True)
    assert (row.stored_tokens, row.stored_bytes) == (20, sum(store.stats()[tier]["bytes"] for tier in held(store)))


def held(store: KVStore) -> list[str]:
    return ["disk"] if store.config.disk.bytes else ["host"]


def test_of_an_evicted_session_nothing_is_stored(store: KVStore) -> None:
    save(store, "chat")
    store.delete(tokens(20))
    (row,) = store.sessions(stored=True)
    assert (row.tokens, row.stored_tokens, row.stored_bytes) == (20, 0, 0)


def test_saving_again_keeps_creation_resumes_and_metadata(store: KVStore, clock: list[float]) -> None:
    save(store, "chat", metadata=FACTS)
    created = store.sessions()[0].created
    clock[0] += 10
    store.session("chat").resume()
    save(store, "chat", 30)
    store.session("chat").point_to(tokens(40))
    (row,) = store.sessions()
    assert (row.created, row.hits, row.metadata, row.tokens) == (created, 1, FACTS, 40)
    assert store.session("chat").metadata == FACTS
    save(store, "chat", 30, metadata={"turn": 4})
    assert store.session("chat").metadata == {"turn": 4}
    save(store, "chat", 30, metadata={})
    assert store.session("chat").metadata == store.session("nobody").metadata == {}


def test_a_fork_begins_with_the_metadata_and_no_resumes(store: KVStore) -> None:
    save(store, "chat", metadata=FACTS)
    store.session("chat").resume()
    store.session("chat").fork("other")
    rows = {row.id: (row.hits, row.metadata) for row in store.sessions()}
    assert rows == {"chat": (1, FACTS), "other": (0, FACTS)}


@pytest.mark.parametrize(
    "bad", [{"a": b"x" * 4096}, {"a": object()}, {1: 2}, "text"], ids=["large", "kind", "key", "map"]
)
def test_metadata_that_is_not_kept_changes_nothing(store: KVStore, bad: Any) -> None:
    save(store, "chat", metadata=FACTS)
    for call in (
        lambda: save(store, "chat", 30, metadata=bad),
        lambda: store.session("chat").point_to([1], metadata=bad),
    ):
        with pytest.raises(MetadataError, match="metadata"):
            call()
    (row,) = store.sessions()
    assert (row.tokens, row.metadata) == (20, FACTS)
    assert store.contains(tokens(30)) == 20


def test_all_of_it_survives_a_restart(tmp_path: Path, clock: list[float]) -> None:
    with open_store(tmp_path) as store:
        save(store, "chat", metadata=FACTS)
        store.session("chat").resume()
        rows = store.sessions(stored=True)
    with open_store(tmp_path) as store:
        assert store.sessions(stored=True) == rows
        assert store.check(deep=True).problems == ()
    with open_store(tmp_path, read_only=True) as reader:
        assert reader.session("chat").resume() is not None  # a reader counts nothing
        assert reader.sessions(stored=True) == rows


def test_a_session_whose_time_is_over_is_gone_with_its_blocks(store: KVStore, clock: list[float]) -> None:
    save(store, "chat", ttl=5, metadata=FACTS)
    clock[0] += 6
    assert store.sessions() == []
    assert not store.session("chat").exists
    assert store.contains(tokens(20)) == 0
    save(store, "chat", metadata={})
    (row,) = store.sessions()
    assert (row.hits, row.metadata, row.expires) == (0, {}, 0.0)


def test_a_save_beside_resumes_is_never_undone(store: KVStore) -> None:
    save(store, "chat", 1)
    with resumed_all_the_time(store, "chat"):
        for count in range(2, 40):
            save(store, "chat", count)
            assert len(store.session("chat").tokens) == count


def test_a_session_that_goes_with_its_namespace_beside_resumes_stays_away(store: KVStore) -> None:
    with resumed_all_the_time(store, "chat"):
        for erase in [False, True] * 4:
            save(store, "chat")
            store.delete_namespace("", erase=erase)
            store.flush()
            assert not store.session("chat").exists


@contextlib.contextmanager
def resumed_all_the_time(store: KVStore, name: str) -> Iterator[None]:
    """A context in which another thread resumes a session again and again."""
    ended = threading.Event()

    def resume() -> None:
        while not ended.is_set():
            store.session(name).resume()

    resuming = threading.Thread(target=resume)
    resuming.start()
    try:
        yield
    finally:
        ended.set()
        resuming.join()


# ---- in the catalog ------------------------------------------------------------------------------------------------


def notes(path: Path) -> dict[bytes, bytes]:
    """Keys and values of the closed catalog's notes."""
    with lmdb.open(str(path / "catalog"), max_dbs=8, readonly=True) as env, env.begin() as txn:
        database = env.open_db(b"tasks", txn=txn, create=False)
        return {key: value for key, value in txn.cursor(database) if key[:1] == b"\0"}


def test_a_session_that_was_only_saved_has_no_note(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, "chat")
        save(store, "other", metadata=FACTS)
        store.session("other").delete()
    assert notes(tmp_path) == {}


def test_a_note_that_an_older_program_left_is_nobodys_and_goes(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for name in ("gone", "again", "kept"):
            save(store, name, metadata=FACTS)
            store.session(name).resume()
    assert len(notes(tmp_path)) == 3
    key = namespace_digest(b"")[:16]
    with lmdb.open(str(tmp_path / "catalog"), max_dbs=8, map_size=64 * MIB) as env, env.begin(write=True) as txn:
        database = env.open_db(b"sessions", txn=txn, create=False)
        txn.delete(key + b"gone", db=database)
        value = bytearray(txn.get(key + b"again", db=database))
        value[16] ^= 1  # it was made anew at another time
        import xxhash

        value[:8] = xxhash.xxh3_64_intdigest(bytes(value[8:])).to_bytes(8, "little")
        txn.put(key + b"again", bytes(value), db=database)
    with open_store(tmp_path) as store:
        rows = {row.id: (row.hits, row.metadata) for row in store.sessions()}
        assert rows == {"again": (0, {}), "kept": (1, FACTS)}
        save(store, "new")
        store.flush()
        assert [problem for problem in store.check().problems if "noted" in problem] == []
    assert set(notes(tmp_path)) == {b"\0" + key + b"again", b"\0" + key + b"kept"}


def test_a_note_with_hostile_bytes_is_ignored_and_reported(tmp_path: Path) -> None:
    import xxhash

    with open_store(tmp_path) as store:
        save(store, "chat", metadata=FACTS)
    key = b"\0" + namespace_digest(b"")[:16] + b"chat"
    with lmdb.open(str(tmp_path / "catalog"), max_dbs=8, map_size=64 * MIB) as env, env.begin(write=True) as txn:
        body = bytes(24) + b"\xc1hostile"
        value = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body
        txn.put(key, value, db=env.open_db(b"tasks", txn=txn, create=False))
    with open_store(tmp_path) as store:
        (row,) = store.sessions()
        assert (row.tokens, row.hits, row.metadata) == (20, 0, {})
        assert store.check().problems == ("session b'chat': what is noted beside it is damaged",)
        save(store, "chat", metadata={"turn": 1})
        store.flush()
        assert store.check().problems == ()


def test_a_rebuilt_catalog_keeps_them(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, "chat", metadata=FACTS)
        store.session("chat").resume()
    lose_meta_pages(tmp_path)
    with open_store(tmp_path) as store:
        assert store.stats()["counters"]["catalog_rebuilt"] == 1
        (row,) = store.sessions()
        assert (row.tokens, row.hits, row.metadata) == (20, 1, FACTS)
        assert store.check(deep=True).problems == ()


def test_metadata_counts_in_the_budget_of_sessions(tmp_path: Path) -> None:
    with open_store(tmp_path, session_bytes=64 << 10) as store:
        for number in range(40):
            save(store, f"s{number}", 3, metadata={"a": b"x" * 4000})
        store.flush()
        stats = store.stats()
        assert stats["sessions"]["bytes"] <= 64 << 10
        assert stats["counters"]["evicted_sessions"] >= 28
        assert store.check().problems == ()


def test_erased_metadata_is_in_no_file(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, "chat", metadata={"user": "a-name-to-forget"})
        save(store, "other", 5)
        store.flush()
        store.session("chat").delete(erase=True)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"a-name-to-forget" not in file.read_bytes()


def counted(store: KVStore) -> tuple[int, int]:
    """How many sessions the store says it has: of all, and by namespace."""
    stats = store.stats()
    return stats["sessions"]["sessions"], sum(row["sessions"] for row in stats["namespaces"].values())


def test_a_session_that_is_changed_counts_once_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        for name in ("a", "b", "c"):
            save(store, name)
        store.flush()
        assert counted(store) == (3, 3)
        monkeypatch.setattr(SessionTable, "written", lambda table, changes: 0)  # as if they were never written
        save(store, "a")
        assert store.session("b").resume() is not None
        assert counted(store) == (3, 3)
        store.session("c").delete()
        store.session("nobody").delete()
        assert counted(store) == (2, 2)
        save(store, "d")
        assert counted(store) == (3, 3)
        store.flush()  # the catalog has all of it now, and what was changed is known beside it
        assert counted(store) == (3, 3)
        monkeypatch.undo()


def test_counting_sessions_reads_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        for name in map(str, range(20)):
            save(store, name)
        store.flush()
        save(store, "7")

        def refuse(*_: object) -> None:
            raise AssertionError("the whole catalog was read")

        monkeypatch.setattr(Catalog, "sessions", refuse)
        monkeypatch.setattr(SavedSessions, "heads", refuse)
        assert store.stats()["sessions"]["sessions"] == 20
