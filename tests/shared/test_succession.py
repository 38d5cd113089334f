"""The owner of a shared store ends, is killed, or is stopped: another process takes its place, and loses nothing."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import seeds
from length import FULL
from shared_child import Child, children, owner_of
from small_stores import IDENTITY, config, kv_of, stored, tokens_of
from threadruns import HANGS_S

from kvstore import SharedKVStore, WriterSilent
from kvstore.shared import link as link_module
from kvstore.shared.promised import Promised

KILLS = 50 if FULL else 4


@pytest.mark.faults
def test_owners_that_are_killed_lose_nothing_that_was_flushed(tmp_path: Path) -> None:
    chance = random.Random(seeds.SEED)
    flushed, number = list[int](), 0
    with children(tmp_path, 3, disk=32 << 20) as found:  # nothing is evicted
        begun = list[Child]()
        for _ in range(KILLS):
            owner = owner_of(found)
            before, begun = begun, list[Child]()
            for child in found:
                number += 1
                child.ask("put", number, 10)
                # 8: the owner that was killed took what this child had begun to put, and did not write it
                assert child.ask("flush") in (0, 8 if child in before else 0)
                flushed.append(number)
                if child is not owner and chance.random() < 0.7:
                    number += 1
                    child.begin("put", number, 30)
                    begun.append(child)
            owner.kill()
            for child in begun:
                assert child.answer() in (0, 8)  # 0: the old owner wrote it, and died before it said so
            found.remove(owner)
            owner.end()
            # Whoever changes something next is the owner.
            found[chance.randrange(2)].ask("put", number + 1000, 5)
            owner_of(found)
            for child in found:
                assert [n for n in flushed[-12:] if child.ask("get", n, 10) != 10] == []
            found.append(Child(tmp_path, {"disk": 32 << 20}))
        assert all(found[-1].ask("get", n, 10) == 10 for n in flushed)
        assert [child.ask("check") for child in found] == [()] * 3


def test_an_owner_that_closes_hands_over(tmp_path: Path) -> None:
    with children(tmp_path, 2) as [owner, other]:
        owner.ask("put", 1, 10)
        assert owner.ask("close") == 0
        assert other.ask("get", 1, 10) == 10
        assert not other.ask("owns")
        assert other.ask("put", 2, 10) == 3
        assert other.ask("owns")


def test_a_flush_says_what_an_owner_lost(tmp_path: Path) -> None:
    """The owner is stopped before it can write, and killed."""
    with children(tmp_path, 1, group_bytes=1 << 20) as [owner], SharedKVStore(tmp_path, IDENTITY, config()) as store:
        kept, lost = tokens_of(1, 10), tokens_of(2, 10)
        store.put(kept, kv_of(kept))
        assert store.flush().dropped_blocks == 0
        store._promised.add(lost, b"", 3)  # as a put that the owner answered, and did not write
        owner.kill()
        assert store.flush().dropped_blocks == 3
        assert store.owns
        assert store.flush().dropped_blocks == 0
        assert stored(store, kept) == 10
        assert store.contains(lost) == 0


def test_an_owner_that_is_stopped_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_ASK_S", 0.2)
    tokens = tokens_of(1, 10)
    with children(tmp_path, 1) as [owner], SharedKVStore(tmp_path, IDENTITY, config()) as store:
        store.put(tokens, kv_of(tokens))
        store.flush()
        link = store._role.link
        assert link is not None
        link._timeout_s = 0.2
        owner.signal(signal.SIGSTOP)
        try:
            with pytest.raises(WriterSilent, match="did not answer a put"):
                store.put(tokens_of(2, 10), kv_of(tokens_of(2, 10)))
            for call in (store.flush, store.compact, lambda: store.delete(tokens_of(2, 10))):
                with pytest.raises(WriterSilent, match="did not answer"):
                    call()
            assert stored(store, tokens) == 10  # type: ignore[arg-type]
        finally:
            owner.signal(signal.SIGCONT)
        link._timeout_s = HANGS_S
        assert store.put(tokens_of(3, 10), kv_of(tokens_of(3, 10))).new_blocks == 3
        assert not store.owns


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("call", ["put", "save"])
def test_a_put_whose_caller_gave_up_is_not_made_of_what_its_memory_holds_later(
    tmp_path: Path, call: str, readable: bool
) -> None:
    """The owner reads the message when the caller's tensors are the caller's again."""
    tokens, other = tokens_of(2, 10), tokens_of(3, 10)
    with children(tmp_path, 1) as [owner], SharedKVStore(tmp_path, IDENTITY, config()) as store:
        link = store._role.link
        assert link is not None
        link._timeout_s, link.is_readable = 0.2, readable
        owner.signal(signal.SIGSTOP)
        kv = kv_of(tokens)
        try:
            with pytest.raises(WriterSilent):
                store.put(tokens, kv) if call == "put" else store.session("a").save(tokens, kv)
            for k, v in kv:
                k.fill_(7)
                v.fill_(8)
        finally:
            owner.signal(signal.SIGCONT)
        link._timeout_s = HANGS_S
        store.put(other, kv_of(other))
        store.flush()
        assert stored(store, other) == 10  # type: ignore[arg-type]
        for _ in range(20):
            store.flush()
            assert stored(store, tokens) in (0, 10)  # type: ignore[arg-type]  # and of the right bits
        assert owner.ask("check") == ()


def test_promises_are_forgotten_by_a_flush_that_began_after_them() -> None:
    promised = Promised()
    for number in range(1500):
        promised.add(tokens_of(number, 2), b"", 1)
    last = promised.last
    promised.add(tokens_of(9999, 2), b"", 5)
    promised.flushed(last)
    promised.owner_died(lambda tokens, namespace: 0)
    assert (promised.take_lost(), promised.take_lost()) == (5, 0)


def test_more_promises_than_are_remembered_count_as_lost() -> None:
    promised = Promised()
    for number in range(1500):
        promised.add(tokens_of(number, 2), b"", 1)
    promised.flushed(100)  # of puts that are forgotten by now, and others are, too
    promised.owner_died(lambda tokens, namespace: len(tokens))
    assert promised.take_lost() == 476
