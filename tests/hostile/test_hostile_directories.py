"""Finding 15, "Hostile directories": anything may stand in place of a file, and numbers may be anything."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import small_stores

from kvstore import KVStore, StoreConfig
from kvstore.codecs import Profile
from kvstore.config import GIB
from kvstore.errors import ConfigError, CorruptStore, DiskError, KVStoreError, ProfileError
from kvstore.metrics import Metrics
from kvstore.tiers.disk.entry import MAX_RECORD, with_sum
from kvstore.tiers.disk.fs import FileSystem, NotAFile
from kvstore.tiers.profiles import Profiles

FIRST, SECOND = small_stores.tokens_of(1, 40), small_stores.tokens_of(2, 400)
PROFILE = Profile.new(small_stores.IDENTITY, {"mine": {"scale": np.ones(3, np.float32)}})
SPARSE = 100 * GIB


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A store of several segments, with a session and a profile; no test changes it."""
    with small_stores.scratch() as folder:
        with KVStore(folder / "store", small_stores.IDENTITY, small_stores.config(host=0)) as store:
            store.session("s").save(SECOND, small_stores.kv_of(SECOND))
            store.flush()
            small_stores.put(store, FIRST)
        keep_profile(folder / "store")
        yield folder / "store"


def keep_profile(path: Path) -> None:
    assert Profiles(FileSystem(), str(path), small_stores.IDENTITY, Metrics(), PROFILE).keep()


@pytest.fixture
def copy(template: Path) -> Iterator[Path]:
    with small_stores.scratch() as folder:
        shutil.copytree(template, folder / "store")
        (folder / "precious").write_bytes(b"precious")
        yield folder / "store"


class Hangs(BaseException):
    """No OSError, which a store may take for one of the disk."""


@contextmanager
def bounded(seconds: int = 60) -> Iterator[None]:
    """Ends what waits for ever, for example for somebody to write into a FIFO."""

    def end(number: int, frame: Any) -> None:
        raise Hangs("it waits for ever")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def opened(path: Path, read_only: bool = False) -> KVStore:
    return KVStore(path, small_stores.IDENTITY, small_stores.config(host=0), read_only=read_only)


def store_or_refusal(path: Path, read_only: bool = False) -> KVStore | KVStoreError:
    try:
        return opened(path, read_only)
    except KVStoreError as error:
        return error


# ---- anything in place of a file -------------------------------------------------------------------------------------


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fifo(path: Path) -> None:
    _clear(path)
    os.mkfifo(path)


def link(path: Path) -> None:
    """To a file outside of the store."""
    _clear(path)
    path.symlink_to(_precious(path))


def _precious(path: Path) -> Path:
    return next(parent / "precious" for parent in path.parents if (parent / "precious").exists())


def link_to_itself(path: Path) -> None:
    """To what stood there, now outside of the store: what a link names is right, and still not followed."""
    if path.exists():
        moved = _precious(path).with_name("moved")
        shutil.move(path, moved)
        path.symlink_to(moved)
    else:
        path.symlink_to(path)


def listening(path: Path) -> None:
    _clear(path)
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def folder(path: Path) -> None:
    _clear(path)
    path.mkdir()
    (path / "inside").write_bytes(b"mine")


def sparse(path: Path) -> None:
    _clear(path)
    path.touch()
    os.truncate(path, SPARSE)


def grown(path: Path) -> None:
    """What stood there, with a hole behind it."""
    if path.is_file():
        os.truncate(path, SPARSE)


