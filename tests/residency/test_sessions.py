"""Sessions: a name for a sequence that goes on after eviction, close and restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from durable import lose_meta_pages
from kvcases import SMALL, GatedFS, kv_of, open_store, same_kv, tokens

from kvstore import KVStore, TierConfig
from kvstore.config import MIB


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path) as opened:
        yield opened


def save(store: KVStore, name: str, ids: np.ndarray, **settings):
    return store.session(name).save(ids, kv_of(ids), **settings)


def resumes(store: KVStore, name: str, ids: np.ndarray) -> bool:
    hit = store.session(name).resume()
    return hit is not None and hit.tokens == len(ids) and same_kv(hit.layers, kv_of(ids))


def names(store: KVStore) -> list[str]:
    return [info.id for info in store.sessions()]


def test_a_saved_session_is_resumed(store: KVStore) -> None:
    result = save(store, "chat", tokens(20))
    assert (result.tokens, result.new_blocks) == (20, 3)
    assert resumes(store, "chat", tokens(20))
    assert store.session("chat").tokens.tolist() == tokens(20).tolist()


def test_a_session_that_does_not_exist_is_empty(store: KVStore) -> None:
    session = store.session("nobody")
    assert not session.exists
    assert session.resume() is None
    assert session.tokens.tolist() == []
    assert session.tokens.dtype == np.uint32
    assert not session.delete()
    with pytest.raises(KeyError, match="'nobody' does not exist; save it first"):
        session.fork("other")


def test_a_handle_alone_makes_no_session(store: KVStore) -> None:
    store.session("chat")
    assert store.sessions() == []


def test_saving_again_goes_on(store: KVStore) -> None:
    ids = tokens(40)
    save(store, "chat", ids[:20])
    assert save(store, "chat", ids).new_blocks == 3  # the tail of 4 became a block
    assert resumes(store, "chat", ids)
    assert names(store) == ["chat"]


def test_saving_something_else_replaces_the_tokens(store: KVStore) -> None:
    save(store, "chat", tokens(20))
    save(store, "chat", tokens(9, seed=1))
    assert resumes(store, "chat", tokens(9, seed=1))
    assert store.contains(tokens(20)) == 20


def test_max_tokens_resumes_a_part(store: KVStore) -> None:
    save(store, "chat", tokens(20))
    hit = store.session("chat").resume(max_tokens=11)
    assert hit.tokens == 11
    assert same_kv(hit.layers, kv_of(tokens(11)))


def test_two_handles_are_one_session(store: KVStore) -> None:
    first, second = store.session("chat"), store.session("chat")
    first.save(tokens(9), kv_of(tokens(9)))
    assert second.resume().tokens == 9
    second.delete()
    assert first.resume() is None


def test_sessions_of_the_same_prompt_share_its_blocks(store: KVStore) -> None:
    one, two = tokens(24), tokens(24)
    two[16:] = tokens(8, seed=5)
    save(store, "one", one)
    assert save(store, "two", two).new_blocks == 1
    assert resumes(store, "one", one)
    assert resumes(store, "two", two)


def test_namespaces_have_sessions_of_their_own(store: KVStore) -> None:
    store.session("chat", namespace=b"a").save(tokens(9), kv_of(tokens(9)))
    assert store.session("chat").resume() is None
    assert store.session("chat", namespace=b"a").resume().tokens == 9
    store.session("chat", namespace=b"b").save(tokens(4), kv_of(tokens(4)))
    assert sorted((info.id, info.tokens) for info in store.sessions()) == [("chat", 4), ("chat", 9)]


def test_a_session_does_not_follow_the_callers_array(store: KVStore) -> None:
    ids = tokens(9)
    store.session("chat").save(ids, kv_of(ids))
    ids[:] = 0
    assert resumes(store, "chat", tokens(9))


def test_what_a_session_hands_out_cannot_change_it(store: KVStore) -> None:
    save(store, "chat", tokens(9))
    handed = store.session("chat").tokens
    with pytest.raises(ValueError, match="read-only"):
        handed[0] = 7
    store.flush()
    with pytest.raises(ValueError, match="read-only"):
        store.session("chat").tokens[0] = 7
    assert resumes(store, "chat", tokens(9))


# ---- fork and delete ---------------------------------------------------------------------------------------------


def test_a_fork_starts_from_the_same_tokens_and_goes_its_own_way(store: KVStore) -> None:
    ids = tokens(20)
    save(store, "main", ids)
    fork = store.session("main").fork("branch")
    assert fork.id == "branch"
    assert resumes(store, "branch", ids)
    longer = np.concatenate([ids, tokens(9, seed=3)])
    fork.save(longer, kv_of(longer))
    assert resumes(store, "main", ids)
    assert resumes(store, "branch", longer)
    store.session("main").delete()
    assert resumes(store, "branch", longer)


def test_a_fork_stores_nothing(store: KVStore) -> None:
    save(store, "main", tokens(20))
    store.flush()
    before = store.stats()["disk"]["records"]
    store.session("main").fork("branch")
    store.flush()
    assert store.stats()["disk"]["records"] == before


def test_a_fork_keeps_its_namespace(store: KVStore) -> None:
    session = store.session("main", namespace=b"a")
    session.save(tokens(9), kv_of(tokens(9)))
    assert session.fork("branch").resume().tokens == 9
    assert store.session("branch", namespace=b"a").exists
    assert not store.session("branch").exists


def test_deleting_forgets_the_session_and_keeps_the_blocks(store: KVStore) -> None:
    save(store, "chat", tokens(20))
    assert store.session("chat").delete()
    assert store.sessions() == []
    assert store.session("chat").resume() is None
    assert store.contains(tokens(20)) == 20
    assert not store.session("chat").delete()


def test_a_deleted_session_can_be_saved_again(store: KVStore) -> None:
    save(store, "chat", tokens(20))
    store.session("chat").delete()
    save(store, "chat", tokens(5))
    assert resumes(store, "chat", tokens(5))


def test_deleting_the_tokens_leaves_a_session_without_a_cache(store: KVStore) -> None:
    save(store, "chat", tokens(20))
    store.delete(store.session("chat").tokens)
    assert store.session("chat").resume() is None
    assert store.session("chat").tokens.tolist() == tokens(20).tolist()


# ---- the list ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock is ahead."""
    ahead, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    return ahead


