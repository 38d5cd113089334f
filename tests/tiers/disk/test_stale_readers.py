"""Finding 8, "Stale readers": a reader that was killed keeps no pages, and a catalog that grew is made smaller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_stores
from faultfs import CALLS, Fault, FaultFS

from kvstore import KVStore
from kvstore.config import MIB, PAGE_BYTES
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk import catalog as catalog_module
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.catalog_file import Metas
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.environment import check
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.segment import Extent

# A reader that needs nothing but LMDB: it opens the environment, begins to read where told, and waits.
_READER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], readonly=True, max_dbs=8, lib_version=0)
if sys.argv[2] == "reading":
    txn = env.begin()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: these tests commit some thousand times."""
    with small_stores.scratch() as path:
        yield path


@contextmanager
def reader(directory: Path, doing: str = "reading") -> Iterator[subprocess.Popen[str]]:
    """Another process that has the catalog open; it is killed at the end."""
    command = [sys.executable, "-S", "-c", _READER, str(directory), doing]
    path = os.pathsep.join(p for p in sys.path if p)
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def killed_reader(directory: Path) -> None:
    """A reader that dies inside of a transaction."""
    with reader(directory) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()


def churn(catalog: Catalog, commits: int, records: int = 40) -> None:
    """Commits that change the same entries again and again."""
    for turn in range(commits):
        number = turn % records + 1
        where = Extent(1, (number + 1) * PAGE_BYTES, PAGE_BYTES)
        tokens = np.arange(64, dtype=np.uint32) + turn
        catalog.commit(added=[Entry(number, 0, turn, 0, where, 0, 1, 16, tokens)])


def size(catalog: Catalog) -> int:
    return os.stat(catalog.environment.path).st_size


# ---- readers that died -----------------------------------------------------------------------------------------------


def test_a_reader_that_was_killed_while_it_read_does_not_make_the_catalog_grow(tmp_path: Path) -> None:
    metrics = Metrics()
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False, metrics=metrics)
    churn(catalog, 50)
    before = size(catalog)
    killed_reader(tmp_path)
    churn(catalog, 300)
    assert size(catalog) < before + 40 * 10 * PAGE_BYTES  # some dozen commits until it is found, of some pages each
    settled = size(catalog)
    churn(catalog, 300)
    assert size(catalog) == settled
    assert metrics[Metric.STALE_READERS] == 1
    catalog.close()


def test_a_reader_that_died_before_is_found_when_the_catalog_is_opened(tmp_path: Path) -> None:
    Catalog(str(tmp_path), 64 * MIB, readonly=False).close()
    with reader(tmp_path, "waiting"):  # keeps the table of readers from being made anew
        killed_reader(tmp_path)
        metrics = Metrics()
        Catalog(str(tmp_path), 64 * MIB, readonly=False, metrics=metrics).close()
        assert metrics[Metric.STALE_READERS] == 1


def test_a_scan_keeps_no_pages_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    churn(catalog, 120, records=120)
    monkeypatch.setattr(catalog_module, "_SCAN_RUN", 10)
    is_entry, before, seen = catalog_module.is_entry, size(catalog), []

    def and_commit(key: bytes, value: bytes) -> bool:
        churn(catalog, 1, records=120)
        seen.append(key)
        return is_entry(key, value)

    monkeypatch.setattr(catalog_module, "is_entry", and_commit)
    scan = catalog.scan()
    assert len(seen) == len(scan.entries) == 120
    assert scan.damaged == []
    assert size(catalog) < before + 2 * 10 * 12 * PAGE_BYTES  # what the commits beside two short transactions take
    catalog.close()


@pytest.mark.parametrize("run", [1, 3, 7, 4096])
def test_a_scan_in_parts_gives_every_entry_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    churn(catalog, 21, records=21)
    monkeypatch.setattr(catalog_module, "_SCAN_RUN", run)
    assert catalog.scan().entries["record"].tolist() == list(range(1, 22))
    assert catalog.scan(after=14).entries["record"].tolist() == list(range(15, 22))
    assert len(catalog.scan(after=21).entries) == 0
    catalog.close()


# ---- a catalog that grew ---------------------------------------------------------------------------------------------

TOKENS, MORE = small_stores.tokens_of(1, 30), small_stores.tokens_of(2, 30)


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    """A store whose catalog grew, for a reader kept its pages."""
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()) as store:
        small_stores.put(store, TOKENS)
        store.session("s").save(TOKENS, small_stores.kv_of(TOKENS))
        store.flush()
        with reader(tmp_path / "catalog"):
            catalog = store._residency.disk.catalog  # type: ignore[union-attr]
            records = catalog.scan().entries["record"].tolist()
            while size(catalog) < 2 * MIB:
                catalog.commit(added=[entry for entry in catalog.get(records) if entry is not None])
    return tmp_path