KINDS = (fifo, link, link_to_itself, listening, folder, sparse, grown)
FILES: dict[str, Callable[[Path], Path]] = {
    "store.json": lambda path: path / "store.json",
    "store.json.copy": lambda path: path / "store.json.copy",
    "writer.lock": lambda path: path / "writer.lock",
    "data.mdb": lambda path: path / "catalog" / "data.mdb",
    "lock.mdb": lambda path: path / "catalog" / "lock.mdb",
    "data.mdb.damaged": lambda path: path / "catalog" / "data.mdb.damaged",
    "data.mdb.new": lambda path: path / "catalog" / "data.mdb.new",
    "first-segment": lambda path: min((path / "segments").iterdir()),
    "last-segment": lambda path: max((path / "segments").iterdir()),
    "next-segment": lambda path: path / "segments" / f"{len(list((path / 'segments').iterdir())) + 1:08x}.seg",
    "profile": lambda path: path / "profiles" / f"{PROFILE.id.hex()}.safetensors",
    "newest-profile": lambda path: path / "profiles" / "newest",
    "segments": lambda path: path / "segments",
    "catalog": lambda path: path / "catalog",
    "profiles": lambda path: path / "profiles",
}
SEGMENTS = ("first-segment", "last-segment")
NEEDLESS = (*SEGMENTS, "next-segment", "profile", "store.json", "store.json.copy")  # a store opens without one of them


@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "reader"])
@pytest.mark.parametrize("name", FILES)
def test_anything_in_place_of_a_file_is_refused_by_name_or_done_without(
    template: Path, name: str, read_only: bool
) -> None:
    for kind in KINDS:
        with small_stores.scratch() as scratch, bounded():
            (scratch / "precious").write_bytes(b"precious")
            path = scratch / "store"
            shutil.copytree(template, path)
            target = FILES[name](path)
            kind(target)
            found = store_or_refusal(path, read_only)
            if isinstance(found, KVStoreError):
                assert isinstance(found, CorruptStore | ConfigError | DiskError), (kind, found)
                assert target.name in str(found), (kind, found)
                assert name not in NEEDLESS, (kind, found)
            else:
                with found:
                    _serves(found, name, kind)
            assert (scratch / "precious").read_bytes() == b"precious", kind
            if kind is folder and target.is_dir():
                assert (target / "inside").read_bytes() == b"mine"


def _serves(store: KVStore, name: str, kind: Callable[[Path], None]) -> None:
    """What is there is right; what is not there is counted."""
    found = small_stores.stored(store, FIRST), small_stores.stored(store, SECOND)
    counters = store.stats()["counters"]
    if name in SEGMENTS and kind is not grown:
        assert found != (40, 400)
        assert sum(found) > 0
        assert counters.get("damaged_segments") or kind is sparse, kind
        assert counters.get("lost_entries") or counters.get("quarantined_records"), kind
    elif name != "segments":
        assert found == (40, 400), kind
    if not store.read_only:
        more = small_stores.tokens_of(3, 40)
        small_stores.put(store, more)
        assert store.flush().dropped_blocks == 0, kind
        assert small_stores.stored(store, more) == 40
        small_stores.all_is_well(store)


