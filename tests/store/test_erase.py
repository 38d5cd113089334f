"""Finding 14: what was erased is in no file of the store any more, wherever it had been before."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_stores
import numpy as np
import pytest
import small_stores
from faultfs import Fault, FaultFS
from small_stores import all_is_well, kv_of, put, stored, tokens_of

from kvstore import EraseResult, KVStore
from kvstore.core.keys import namespace_digest
from kvstore.errors import DiskError
from kvstore.tiers.disk import erase as erase_module
from kvstore.tiers.disk.fs import FileSystem

RUN = 3  # tokens: so many in a row are there by chance once in 2^96


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with opened(tmp_path) as store:
        yield store


def opened(path: Path, **settings: Any) -> KVStore:
    return KVStore(path / "store", small_stores.IDENTITY, small_stores.config(**settings))


def found(path: Path, tokens: np.ndarray) -> list[str]:
    """Where any run of the tokens, or any row of their keys and values, still is."""
    data = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    wanted = {tokens[i : i + RUN].tobytes() for i in range(0, len(tokens) - RUN + 1, 5)}
    rows = [t[0].view(dtype=small_stores.torch.int16).numpy() for pair in kv_of(tokens) for t in pair]
    wanted |= {row[i : i + 2].tobytes() for row in rows for i in range(0, len(tokens) - 1, 5)}
    return [f"{file.name} at {raw.find(run)}" for file, raw in data.items() for run in wanted if run in raw]


def save(store: KVStore, name: str, tokens: np.ndarray, **how: Any) -> None:
    store.session(name).save(tokens, kv_of(tokens), **how)


def test_the_search_finds_what_is_only_deleted(store: KVStore, tmp_path: Path) -> None:
    """The positive control of everything below."""
    secret = tokens_of(1, 300)
    save(store, "secret", secret)
    store.flush()
    store.delete(secret)
    store.session("secret").delete()
    store.flush()
    store.close()
    places = {place.split()[0] for place in found(tmp_path, secret)}
    assert places >= {"data.mdb", "00000001.seg"}


def test_an_erased_session_is_in_no_file(store: KVStore, tmp_path: Path) -> None:
    secret, other = tokens_of(1, 300), tokens_of(2, 300)
    save(store, "secret", secret)
    save(store, "other", other)
    store.flush()
    result = store.session("secret").delete(blocks=True, erase=True)
    assert result == EraseResult(removed_blocks=75)
    assert found(tmp_path, secret) == []
    assert b"secret" not in (tmp_path / "store" / "catalog" / "data.mdb").read_bytes()
    assert found(tmp_path, other) != []
    for number in range(3, 9):  # what LMDB kept in memory does not come back
        put(store, tokens_of(number, 20))
        store.flush()
    assert found(tmp_path, secret) == []
    assert stored(store, other) == 300
    assert store.stats()["counters"]["erases"] == 1
    all_is_well(store, deep=True)
    store.close()
    assert found(tmp_path, secret) == []
    with opened(tmp_path) as again:
        assert stored(again, other) == 300
        assert again.contains(secret) == 0
        assert not again.session("secret").exists
        all_is_well(again, deep=True)


def test_tokens_are_erased_with_all_that_was_ever_stored_of_them(store: KVStore, tmp_path: Path) -> None:
    """Tails that were replaced, records that were moved or stored again, groups that are still queued."""
    secret = tokens_of(1, 97)
    for end in (5, 18, 19, 50, 97):
        put(store, secret[:end])
        put(store, tokens_of(100 + end, 9))
        store.flush()
    store.delete(secret)
    put(store, secret[:90])
    store.flush()
    put(store, secret)  # not flushed
    result = store.delete(secret, erase=True)
    assert (result.kept_tokens, result.kept_blocks, result.sessions) == (0, 0, ())
    assert result.removed_blocks == 25
    assert found(tmp_path, secret) == []
    assert all(stored(store, tokens_of(100 + end, 9)) == 9 for end in (5, 18, 19, 50, 97))
    all_is_well(store, deep=True)


def test_what_was_deleted_or_evicted_before_is_erased_too(tmp_path: Path) -> None:
    secret = tokens_of(1, 200)
    with opened(tmp_path, disk=4 * small_stores.SEGMENT, host=0) as store:
        put(store, secret)
        store.flush()
        for number in range(2, 60):
            put(store, tokens_of(number, 200))
        store.flush()
        assert store.contains(secret) < len(secret)
        store.delete(secret, erase=True)
        assert found(tmp_path, secret) == []
        all_is_well(store, deep=True)


def test_a_hole_is_erased_with_its_sequence(store: KVStore, tmp_path: Path) -> None:
    """The catalog keeps the tokens of a record that left the middle of a sequence."""
    secret, other = tokens_of(1, 40), np.concatenate([tokens_of(1, 20), tokens_of(2, 20)])
    put(store, secret)
    put(store, other)
    store.flush()
    residency = store._residency
    middle = residency.index.match(namespace_digest(b""), secret, touch=False).records.tolist()
    residency.quarantine(middle[2])
    residency.quarantine(middle[7])
    assert store.stats()["disk"]["holes"] == 2
    store.delete(secret, erase=True)
    assert found(tmp_path, secret[20:]) == []
    store.delete(other, erase=True)
    assert found(tmp_path, secret) == []
    assert store.stats()["disk"]["holes"] == 0
    all_is_well(store, deep=True)


def test_blocks_that_others_share_stay_and_are_said(store: KVStore, tmp_path: Path) -> None:
    prompt = tokens_of(1, 20)
    one, two = (np.concatenate([prompt, tokens_of(number, 30)]) for number in (2, 3))
    put(store, one)
    put(store, two)
    store.flush()
    result = store.delete(one, erase=True)
    assert result == EraseResult(removed_blocks=8, kept_tokens=20, kept_blocks=5)
    assert found(tmp_path, one[20:]) == []
    assert stored(store, two) == 50
    all_is_well(store, deep=True)


def test_a_sequence_that_is_not_stored_in_full_is_erased_as_far_as_it_is(store: KVStore, tmp_path: Path) -> None:
    secret = tokens_of(1, 40)
    put(store, secret[:30])
    store.flush()
    assert store.delete(secret) == 0
    assert store.delete(secret, erase=True).removed_blocks == 8
    assert found(tmp_path, secret) == []


def test_what_others_go_on_from_stays_when_the_rest_is_gone(store: KVStore) -> None:
    prompt = tokens_of(1, 20)
    put(store, np.concatenate([prompt, tokens_of(2, 30)]))
    store.flush()
    gone = np.concatenate([prompt, tokens_of(3, 30)])
    assert store.delete(gone, erase=True) == EraseResult(removed_blocks=0, kept_tokens=20, kept_blocks=5)


def test_other_sessions_keep_their_tokens_and_are_named(store: KVStore, tmp_path: Path) -> None:
    secret = tokens_of(1, 300)
    save(store, "one", secret)
    store.session("one").fork("two")
    store.flush()
    assert store.delete(secret, erase=True).sessions == ("one", "two")
    assert store.session("two").tokens.tolist() == secret.tolist()
    result = store.session("one").delete(blocks=True, erase=True)
    assert result.sessions == ("two",)
    store.session("two").delete(erase=True)
    assert found(tmp_path, secret) == []


def test_blocks_that_another_session_begins_with_stay(store: KVStore, tmp_path: Path) -> None:
    ids = tokens_of(1, 300)
    longer = np.concatenate([ids[:290], tokens_of(2, 30)])
    save(store, "one", ids)
    save(store, "two", longer)
    store.session("two").fork("three")
    store.flush()
    assert store.session("three").delete(blocks=True)
    assert stored(store, longer) == len(longer)
    result = store.session("one").delete(blocks=True, erase=True)
    assert (result.removed_blocks, result.kept_tokens) == (3, 290)
    assert found(tmp_path, ids[290:]) == []
    assert stored(store, longer) == len(longer)
    assert store.session("two").tokens.tolist() == longer.tolist()


def test_without_blocks_the_cache_stays(store: KVStore) -> None:
    ids = tokens_of(1, 30)
    save(store, "one", ids)
    store.flush()
    result = store.session("one").delete(erase=True)
    assert result == EraseResult(removed_blocks=0, kept_tokens=30, kept_blocks=8)
    assert not store.session("one").exists
    assert stored(store, ids) == 30
    assert store.session("nobody").delete(blocks=True, erase=True) == EraseResult(0)
    assert store.session("nobody").delete(blocks=True) is False


def test_a_namespace_is_erased_with_pins_and_sessions(store: KVStore, tmp_path: Path) -> None:
    ids, others = tokens_of(1, 300), tokens_of(2, 300)
    put(store, ids[:40], namespace=b"tenant", pin=True)
    store.session("chat", namespace=b"tenant").save(ids, kv_of(ids, b"tenant"))
    put(store, others)
    save(store, "chat", others)
    store.flush()
    secret = [ids[i : i + RUN].tobytes() for i in range(290)]
    result = store.delete_namespace(b"tenant", erase=True)
    assert result == EraseResult(removed_blocks=75)
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert not any(run in files for run in secret)
    assert store.contains(ids, namespace=b"tenant") == 0
    assert not store.session("chat", namespace=b"tenant").exists
    assert store.session("chat").tokens.tolist() == others.tolist()
    assert stored(store, others) == 300
    all_is_well(store, deep=True)
    put(store, ids, namespace=b"tenant")
    assert store.delete_namespace(b"tenant") == 75
    assert store.delete_namespace(b"never used") == 0
    all_is_well(store)


def test_members_of_an_erased_donor_live_on_without_it(tmp_path: Path) -> None:
    text = family_stores.passage(1)
    member = family_stores.behind(10, text)
    with KVStore(tmp_path / "store", family_stores.IDENTITY, family_stores.config()) as store:
        family_stores.put(store, text)
        store.flush()
        family_stores.put(store, member)
        store.flush()
        assert store.stats()["families"]["members"] > 0
        store.delete(text, erase=True)
        assert store.contains(text) == 0
        assert family_stores.stored(store, member) == len(member)
        all_is_well(store, deep=True)
        store.delete(member, erase=True)
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert not any(text[i : i + RUN].tobytes() in files for i in range(len(text) - RUN))


def test_what_explain_remembers_is_forgotten(store: KVStore) -> None:
    ids = tokens_of(1, 30)
    put(store, ids)
    store.flush()
    store.delete(ids)
    assert len(store._residency.departures) > 0
    store.delete(ids, erase=True)
    assert len(store._residency.departures) == 0


# ---- while others read, and where it ends early ------------------------------------------------------------------


def test_gets_go_on_while_another_sequence_is_erased(store: KVStore) -> None:
    kept = tokens_of(1, 120)
    put(store, kept)
    store.flush()
    done, wrong = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            if stored(store, kept) != len(kept) or not store.session("kept").exists:
                wrong.append(store.contains(kept))

    save(store, "kept", kept)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(2, 7):
        put(store, tokens_of(number, 60))
        store.delete(tokens_of(number, 60), erase=True)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    all_is_well(store, deep=True)


class Killed(BaseException):
    """What a process that is killed does not see."""


@pytest.mark.parametrize("step", ["begin", "remove", "renew", "segments", "pages", "end"])
def test_an_erase_that_is_cut_short_is_ended_by_the_next_open(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, other = tokens_of(1, 300), tokens_of(2, 40)
    store = opened(tmp_path)
    put(store, secret)
    put(store, other)
    store.flush()

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    disk: Any = store._residency.disk
    steps = {
        "begin": (disk.catalog, "begin_erase"),
        "remove": (disk, "remove"),
        "renew": (disk.catalog.environment, "renew"),
        "segments": (disk, "_zero_segments"),
        "pages": (erase_module, "zero_unused_pages"),
        "end": (disk.catalog, "end_erase"),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*steps[step], die)
        with pytest.raises(Killed):
            store.delete(secret, erase=True)
    store.close()
    with opened(tmp_path) as again:
        assert again.stats()["counters"].get("erases_resumed", 0) == (step != "begin")
        assert stored(again, secret) in ((300,) if step in ("begin", "remove") else (0,))
        assert stored(again, other) == 40
        if step not in ("begin", "remove"):
            assert found(tmp_path, secret) == []
        again.delete(secret, erase=True)
        assert found(tmp_path, secret) == []
        all_is_well(again, deep=True)
    with opened(tmp_path) as again:
        assert "erases_resumed" not in again.stats()["counters"]


@pytest.mark.parametrize("call", ["punch", "fdatasync", "pwritev", "preadv"])
def test_a_disk_that_refuses_is_told_and_the_next_erase_ends_it(tmp_path: Path, call: str) -> None:
    fs = FaultFS()
    secret = tokens_of(1, 300)
    with KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config(host=0), fs=fs) as store:
        put(store, secret)
        store.flush()
        fs.fault = Fault(call, 1, errno.EIO, sticky=True)
        with pytest.raises(
            DiskError, match=r"erase: everything is removed, but not overwritten yet .* erase again, or"
        ):
            store.delete(secret, erase=True)
        assert store.contains(secret) == 0
        fs.fault = None
        store.delete(secret, erase=True)
        assert found(tmp_path, secret) == []
        all_is_well(store)


class CatalogNotSynced(FaultFS):
    """The next sync of the catalog fails: what was written to it may never reach the disk, but reads as it should."""

    fails = False

    def fdatasync(self, fd: int) -> None:
        if self.fails and os.readlink(f"/proc/self/fd/{fd}").endswith("data.mdb"):
            self.fails, self.fault = False, Fault("fdatasync", 1, errno.EIO)
        super().fdatasync(fd)


@pytest.mark.parametrize("how", ["again", "opened anew"])
def test_after_a_sync_that_failed_an_erase_writes_everything_again(tmp_path: Path, how: str) -> None:
    fs, secret = CatalogNotSynced(), tokens_of(1, 300)
    store = KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config(), fs=fs)
    put(store, secret)
    store.flush()
    fs.fails = True
    with pytest.raises(DiskError, match="not overwritten yet"):
        store.delete(secret, erase=True)
    if how == "opened anew":
        store.close()
        store = KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config(), fs=fs)
        assert store.stats()["counters"]["erases_resumed"] == 1
    else:
        store.delete(secret, erase=True)
    assert fs.resynced == []
    assert found(tmp_path, secret) == []
    store.close()


def test_a_reader_of_an_older_commit_is_waited_for_and_named(
    store: KVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, disk = tokens_of(1, 300), store._residency.disk
    assert disk is not None
    environment = disk.catalog.environment
    put(store, secret)
    store.flush()
    assert environment.readers_of_older_commits() == []
    with environment.reading():
        put(store, tokens_of(2, 9))
        store.flush()
        assert environment.readers_of_older_commits() == [os.getpid()]
    assert environment.readers_of_older_commits() == []
    with monkeypatch.context() as patched:
        patched.setattr(erase_module, "_WAIT_S", 0.0)
        patched.setattr(type(environment), "readers_of_older_commits", lambda self: [12345])
        with pytest.raises(DiskError, match=r"What remains are old pages of .*data\.mdb.* Process 12345 still reads"):
            store.delete(secret, erase=True)
    assert store.contains(secret) == 0
    store.delete(secret, erase=True)
    assert found(tmp_path, secret) == []


READER = """
import lmdb, sys
with lmdb.open(sys.argv[1], readonly=True, max_dbs=8) as environment, environment.begin():
    print("reads", flush=True)
    sys.stdin.read()
