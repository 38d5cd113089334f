"""Several processes put to one store through its owner; each reads by itself."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import profile_stores
import pytest
import torch
import trials
from shared_child import children, owner_of
from small_stores import IDENTITY, SEGMENT, config, kv_of, stored, tokens_of
from threadruns import run_together

from kvstore import (
    ConfigError,
    KVStore,
    LayoutMismatch,
    MetadataError,
    SharedKVStore,
    StoreClosed,
    StoreLocked,
)
from kvstore.session import Session
from kvstore.shared.session import SharedSession
from kvstore.shared.shipment import Shipment
from kvstore.tiers import profiles


def shared(path: Path, **changes: object) -> SharedKVStore:
    return SharedKVStore(path, IDENTITY, config(**changes))  # type: ignore[arg-type]


def test_a_client_does_what_a_store_does(tmp_path: Path) -> None:
    tokens = tokens_of(1, 10)
    with children(tmp_path, 1) as [child]:
        with shared(tmp_path) as store:
            assert not store.owns
            assert store.stats()["shared"]["owner"] == 0
            done = store.put(tokens, kv_of(tokens), pin=True, ttl=1000, logprobs=np.full(10, -1.0))
            assert (done.tokens, done.new_blocks, done.pinned) == (10, 3, True)
            assert store.flush().dropped_blocks == 0
            assert stored(store, tokens) == child.ask("get", 1, 10) == store.contains(tokens) == 10  # type: ignore[arg-type]
            assert tokens in store
            assert len(store) == 3
            assert store.inventory().sequences
            assert store.unpin(tokens)
            assert not store.unpin(tokens)
            assert store.touch(tokens_of(1, 10)) == 10
            assert store.explain(tokens).tokens == 10
            assert store.prefetch(tokens).result() == 10
            assert store.compact().moved_records == 0
            assert [len(group.members) for group in store.clusters()] == [1]
            with pytest.raises(ConfigError, match="learn"):
                store.learn()
            assert store.check(True).problems == ()
            assert store.delete(tokens) == 3
            assert store.get(tokens) is None
            assert store.contains(tokens) == 0
        with pytest.raises(StoreClosed):
            store.put(tokens, kv_of(tokens))


def test_namespaces_are_text_or_bytes_in_every_process(tmp_path: Path) -> None:
    tokens = tokens_of(1, 9)
    with children(tmp_path, 1), shared(tmp_path) as store:
        store.put(tokens, kv_of(tokens, b"a"), namespace="a")
        store.flush()
        assert stored(store, tokens, b"a") == 9
        assert store.get(tokens) is None
        digest = store.inventory().sequences[0].namespace
        assert store.contains(tokens, namespace=digest) == 9
        assert store.delete(tokens, namespace=digest, erase=True).removed_blocks == 3
        store.put(tokens, kv_of(tokens, b"a"), namespace=b"a")
        store.flush()
        assert store.delete_namespace("a") == 3
        assert store.contains(tokens, namespace="a") == 0


@pytest.mark.parametrize("readable", [True, False])
def test_puts_by_either_way_are_the_same(tmp_path: Path, readable: bool) -> None:
    """The owner reads the memory of the other, or gets sealed memory; also after larger puts used the same buffers."""
    with children(tmp_path, 1) as [child], shared(tmp_path) as store:
        assert store._role.link is not None
        assert store._role.link.is_readable, "this machine keeps processes of one user from reading each other"
        store._role.link.is_readable = readable
        for number, count in ((1, 40), (2, 9), (3, 33), (4, 1)):
            tokens = tokens_of(number, count)
            store.put(tokens, kv_of(tokens))
        store.flush()
        assert [child.ask("get", n, count) for n, count in ((1, 40), (2, 9), (3, 33), (4, 1))] == [40, 9, 33, 1]


def test_a_growing_sequence_sends_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[int]()
    of = Shipment.of
    monkeypatch.setattr(Shipment, "of", lambda cache, first: sent.append(first) or of(cache, first))
    tokens = tokens_of(1, 42)
    with children(tmp_path, 1) as [child], shared(tmp_path) as store:
        store.put(tokens[:18], kv_of(tokens[:18]))
        store.flush()
        store.put(tokens, kv_of(tokens))
        store.put(tokens[:42], kv_of(tokens))
        store.flush()
        assert sent[0] == 0
        assert sent[1] == 16
        assert child.ask("get", 1, 42) == 42 == stored(store, tokens)  # type: ignore[arg-type]


def test_a_put_sends_more_where_the_owner_lost_what_came_before(tmp_path: Path) -> None:
    tokens = tokens_of(1, 20)
    with children(tmp_path, 1) as [child], shared(tmp_path) as store:
        store.put(tokens[:16], kv_of(tokens[:16]))
        store.flush()
        assert store.contains(tokens) == 16
        assert child.ask("delete", 1, 16) == 4
        assert store.contains(tokens) == 16  # the reader believes it until it looks for a record
        assert store.put(tokens, kv_of(tokens)).new_blocks == 5
        store.flush()
        assert stored(store, tokens) == 20  # type: ignore[arg-type]


def test_the_end_of_a_cache_alone_is_stored_where_what_comes_before_is(tmp_path: Path) -> None:
    tokens, other = tokens_of(1, 20), tokens_of(2, 20)
    ends = {number: [(k[:, 8:], v[:, 8:]) for k, v in kv_of(ids)] for number, ids in ((1, tokens), (2, other))}
    with children(tmp_path, 1), shared(tmp_path) as client:
        client.put(tokens[:12], kv_of(tokens[:12]))
        client.flush()
        assert client.put(tokens, ends[1], start=8).new_blocks == 2
        refused = client.put(other, ends[2], start=8)
        assert (refused.new_blocks, refused.missing_from) == (0, 0)
        client.flush()
        assert (stored(client, tokens), client.contains(other)) == (20, 0)
    with shared(tmp_path) as owner:
        assert owner.put(other, ends[2], start=8).missing_from == 0
        assert owner.delete(tokens) == 5


def test_a_session_that_grows_sends_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[int]()
    of = Shipment.of
    monkeypatch.setattr(Shipment, "of", lambda cache, first: sent.append(first) or of(cache, first))
    tokens = tokens_of(1, 30)
    with children(tmp_path, 1), shared(tmp_path) as store:
        session = store.session("a")
        session.save(tokens[:17], kv_of(tokens[:17]), metadata={"turn": 1})
        store.flush()
        assert session.save(tokens, kv_of(tokens)).new_blocks == 4
        store.flush()
        assert sent == [0, 16]
        assert (len(session.tokens), session.metadata) == (30, {"turn": 1})
        hit = session.resume()
        assert hit is not None
        assert hit.tokens == 30
        more = tokens_of(1, 40)
        for then, wanted in ([50, 51], 42), (None, 40):
            assert session.save(more, kv_of(more), then=then).tokens == 40
            assert session.tokens.tolist() == [*more.tolist(), *(then or [])]
            assert len(session.tokens) == wanted


def test_every_call_of_a_store_is_there() -> None:
    """But `learning`, which is of the owner's thread."""
    for ours, theirs, left in (
        (SharedKVStore, KVStore, {"learning"}),
        (SharedSession, Session, set()),
    ):
        assert {name for name in dir(theirs) if name[0] != "_"} - {name for name in dir(ours) if name[0] != "_"} == left
    for name in ("put", "get", "contains", "delete", "flush", "touch", "session"):
        wanted = inspect.signature(getattr(KVStore, name)).parameters
        assert list(inspect.signature(getattr(SharedKVStore, name)).parameters) == list(wanted)