@pytest.mark.parametrize("name", ["store.json.new", "store.json.copy.new"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_written_beside_a_file_follows_no_link(copy: Path, name: str, kind: Callable[[Path], None]) -> None:
    named = replace(small_stores.IDENTITY, tokenizer="named-now")  # so that both copies are written anew
    kind(copy / name)
    with bounded(), KVStore(copy, named, small_stores.config()) as store:
        assert small_stores.stored(store, FIRST) == 40
    assert (copy.parent / "precious").read_bytes() == b"precious"
    assert (copy / name.removesuffix(".new")).is_file()


@pytest.mark.parametrize("name", ["store.json.new", "store.json.copy.new", "writer.lock"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_new_store_follows_no_link(name: str, kind: Callable[[Path], None]) -> None:
    with small_stores.scratch() as scratch, bounded():
        (scratch / "precious").write_bytes(b"precious")
        (scratch / "store").mkdir()
        kind(scratch / "store" / name)
        found = store_or_refusal(scratch / "store")
        if isinstance(found, KVStoreError):
            assert name in str(found)
        else:
            found.close()
        assert (scratch / "precious").read_bytes() == b"precious"


def test_a_lock_that_is_a_link_is_not_written_through(copy: Path) -> None:
    link(copy / "writer.lock")
    with pytest.raises(CorruptStore, match=r"writer\.lock: is a symbolic link, not a file; remove it"):
        opened(copy)
    assert (copy.parent / "precious").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", [fifo, link, listening, folder], ids=lambda kind: kind.__name__)
def test_the_file_system_opens_nothing_but_files(copy: Path, kind: Callable[[Path], None]) -> None:
    kind(copy / "it")
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT):
        with bounded(), pytest.raises(NotAFile, match="not a file"):
            FileSystem().open(str(copy / "it"), flags)
    with pytest.raises(NotAFile):
        FileSystem().size(str(copy / "it"))


def test_files_are_for_their_owner_alone() -> None:
    before = os.umask(0)
    try:
        with small_stores.scratch() as scratch:
            path = scratch / "deep" / "store"
            with KVStore(path, small_stores.IDENTITY, small_stores.config()) as store:
                small_stores.put(store, FIRST)
                store.flush()
                keep_profile(path)
                found = [(p.name, p.is_dir(), stat.S_IMODE(p.lstat().st_mode)) for p in (path, *path.rglob("*"))]
    finally:
        os.umask(before)
    assert len(found) > 10
    assert [(name, oct(mode)) for name, is_folder, mode in found if mode != (0o700 if is_folder else 0o600)] == []


# ---- numbers that no store writes ------------------------------------------------------------------------------------


def change_entry(path: Path, change: Callable[[bytearray], bytearray], key: bytes | None = None) -> int:
    """Writes the entry of the last record anew, with a right checksum; returns the number of that record."""
    with lmdb.open(str(path / "catalog"), max_dbs=8, lib_version=0) as env:
        records = env.open_db(b"records")
        with env.begin(write=True) as txn, txn.cursor(db=records) as cursor:
            assert cursor.last()
            old, value = cursor.item()
            changed = change(bytearray(value))
            txn.put(key or old, with_sum(bytes(changed[8:])), db=records)
        return int.from_bytes(old, "big")


@pytest.mark.parametrize("number", [(1 << 64) - 1, (1 << 63) + 5, MAX_RECORD], ids=hex)
def test_an_entry_with_a_number_that_no_store_gives_is_dropped_and_counted(copy: Path, number: int) -> None:
    def numbered(entry: bytearray) -> bytearray:
        struct.pack_into("<Q", entry, 8, number)
        return entry

    change_entry(copy, numbered, number.to_bytes(8, "big"))
    with opened(copy) as store:
        assert store.stats()["counters"]["damaged_entries"] == 1
        assert (small_stores.stored(store, FIRST), small_stores.stored(store, SECOND)) == (40, 400)
        more = small_stores.tokens_of(3, 40)
        small_stores.put(store, more)
        assert store.flush().dropped_blocks == 0
        assert small_stores.stored(store, more) == 40
        small_stores.all_is_well(store)
    with opened(copy) as store:
        assert "damaged_entries" not in store.stats()["counters"]
        assert small_stores.stored(store, more) == 40


@pytest.mark.parametrize("number", [(1 << 64) - 1, MAX_RECORD], ids=hex)
def test_a_reader_does_without_an_entry_with_such_a_number(copy: Path, number: int) -> None:
    change_entry(
        copy, lambda entry: entry[:8] + bytearray(struct.pack("<Q", number)) + entry[16:], struct.pack(">Q", number)
    )
    with opened(copy, read_only=True) as store:
        assert small_stores.stored(store, FIRST) == 40


def with_zero_tokens(key: bytes, value: bytes) -> bytes:
    """The head of a session (FORMAT.md, "Sessions") with a length of 0 and nothing behind it."""
    head = bytearray(value[8:])
    name = key[16:]
    struct.pack_into("<Q", head, 32, 0)
    return with_sum(bytes(head[: len(head) - len(name)])[:112] + name)


def test_a_session_of_no_tokens_is_taken_from_an_older_page(copy: Path) -> None:
    with lmdb.open(str(copy / "catalog"), max_dbs=8, lib_version=0) as env:
        sessions = env.open_db(b"sessions")
        with env.begin(write=True) as txn, txn.cursor(db=sessions) as cursor:
            assert cursor.first()
            key, value = cursor.item()
            txn.put(key, with_zero_tokens(key, value), db=sessions)
    with opened(copy) as store:
        session = store.session("s")
        assert store.stats()["counters"]["catalog_rebuilt"] == 1
        assert (session.exists, session.tokens.tolist()) == (True, SECOND.tolist())
        assert small_stores.stored(store, SECOND) == 400
        assert session.save(SECOND, small_stores.kv_of(SECOND)).new_blocks == 0
        assert session.tokens.tolist() == SECOND.tolist()


def profile_with(shape: list[int], nbytes: int = 0) -> bytes:
    texts = {"format": "kvstore-profile", "version": "1", "report": "{}", "versions": "{}"}
    texts["identity"] = json.dumps(small_stores.IDENTITY.fields())
    entry = {"dtype": "I8", "shape": shape, "data_offsets": [0, nbytes]}
    header = json.dumps({"__metadata__": texts, "mine/array": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(nbytes)


@pytest.mark.parametrize(
    "shape", [[1 << 39, 0, 1 << 39], [0, 1 << 39, 1 << 39], [0, 1 << 40], [1 << 20] * 7 + [0]], ids=str
)
def test_a_profile_of_an_impossible_shape_is_refused(tmp_path: Path, shape: list[int]) -> None:
    (tmp_path / "p").write_bytes(profile_with(shape))
    with pytest.raises(ProfileError, match="out of range"):
        Profile.load(tmp_path / "p")
    with pytest.raises(ProfileError, match="out of range"):
        KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config(profile=tmp_path / "p"))


@pytest.mark.parametrize("shape", [[0], [0, 3], [3, 0, 5]], ids=str)
def test_a_profile_with_an_empty_array_is_read(shape: list[int]) -> None:
    assert list(Profile.from_bytes(profile_with(shape)).section("mine")["array"].shape) == shape


@pytest.mark.parametrize(
    "ttl", [10**400, 1e300, float("inf"), float("nan"), 10**5000], ids=["400", "1e300", "inf", "nan", "5000"]
)
def test_a_time_to_live_beyond_all_times_is_refused(copy: Path, ttl: float) -> None:
    with opened(copy) as store:
        tokens = small_stores.tokens_of(3, 10)
        with pytest.raises(ValueError, match=r"^ttl: expected"):
            small_stores.put(store, tokens, ttl=ttl)
        assert store.contains(tokens) == 0
        small_stores.put(store, tokens, ttl=1e11)
        assert small_stores.stored(store, tokens) == 10


@pytest.mark.parametrize("seconds", [10**400, 1e300, float("inf"), 10**5000], ids=["400", "1e300", "inf", "5000"])
def test_a_timeout_beyond_all_times_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"^put_timeout_s: expected"):
        StoreConfig(put_timeout_s=seconds)


def test_a_folder_that_is_removed_while_the_store_is_open_is_no_surprise() -> None:
    config = small_stores.config(host=0)
    with small_stores.scratch() as folder, KVStore(folder / "store", small_stores.IDENTITY, config) as store:
        small_stores.put(store, FIRST)
        store.flush()
        shutil.rmtree(folder / "store")
        assert "cannot be looked at" in store.check(deep=True).problems[0]
        for number in range(10, 200):
            small_stores.put(store, small_stores.tokens_of(number, 40))
        assert store.flush().dropped_blocks > 0
        assert small_stores.stored(store, FIRST) == len(FIRST)  # its files are open
        for change in (lambda: store.delete(FIRST, erase=True), lambda: store.session("x").delete(erase=True)):
            with pytest.raises(DiskError):
                change()
        assert store.compact().freed_bytes == 0
        assert "cannot be looked at" in store.check(deep=True).problems[0]
        counters = store.stats()["counters"]
        assert counters["dropped_write_error"] > 0
        assert "catalog_lost" not in counters  # its file is open, too
        assert "dropped_no_space" not in counters