def opened(path: Path, **settings: Any) -> KVStore:
    return KVStore(path, small_stores.IDENTITY, small_stores.config(), **settings)


def catalog_bytes(path: Path) -> int:
    return (path / "catalog" / "data.mdb").stat().st_size


def holds_all(store: KVStore) -> None:
    assert small_stores.stored(store, TOKENS) == 30
    assert store.session("s").tokens.tolist() == TOKENS.tolist()
    if not store.read_only:
        small_stores.all_is_well(store, deep=True)


def compactions(store: KVStore) -> int:
    return int(store.stats()["counters"].get("catalog_compacted", 0))


def test_a_catalog_that_grew_is_made_smaller_at_the_next_open(grown: Path) -> None:
    commits = Metas.read(FileSystem(), str(grown / "catalog" / "data.mdb")).commits
    with opened(grown) as store:
        assert compactions(store) == 1
        assert catalog_bytes(grown) < 256 << 10
        assert max(Metas.read(FileSystem(), str(grown / "catalog" / "data.mdb")).commits) >= max(commits)
        holds_all(store)
        small_stores.put(store, MORE)
        store.flush()
    assert check(str(grown / "catalog")) == []
    with opened(grown, read_only=True) as store:
        assert small_stores.stored(store, MORE) == 30
        holds_all(store)
    with opened(grown) as store:
        assert compactions(store) == 0


@pytest.mark.parametrize("more", [0, 1], ids=["even", "odd"])
def test_a_compacted_catalog_goes_on_with_the_same_commit(tmp_path: Path, more: int) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    churn(catalog, 40 + more)
    version, used = catalog.environment.version(), catalog.environment.used_bytes()
    copy = tmp_path / "copy"
    copy.mkdir()
    catalog.environment.write_compacted(str(copy / "data.mdb"))
    expected = catalog.scan()
    catalog.close()
    assert check(str(copy)) == []
    metas = Metas.read(FileSystem(), str(copy / "data.mdb"))
    assert metas.agree
    assert max(metas.commits) == version
    assert (copy / "data.mdb").stat().st_size <= used
    smaller = Catalog(str(copy), 64 * MIB, readonly=False)
    assert smaller.environment.version() == version
    assert (smaller.scan().entries == expected.entries).all()
    churn(smaller, 41)
    assert smaller.environment.version() == version + 41
    smaller.close()
    assert check(str(copy)) == []


@pytest.mark.parametrize("doing", ["reading", "waiting"])
def test_a_catalog_that_another_process_has_open_is_left_as_it_is(grown: Path, doing: str) -> None:
    before = catalog_bytes(grown)
    with reader(grown / "catalog", doing), opened(grown) as store:
        assert compactions(store) == 0
        assert catalog_bytes(grown) >= before
        holds_all(store)
    assert not (grown / "catalog" / "data.mdb.new").exists()
    with opened(grown) as store:
        assert compactions(store) == 1
        holds_all(store)


def test_a_reader_makes_nothing_smaller(grown: Path) -> None:
    before = catalog_bytes(grown)
    with opened(grown, read_only=True) as store:
        holds_all(store)
    assert catalog_bytes(grown) == before


def test_what_a_compaction_that_was_cut_short_left_is_removed(grown: Path) -> None:
    (grown / "catalog" / "data.mdb.new").write_bytes(b"half a catalog")
    with opened(grown) as store:
        assert compactions(store) == 1
        holds_all(store)
    (grown / "catalog" / "data.mdb.new").write_bytes(b"half a catalog")
    opened(grown).close()
    assert not (grown / "catalog" / "data.mdb.new").exists()


class Compaction(FaultFS):
    """Fails only what a compaction does: calls that concern the copy, and the lock file of LMDB."""

    def _error(self, call: str) -> int | str | None:
        names = [frame.name for frame in traceback.extract_stack()]
        return super()._error(call) if "compacted" in names else None


@pytest.mark.parametrize("call", [c for c in CALLS if c not in ("mkdir", "kind", "truncate", "allocate", "lock")])
def test_a_compaction_that_fails_costs_nothing(grown: Path, call: str) -> None:
    for nth in range(1, 9):
        fault = Fault(call, nth, 28)
        with opened(grown, fs=Compaction(fault)) as store:
            holds_all(store)
        if not fault.hits:
            break
    with opened(grown) as store:
        holds_all(store)
    assert catalog_bytes(grown) < 256 << 10