def test_sessions(tmp_path: Path) -> None:
    tokens = tokens_of(3, 11)
    with children(tmp_path, 1), shared(tmp_path) as store:
        session = store.session("ann", namespace="n")
        assert not session.exists
        assert len(session.tokens) == 0
        assert session.metadata == {}
        assert session.resume() is None
        session.save(tokens, kv_of(tokens, b"n"), metadata={"": 1, "user": "ann"})
        store.flush()
        assert session.exists
        assert session.metadata == {"": 1, "user": "ann"}
        assert session.tokens.tolist() == tokens.tolist()
        hit = session.resume(max_tokens=6)
        assert hit is not None
        assert hit.tokens == 6
        fork = session.fork("bob")
        assert fork.exists
        assert fork.point_to(tokens[:5], metadata={"x": b"y"}) == 5
        assert fork.metadata == {"x": b"y"}
        with pytest.raises(KeyError, match="does not exist"):
            store.session("nobody").fork("x")
        with pytest.raises(MetadataError):
            session.save(tokens, kv_of(tokens, b"n"), metadata={"user": "x" * 5000})
        assert session.delete(blocks=True, erase=True).sessions == ()
        assert fork.delete()
        assert not fork.exists
        assert not fork.delete()
        store.flush()
        assert [row.id for row in store.sessions()] == []