def test_the_list_has_sizes_and_is_ordered_by_last_use(store: KVStore, clock: list[float]) -> None:
    for name, count in (("a", 20), ("b", 9), ("c", 3)):
        clock[0] += 10
        save(store, name, tokens(count, seed=count))
    assert names(store) == ["c", "b", "a"]
    assert [info.tokens for info in store.sessions()] == [3, 9, 20]
    assert [info.bytes for info in store.sessions()] == [n * SMALL.bytes_per_token for n in (3, 9, 20)]
    clock[0] += 10
    store.session("a").resume()
    assert names(store) == ["a", "c", "b"]
    clock[0] += 10
    store.session("b").fork("d")
    assert names(store)[0] == "d"
    uses = [info.last_use for info in store.sessions()]
    assert uses == sorted(uses, reverse=True)


def test_the_order_survives_a_restart(tmp_path: Path, clock: list[float]) -> None:
    with open_store(tmp_path) as store:
        for name in ("a", "b", "c"):
            clock[0] += 10
            save(store, name, tokens(5))
        clock[0] += 10
        store.session("a").resume()
    with open_store(tmp_path) as store:
        assert names(store) == ["a", "c", "b"]


# ---- durability --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [True, False])
def test_a_session_survives_a_restart(tmp_path: Path, flushed: bool) -> None:
    with open_store(tmp_path) as store:
        save(store, "chat", tokens(20))
        if flushed:
            store.flush()
    with open_store(tmp_path) as store:
        assert names(store) == ["chat"]
        assert resumes(store, "chat", tokens(20))


def test_a_deletion_survives_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, "chat", tokens(20))
        store.flush()
        store.session("chat").delete()
    with open_store(tmp_path) as store:
        assert store.sessions() == []


