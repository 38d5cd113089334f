"""Finding 10, "SIGBUS": a catalog that lost pages at its end is refused or rebuilt, and never mapped."""

from __future__ import annotations

import fcntl
import os
import random
import struct
from pathlib import Path

import lmdb
import numpy as np
import pytest
import seeds
import small_stores
import trials
from faultfs import FaultFS
from length import FULL
from lmdb import verify

from kvstore import KVStore
from kvstore.config import MIB
from kvstore.errors import CorruptStore, DiskError
from kvstore.tiers.disk import environment
from kvstore.tiers.disk._catalog import read
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.catalog_file import Metas, problem_of_pages
from kvstore.tiers.disk.environment import check
from kvstore.tiers.disk.fs import FileSystem

FS = FileSystem()
PAGE = 4096
WHO = ("writer", "reader", "reader-beside-a-writer", "reader-beside-another")
PAGES = (*range(1, 7), 9) if FULL else (1, 2, 4, 9)


def test_a_catalog_that_lost_its_last_pages_kills_nobody() -> None:
    cases = [{"who": who, "pages": pages} for who in WHO for pages in PAGES]
    rows = trials.run(Path(__file__).parent / "sigbus_trials.py", "trial", cases)
    assert trials.failures(rows) == []
    outcomes = {(row["case"]["who"], row["result"]) for row in rows}
    assert outcomes >= {("writer", "rebuilt"), *((who, "refused") for who in WHO[1:])}


# ---- what a file lacks ----------------------------------------------------------------------------------------------


def random_catalog(folder: Path, seed: int) -> Path:
    """An LMDB file of random commits, with values of many pages."""
    rng = random.Random(seeds.of("sigbus", seed))
    with lmdb.open(str(folder), map_size=1 << 28, max_dbs=4, lib_version=0) as env:
        names = [env.open_db(name) for name in (b"a", b"b", b"c")]
        for _ in range(rng.randrange(3, 60)):
            with env.begin(write=True) as txn:
                for _ in range(rng.randrange(1, 30)):
                    name, key = rng.choice(names), rng.randrange(200).to_bytes(8, "big")
                    # A value in place of a longer one of the same commit would look damaged to the verifier.
                    txn.delete(key, db=name)
                    if rng.random() < 0.5:
                        txn.put(key, bytes(rng.choice((100, 2000, 5000, 20_000, 60_000))), db=name)
                for key in (b"x", b"y", b"z")[: rng.randrange(4)]:  # pages that nothing is in, mostly at the end
                    txn.put(key, bytes(30_000), db=names[0])
                    txn.delete(key, db=names[0])
    return folder / "data.mdb"


def pages_in_use(file: Path) -> int:
    """Up to which page something is in use, as LMDB's own verifier marks them."""
    with file.open("rb") as opened:
        verifier = verify._Verifier(opened, file.stat().st_size)
        assert verifier.verify() == []
        return max(2, verifier.live.rfind(1) + 1)


@pytest.mark.parametrize("seed", range(12 if FULL else 6))
def test_the_end_of_what_is_in_use_is_found_exactly(seed: int) -> None:
    with small_stores.scratch() as folder:
        file = random_catalog(folder, seed)
        used = pages_in_use(file)
        for pages in (used + 3, used + 1, used):
            if pages * PAGE <= file.stat().st_size:
                os.truncate(file, pages * PAGE)
            assert not problem_of_pages(FS, str(file))
        for pages in range(used - 1, max(1, used - 20), -1):
            os.truncate(file, pages * PAGE)
            assert problem_of_pages(FS, str(file)) or check(str(folder))