def test_a_session_that_grew_is_durable_with_its_blocks(tmp_path: Path) -> None:
    tokens = tokens_of(1, 30)
    with children(tmp_path, 1, durability="put") as [owner], shared(tmp_path) as store:
        store.put(tokens[:16], kv_of(tokens[:16]))
        assert store.contains(tokens) == 16
        store.session("ann").save(tokens, kv_of(tokens), then=[5])
        owner.kill()
    with open_store_again(tmp_path) as again:
        assert again.contains(tokens) == 30
        assert again.session("ann").tokens.tolist() == [*tokens.tolist(), 5]


def test_a_session_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    tokens = tokens_of(1, 2000)
    with children(tmp_path, 1, session_bytes=3000), shared(tmp_path, session_bytes=3000) as store:
        store.put(tokens[:40], kv_of(tokens[:40]))
        store.flush()
        with pytest.raises(ConfigError):
            store.session("ann").save(tokens, kv_of(tokens))
        store.flush()
        assert (store.contains(tokens), store.session("ann").exists) == (40, False)


def test_a_session_stands_for_no_tokens_whose_beginning_left(tmp_path: Path) -> None:
    tokens = tokens_of(1, 20)
    with children(tmp_path, 1) as [child], shared(tmp_path) as store:
        store.put(tokens[:16], kv_of(tokens[:16]))
        store.flush()
        assert store.contains(tokens) == 16
        assert child.ask("delete", 1, 16) == 4
        assert store.contains(tokens) == 16  # the reader believes it until it looks for a record
        assert store.session("ann").save(tokens, kv_of(tokens)).new_blocks == 5
        store.flush()
        assert stored(store, tokens) == 20 == len(store.session("ann").tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("erase", [False, True])
def test_the_cache_of_a_deleted_session_is_found_here_no_more(tmp_path: Path, erase: bool) -> None:
    tokens, other = tokens_of(1, 20), np.concatenate([tokens_of(1, 20)[:8], tokens_of(2, 8)])
    with children(tmp_path, 1), shared(tmp_path, host=1 << 20) as store:
        for name, ids in (("ann", tokens), ("bob", other)):
            store.session(name).save(ids, kv_of(ids))
        store.flush()
        for _ in range(5):  # the host tier of this process takes them in
            assert (stored(store, tokens), stored(store, other)) == (20, 16)  # type: ignore[arg-type]
        assert store.session("ann").delete(blocks=True, erase=erase)
        assert store.contains(tokens) == stored(store, tokens) == 8  # type: ignore[arg-type]  # what bob shares
        assert stored(store, other) == 16  # type: ignore[arg-type]


def test_arguments_mean_what_they_mean_to_a_store(tmp_path: Path) -> None:
    tokens = tokens_of(1, 8)
    with children(tmp_path, 1), shared(tmp_path) as store:
        assert store.put(tokens, kv_of(tokens), pin=np.bool_(True)).pinned
        assert store.delete(tokens, erase=np.bool_(True)).removed_blocks == 2
        assert store.compact(move=np.bool_(False)).moved_records == 0
        with pytest.raises(ValueError, match="ttl"):
            store.put(tokens, kv_of(tokens), ttl=np.float32(5))
        for session in ({"name": ""}, {"name": 5}, {"name": "a", "namespace": 5}):
            with pytest.raises(ValueError):
                store.session(**session)
        with pytest.raises(ValueError, match="plain values"):
            store._change("touch", tokens=object())


def test_arguments_are_checked_before_anything_is_sent(tmp_path: Path) -> None:
    tokens = tokens_of(1, 4)
    with children(tmp_path, 1) as [child], shared(tmp_path) as store:
        with pytest.raises(LayoutMismatch):
            store.put(tokens, kv_of(tokens)[:1])
        for wrong in ({"ttl": -1}, {"namespace": 5}, {"logprobs": [0.0]}, {"logprobs": "x"}):
            with pytest.raises(ValueError):
                store.put(tokens, kv_of(tokens), **wrong)
        with pytest.raises(ValueError):
            store.put([-1], kv_of(tokens[:1]))
        assert len(store) == 0
        assert child.ask("check") == ()


def test_a_store_without_a_disk_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk\.bytes"):
        shared(tmp_path, disk=0)


def test_a_store_that_a_program_does_not_share_is_locked(tmp_path: Path) -> None:
    with KVStore(tmp_path, IDENTITY, config()), pytest.raises(StoreLocked, match="SharedKVStore"):
        SharedKVStore(tmp_path, IDENTITY, config(), wait_s=0.0)


def test_an_owner_may_be_the_only_one(tmp_path: Path) -> None:
    tokens = tokens_of(1, 10)
    with shared(tmp_path) as store:
        assert store.owns
        assert store.put(tokens, kv_of(tokens)).new_blocks == 3
        session = store.session("a")
        session.save(tokens, kv_of(tokens), then=[7], metadata={"a": 1})
        assert session.metadata == {"a": 1}
        assert session.tokens.tolist() == [*tokens.tolist(), 7]
        assert stored(store, tokens) == 10
        assert store.close().dropped_blocks == 0 == store.close().dropped_blocks
    with open_store_again(tmp_path) as again:
        assert again.contains(tokens) == 10
        assert [row.id for row in again.sessions()] == ["a"]


def open_store_again(path: Path) -> KVStore:
    return KVStore(path, IDENTITY, config())


def test_threads_of_one_process_put_and_get_at_once(tmp_path: Path) -> None:
    with children(tmp_path, 1), shared(tmp_path) as store:

        def work(number: int) -> None:
            for i in range(5):
                tokens = tokens_of(10 * number + i, 12)
                store.put(tokens, kv_of(tokens))
                assert stored(store, tokens) in (0, 12)  # type: ignore[arg-type]

        run_together(*(lambda number=number: work(number) for number in range(4)))  # type: ignore[misc]
        assert store.flush().dropped_blocks == 0
        assert all(stored(store, tokens_of(10 * number + i, 12)) == 12 for number in range(4) for i in range(5))  # type: ignore[arg-type]


def test_processes_put_and_get_at_once(tmp_path: Path) -> None:
    with children(tmp_path, 3) as found:
        owner_of(found)
        for round_ in range(4):
            for number, child in enumerate(found):
                child.begin("put", 100 * number + round_, 10)
            assert [child.answer() for child in found] == [3] * 3
        assert [child.ask("flush") for child in found] == [0] * 3
        for child in found:
            assert [child.ask("get", 100 * number + i, 10) for number in range(3) for i in range(4)] == [10] * 12
        assert [child.ask("check") for child in found] == [()] * 3


def test_tensors_of_a_larger_cache_with_reserved_space_and_states_are_sent(tmp_path: Path) -> None:
    """Heads that do not lie behind each other, as in a cache that grows in reserved space."""
    tokens = tokens_of(5, 10)
    wide = [tuple(torch.cat([x, torch.full_like(x, 7.0)], 1)[:, :10] for x in pair) for pair in kv_of(tokens)]
    with children(tmp_path, 1) as [child], shared(tmp_path) as store:
        store.put(tokens, wide)
        store.flush()
        assert child.ask("get", 5, 10) == 10


def test_a_forked_child_opens_it_anew(tmp_path: Path) -> None:
    with children(tmp_path, 2) as [owner, other]:
        for child in (owner, other):
            assert child.ask("fork") == "StoreForked"
            assert child.ask("put", 1, 10) + child.ask("put", 2, 10) in (6, 0)  # the parent goes on
        assert owner.ask("owns")
        assert other.ask("flush") == 0
        assert other.ask("get", 2, 10) == 10


def test_a_child_that_lives_on_keeps_nobody_from_owning_the_store(tmp_path: Path) -> None:
    """It has the descriptors of its parent, who is killed."""
    with children(tmp_path, 2) as [owner, other]:
        assert other.ask("put", 1, 10) == 3
        pid = owner.ask("fork and stay")
        try:
            owner.kill()
            assert other.ask("put", 2, 10) == 3
            assert other.ask("owns")
        finally:
            os.kill(pid, signal.SIGKILL)


_FORKS = """
import os, sys
import small_stores
from kvstore import SharedKVStore

store = SharedKVStore(sys.argv[1], small_stores.IDENTITY, small_stores.config())
pid = os.fork()
if pid == 0:
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_child_that_ends_leaves_its_parents_store_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env=trials.environment(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_put_replaces_what_no_process_can_decode(tmp_path: Path) -> None:
    path, tokens = tmp_path / "store", profile_stores.tokens_of(1, 3 * 64)
    with profile_stores.open_store(path, profile_stores.save(0, tmp_path)) as filled:
        filled.put(tokens, profile_stores.kv_of(tokens))
    shutil.rmtree(path / profiles.FOLDER)
    settings = {"disk": 1024 * SEGMENT, "codec": "entropy", "block_tokens": 64}
    with children(path, 1, **settings), shared(path, **settings) as client:
        assert not client.owns
        assert client.put(tokens, profile_stores.kv_of(tokens)).new_tokens == 0  # nobody has read it yet
        assert client.get(tokens) is None
        assert client.put(tokens, profile_stores.kv_of(tokens)).new_tokens == len(tokens)
        client.flush()
        assert profile_stores.stored(client, tokens) == len(tokens)  # type: ignore[arg-type]
        assert client.put(tokens, profile_stores.kv_of(tokens)).new_tokens == 0
        assert client.check(deep=True).problems == ()