def test_many_changes_in_one_group_leave_the_last_one(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs) as store:
        fs.shut()
        for count in (3, 9, 20, 5):
            save(store, "chat", tokens(count))
        store.session("gone").save(tokens(3), kv_of(tokens(3)))
        store.session("gone").delete()
        assert store.session("chat").tokens.tolist() == tokens(5).tolist()
        fs.gate.set()
        store.flush()
        assert store.session("chat").tokens.tolist() == tokens(5).tolist()
    with open_store(tmp_path) as store:
        assert names(store) == ["chat"]
        assert resumes(store, "chat", tokens(5))


def test_a_change_after_a_restart_is_newer_than_all_before(tmp_path: Path) -> None:
    for count in (3, 9, 5):
        with open_store(tmp_path) as store:
            save(store, "chat", tokens(count))
    with open_store(tmp_path) as store:
        assert store.session("chat").tokens.tolist() == tokens(5).tolist()


def test_sessions_survive_a_catalog_that_has_to_be_rebuilt(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(30):
            save(store, f"s{number}", tokens(5 + number, seed=number))
    lose_meta_pages(tmp_path)
    with open_store(tmp_path) as store:
        assert store.stats()["counters"]["catalog_rebuilt_sessions"] == 30
        assert sorted(names(store)) == sorted(f"s{number}" for number in range(30))
        assert all(resumes(store, f"s{number}", tokens(5 + number, seed=number)) for number in range(30))


def test_a_session_survives_eviction_from_device_and_host(tmp_path: Path) -> None:
    room = 16 * SMALL.bytes_per_token
    with open_store(tmp_path, device=TierConfig(room, "raw"), host=TierConfig(3 * 4096, "raw")) as store:
        save(store, "chat", tokens(20))
        for seed in range(1, 30):
            store.put(tokens(20, seed), kv_of(tokens(20, seed)))
        store.flush()
        hit = store.session("chat").resume()
        assert hit.tiers == {"disk": 20}
        assert same_kv(hit.layers, kv_of(tokens(20)))


def test_the_tokens_of_a_session_outlive_its_blocks(tmp_path: Path) -> None:
    with open_store(tmp_path, host=TierConfig(0), disk=TierConfig(8 * 65536, "raw")) as store:
        save(store, "chat", tokens(20))
        for seed in range(1, 60):
            store.put(tokens(20, seed), kv_of(tokens(20, seed)))
        store.flush()
        assert store.session("chat").resume() is None
        assert store.session("chat").tokens.tolist() == tokens(20).tolist()
        assert names(store) == ["chat"]


def test_a_store_in_memory_has_sessions_while_it_is_open(tmp_path: Path) -> None:
    with open_store(tmp_path / "none", disk=TierConfig(0), host=TierConfig(1 * MIB, "raw")) as store:
        save(store, "chat", tokens(20))
        store.flush()
        assert resumes(store, "chat", tokens(20))
        assert names(store) == ["chat"]
        store.session("chat").fork("other")
        store.session("chat").delete()
        assert names(store) == ["other"]


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "x" * 400, "é" * 200, "with spaces and / . \0", "会话"])
def test_any_text_is_a_name(tmp_path: Path, name: str) -> None:
    with open_store(tmp_path) as store:
        save(store, name, tokens(3))
    with open_store(tmp_path) as store:
        assert names(store) == [name]
        assert resumes(store, name, tokens(3))


@pytest.mark.parametrize("name", ["", "x" * 401, "é" * 201, "\ud800", b"bytes", None, 5])
def test_anything_else_is_refused(store: KVStore, name: object) -> None:
    with pytest.raises(ValueError, match="session"):
        store.session(name)


def test_a_save_that_is_refused_changes_nothing(store: KVStore) -> None:
    save(store, "chat", tokens(9))
    with pytest.raises(ValueError, match="kv has 2 layers"):
        store.session("chat").save(tokens(20), kv_of(tokens(20))[:2])
    assert resumes(store, "chat", tokens(9))
    assert store.contains(tokens(20)) == 9