"""


def test_an_erase_that_a_reader_cut_short_is_ended_once_the_reader_is_gone(
    store: KVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tokens_of(1, 300)
    put(store, secret)
    store.flush()
    monkeypatch.setattr(erase_module, "_WAIT_S", 0.0)
    command = [sys.executable, "-c", READER, str(tmp_path / "store" / "catalog")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        with pytest.raises(DiskError, match=f"old pages of .*data.mdb.* Process {reader.pid} still reads"):
            store.delete(secret, erase=True)
        put(store, tokens_of(2, 9))
        store.flush()
        assert {place.split()[0] for place in found(tmp_path, secret)} == {"data.mdb"}
        reader.communicate("")
    put(store, tokens_of(3, 9))  # before each group, and every second, the store looks whether it can go on
    store.flush()
    assert found(tmp_path, secret) == []
    assert store.stats()["counters"]["erases_resumed"] == 1
    assert stored(store, tokens_of(2, 9)) == 9
    all_is_well(store, deep=True)


class NoHoles(FileSystem):
    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_without_holes_zeros_are_written(tmp_path: Path) -> None:
    secret = tokens_of(1, 300)
    with KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config(), fs=NoHoles()) as store:
        put(store, secret)
        store.flush()
        store.delete(secret, erase=True)
        assert found(tmp_path, secret) == []
        assert store.stats()["counters"]["fallback_zeros"] == 1
        put(store, secret)
        store.flush()
        all_is_well(store, deep=True)


def test_a_store_in_memory_forgets(tmp_path: Path) -> None:
    secret = tokens_of(1, 40)
    with opened(tmp_path, disk=0) as store:
        save(store, "chat", secret)
        assert store.session("chat").delete(blocks=True, erase=True).removed_blocks == 10
        assert store.contains(secret) == 0
        assert store.delete_namespace(b"", erase=True) == EraseResult(0)


@pytest.mark.parametrize("how", ["sequence", "namespace", "session", "its beginning left"])
def test_holes_of_what_is_erased_are_in_no_file(store: KVStore, tmp_path: Path, how: str) -> None:
    """A block that left the middle of a sequence leaves its tokens in the catalog; they go with what is behind it."""
    secret, other = tokens_of(1, 300), tokens_of(2, 300)
    save(store, "secret", secret)
    put(store, other, b"other")
    store.flush()
    for record in (1, 3, 20) if how == "its beginning left" else (3, 20):
        store._residency.quarantine(record)
    assert store.stats()["disk"]["holes"] >= 2
    assert found(tmp_path, secret)
    if how == "namespace":
        store.delete_namespace(b"", erase=True)
    elif how == "session":
        store.session("secret").delete(blocks=True, erase=True)
    else:
        store.session("secret").delete(erase=True)
        store.delete(secret, erase=True)
    assert found(tmp_path, secret) == []
    assert store.stats()["disk"]["holes"] == 0
    assert stored(store, other, b"other") == len(other)
    all_is_well(store, deep=True)