def nodes_in_use(file: Path) -> list[tuple[int, bool]]:
    """(where it is, whether it is in a leaf) of every node that has no pages of its own."""
    data = file.read_bytes()
    with file.open("rb") as opened:
        verifier = verify._Verifier(opened, len(data))
        assert verifier.verify() == []
    found = []
    for page in range(2 * PAGE, len(data), PAGE):
        kind, lower = struct.unpack_from("<HH", data, page + 10)
        if verifier.live[page // PAGE] and kind in (1, 2):
            places = [page + struct.unpack_from("<H", data, slot)[0] for slot in range(page + 16, page + lower, 2)]
            found += [(at, kind == 2) for at in places if kind == 1 or not data[at + 4] & 1]
    return found


def test_a_node_of_another_length_is_found() -> None:
    """What LMDB would do with one: it deletes by that length, and moves what lies beside it over the page's end."""
    with small_stores.scratch() as folder:
        file = random_catalog(folder, 1)
        flips = [
            (at + byte, 1 << bit)
            for at, is_leaf in nodes_in_use(file)
            for byte in ((0, 1, 2, 3, 6, 7) if is_leaf else (6, 7))
            for bit in range(8)
        ]
        assert len(flips) > 2000
        for at, bit in flips if FULL else random.Random(seeds.of("sigbus", 1)).sample(flips, 400):
            small_stores.flip(file, at, bit)
            assert isinstance(read(np.fromfile(file, np.uint8)), str), (at, bit)
            assert check(str(folder)) or problem_of_pages(FS, str(file)), (at, bit)
            small_stores.flip(file, at, bit)
        assert problem_of_pages(FS, str(file)) == ""


def test_a_healthy_file_may_end_before_its_free_pages() -> None:
    """LMDB writes no page that nothing is in. A file like that is opened, and has all pages from then on."""
    short = 0
    for seed in range(40):
        if short == 5 and not FULL:
            break
        with small_stores.scratch() as folder:
            file = random_catalog(folder, seed)
            metas = Metas.read(FS, str(file))
            if file.stat().st_size >= metas.end:
                continue
            short += 1
            assert check(str(folder)) == []
            assert not problem_of_pages(FS, str(file))
    assert short


def test_after_every_commit_the_file_is_as_long_as_it_says() -> None:
    with small_stores.scratch() as folder:
        catalog = Catalog(str(folder), 64 * MIB, readonly=False)
        with catalog.environment._lmdb.begin(write=True) as txn:  # a commit that leaves free pages at the end
            for turn in range(30):
                txn.put(turn.to_bytes(8, "big"), bytes(5000), db=catalog._traffic.runs)
            for turn in range(30):
                txn.delete(turn.to_bytes(8, "big"), db=catalog._traffic.runs)
        assert os.stat(catalog.environment.path).st_size < Metas.read(FS, catalog.environment.path).end
        catalog.namespace(bytes(32))
        assert os.stat(catalog.environment.path).st_size >= Metas.read(FS, catalog.environment.path).end
        catalog.close()
        assert check(str(folder)) == []


# ---- a reader beside a writer ----------------------------------------------------------------------------------------


def opened(path: Path, fs: FileSystem | None = None, read_only: bool = False) -> KVStore:
    return KVStore(path, small_stores.IDENTITY, small_stores.config(), read_only=read_only, fs=fs)


TOKENS = small_stores.tokens_of(1, 10)


@pytest.fixture
def built(tmp_path: Path) -> Path:
    with opened(tmp_path) as store:
        small_stores.put(store, TOKENS)
    return tmp_path


def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not read at once."""
    monkeypatch.setattr("kvstore.tiers.disk.open.read_whole", lambda fs, path: None)


def test_a_reader_looks_again_if_a_writer_changed_the_file_meanwhile(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def changed(directory: str, name: str = "data.mdb") -> list[str]:
        looks.append(name)
        if len(looks) == 1:
            with lmdb.open(directory, max_dbs=8, lib_version=0) as env, env.begin(write=True) as txn:
                txn.put(bytes(8), b"", db=env.open_db(b"traffic", txn))
                txn.delete(bytes(8), db=env.open_db(b"traffic", txn))
            return ["a page that was changed while it was looked at"]
        return check(directory, name)

    step_by_step(monkeypatch)
    monkeypatch.setattr(environment, "check", changed)
    with opened(built, read_only=True) as store:
        assert small_stores.stored(store, TOKENS) == 10
    assert len(looks) == 2


def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the file is spoilt by a commit."""
    step_by_step(monkeypatch)

    def changed(directory: str, name: str = "data.mdb") -> list[str]:
        file = Path(directory) / name
        data, commits = file.read_bytes(), Metas.read(FS, str(file)).commits
        newer, older = (1, 0) if commits[1] > commits[0] else (0, 1)
        pages = data[newer * PAGE : (newer + 1) * PAGE]
        # The older page as of the next commit.
        spoilt = older.to_bytes(8, "little") + pages[8:144] + (max(commits) + 1).to_bytes(8, "little") + pages[152:]
        file.write_bytes(data[: older * PAGE] + spoilt + data[(older + 1) * PAGE :])
        return ["changed"]

    monkeypatch.setattr(environment, "check", changed)


def test_beside_a_writer_that_never_rests_the_length_is_checked(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy(monkeypatch)
    with opened(built, read_only=True) as store:
        assert small_stores.stored(store, TOKENS) == 10


def test_beside_a_writer_that_never_rests_a_file_without_its_end_is_not_mapped(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(monkeypatch)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    file = built / "catalog" / "data.mdb"
    os.truncate(file, file.stat().st_size - PAGE)
    with pytest.raises(DiskError, match=r"data\.mdb: its writer changes it all the time; open the store again"):
        opened(built, read_only=True)


def test_damage_beside_a_lock_that_somebody_holds_is_refused(built: Path) -> None:
    file = built / "catalog" / "data.mdb"
    data = bytearray(file.read_bytes())
    data[2 * PAGE :] = bytes(len(data) - 2 * PAGE)
    file.write_bytes(data)
    with open(built / "writer.lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(CorruptStore, match="open the store for writing to rebuild it"):
            opened(built, read_only=True)


def test_a_reader_that_opened_a_file_that_was_replaced_meanwhile_opens_the_new_one(built: Path) -> None:
    class Swapped(FaultFS):
        looks = 0

        def inode(self, path: str) -> tuple[int, int]:
            self.looks += 1
            if self.looks == 2:  # just after LMDB opened it
                data = Path(path).read_bytes()
                os.unlink(path)
                Path(path).write_bytes(data)
            return super().inode(path)

    fs = Swapped()
    with opened(built, fs, read_only=True) as store:
        assert small_stores.stored(store, TOKENS) == 10
    assert fs.looks == 4
