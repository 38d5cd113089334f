"""A store of format 1 becomes one of format 2 when it is opened for writing, and is whole wherever that ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from durable import lose_meta_pages
from goldenstore import config, files_of, identity, unpack
from small_stores import all_is_well

from kvstore import KVStore
from kvstore.errors import FormatVersion
from kvstore.tiers.disk import catalog as catalog_module
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.saved_sessions import SavedSessions
from kvstore.tiers.disk.superblock import FORMAT, NAMES, Superblock

GOLDEN = Path(__file__).parent.parent / "golden" / "stores"
SESSIONS: dict[str, Any] = json.loads((GOLDEN / "first.json").read_text())["sessions"]


class Killed(BaseException):
    """What a process that is killed does not see."""


class DyingFS(FileSystem):
    """Dies at the nth step of writing a superblock, before or after the step."""

    def __init__(self, nth: int = 0) -> None:
        self.nth, self.steps = nth, 0

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.nth:
            raise Killed

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        if path.endswith(".new"):
            self._step()
        return fd

    def rename(self, source: str, target: str) -> None:
        self._step()
        super().rename(source, target)
        self._step()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return unpack(GOLDEN / "first.tar.gz", tmp_path / "store")


@pytest.fixture
def one_commit_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "_UPGRADE_RUN", 1)


def superblocks(path: Path) -> list[dict[str, Any]]:
    return [json.loads((path / name).read_bytes().splitlines()[0]) for name in NAMES]


def everything_is_there(path: Path) -> None:
    with KVStore(path, identity(), config()) as store:
        assert {info.id for info in store.sessions()} == set(SESSIONS)
        for name, session in SESSIONS.items():
            handle = store.session(name, namespace=session["namespace"].encode())
            assert handle.tokens.tolist() == session["tokens"]
        all_is_well(store)
        assert not {name for name in store.stats()["counters"] if "damaged" in name or "rebuilt" in name}
    assert [block["format"] for block in superblocks(path)] == [FORMAT, FORMAT]
    assert "upgrading_from" not in superblocks(path)[0]


def test_a_store_of_format_1_is_upgraded_once(path: Path) -> None:
    assert [block["format"] for block in superblocks(path)] == [1, 1]
    with KVStore(path, identity(), config()) as store:
        assert store.stats()["counters"]["format_upgraded"] == 1
    with KVStore(path, identity(), config()) as store:
        assert "format_upgraded" not in store.stats()["counters"]
    assert all("upgrading_from" not in block for block in superblocks(path))
    everything_is_there(path)


def test_reading_a_store_of_format_1_upgrades_nothing(path: Path) -> None:
    before = files_of(path)
    with KVStore(path, identity(), config(), read_only=True) as store:
        assert {info.id for info in store.sessions()} == set(SESSIONS)
        assert store.session("chat").tokens.tolist() == SESSIONS["chat"]["tokens"]
        all_is_well(store)
    assert files_of(path) == before


@pytest.mark.parametrize("nth", range(1, 13))
def test_an_upgrade_that_dies_while_it_writes_a_superblock_goes_on(path: Path, nth: int) -> None:
    with pytest.raises(Killed):
        KVStore(path, identity(), config(), fs=DyingFS(nth))
    everything_is_there(path)


def test_those_are_all_steps(path: Path) -> None:
    fs = DyingFS()
    KVStore(path, identity(), config(), fs=fs).close()
    assert fs.steps == 12  # two copies before, two after; each is opened, renamed from, renamed to


@pytest.mark.usefixtures("one_commit_a_session")
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("inside", [False, True])
def test_an_upgrade_that_dies_among_its_commits_goes_on(
    path: Path, nth: int, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = [], SavedSessions.upgrade

    def dying(self: SavedSessions, txn: Any, after: bytes, most: int) -> bytes | None:
        calls.append(after)
        if len(calls) == nth and not inside:
            raise Killed
        last = real(self, txn, after, most)
        if len(calls) == nth:
            raise Killed
        return last

    with monkeypatch.context() as patched:
        patched.setattr(SavedSessions, "upgrade", dying)
        with pytest.raises(Killed):
            KVStore(path, identity(), config())
    assert superblocks(path)[0]["upgrading_from"] == 1
    with KVStore(path, identity(), config(), read_only=True) as store:  # half of it is upgraded
        assert {info.id for info in store.sessions()} == set(SESSIONS)
    everything_is_there(path)


def test_an_upgrade_of_a_damaged_catalog_finds_its_sessions(path: Path) -> None:
    lose_meta_pages(path)
    with KVStore(path, identity(), config()) as store:
        assert store.stats()["counters"]["catalog_rebuilt_sessions"] == len(SESSIONS)
    everything_is_there(path)


@pytest.mark.parametrize("lost", NAMES)
def test_one_copy_of_the_superblock_is_enough(path: Path, lost: str) -> None:
    (path / lost).unlink()
    everything_is_there(path)


def formats_an_older_program_sees(path: Path) -> Iterator[int]:
    for block in superblocks(path):
        yield block["format"]


@pytest.mark.parametrize("nth", [3, 6, 9])
def test_an_older_program_refuses_what_an_upgrade_has_begun(path: Path, nth: int) -> None:
    """It reads the first copy that is intact; from the first rename on that says 2, which it refuses by name."""
    with pytest.raises(Killed):
        KVStore(path, identity(), config(), fs=DyingFS(nth))
    assert next(formats_an_older_program_sees(path)) == 2


def test_a_store_of_a_newer_format_is_refused_and_left_alone(path: Path) -> None:
    for name in NAMES:
        block = {**json.loads((path / name).read_bytes().splitlines()[0]), "format": FORMAT + 1}
        body = json.dumps(block, sort_keys=True).encode() + b"\n"
        (path / name).write_bytes(body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")
    before = files_of(path)
    for read_only in (False, True):
        with pytest.raises(FormatVersion, match=r"format 3, this version of kvstore reads formats 1 to 2; open the"):
            KVStore(path, identity(), config(), read_only=read_only)
    (path / "writer.lock").unlink(missing_ok=True)
    before.pop("writer.lock", None)
    assert files_of(path) == before


def test_a_store_that_is_made_today_is_of_format_2(tmp_path: Path) -> None:
    KVStore(tmp_path / "new", identity(), config()).close()
    assert [block["format"] for block in superblocks(tmp_path / "new")] == [2, 2]
    found = Superblock.read(FileSystem(), str(tmp_path / "new"))
    assert found is not None
    assert found.format == FORMAT == 2
    shutil.rmtree(tmp_path / "new")
