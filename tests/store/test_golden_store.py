"""A store that an earlier kvstore wrote opens for ever, with everything in it (see tests/golden/make.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_stores
import numpy as np
import pytest
from family_stores import counter, families_hold, passage
from goldenstore import TENANT, config, digest_of, files_of, identity, read, unpack

from kvstore import KVStore
from kvstore.core.record import HEADER_BYTES, MAGIC, RecordHeader, parse

GOLDEN = Path(__file__).parent.parent / "golden" / "stores"
STORES = sorted(path.stem for path in GOLDEN.glob("*.json"))
PAGE = 4096


@pytest.fixture(params=STORES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return found


@pytest.fixture
def path(name: str, tmp_path: Path) -> Path:
    return unpack(GOLDEN / f"{name}.tar.gz", tmp_path / "store")


def everything_is_there(store: KVStore, manifest: dict[str, Any]) -> None:
    for name, sequence in manifest["sequences"].items():
        hit = read(store, sequence)
        assert (0 if hit is None else hit.tokens) == sequence["found"], name
        assert hit is None or digest_of(hit.layers) == sequence["sha256"], name
    found = {info.id: info.tokens for info in store.sessions()}
    assert found == {name: len(session["tokens"]) for name, session in manifest["sessions"].items()}
    for name, session in manifest["sessions"].items():
        handle = store.session(name, namespace=session["namespace"].encode())
        assert handle.tokens.tolist() == session["tokens"]
        resumed = handle.resume()
        assert resumed is not None
        assert resumed.tokens == len(session["tokens"])
    assert store.stats()["families"]["members"] == manifest["members"]


def records(path: Path) -> list[tuple[RecordHeader, bytes]]:
    """Every record in the segments, live or not, and its payload's first bytes."""
    found = []
    for segment in sorted((path / "segments").glob("*.seg")):
        data = memoryview(segment.read_bytes())
        for at in range(PAGE, len(data), PAGE):
            if bytes(data[at : at + len(MAGIC)]) == MAGIC:
                header = parse(data[at:], len(data) - at)
                found.append((header, bytes(data[at + header.payload_offset :][:HEADER_BYTES])))
    return found


def test_reading_finds_everything_and_changes_no_byte(path: Path, manifest: dict[str, Any]) -> None:
    before = files_of(path)
    with KVStore(path, identity(), config(), read_only=True) as store:
        everything_is_there(store, manifest)
        assert not {name for name in store.stats()["counters"] if "damaged" in name or "error" in name}
    assert files_of(path) == before


@pytest.mark.parametrize("codec", ["entropy", "auto", "raw"])
def test_writing_goes_on_from_where_it_was(path: Path, manifest: dict[str, Any], codec: str) -> None:
    new = family_stores.behind(90, passage(1))
    with KVStore(path, identity(), config(codec)) as store:
        everything_is_there(store, manifest)
        families_hold(store)
        family_stores.put(store, new)
        store.flush()
        assert (store.stats()["families"]["members"] > manifest["members"]) == (codec != "raw")
        assert counter(store, "disk_write_errors") == 0
    with KVStore(path, identity(), config(codec), read_only=True) as store:
        assert family_stores.stored(store, new) == len(new)
        everything_is_there(store, {**manifest, "members": store.stats()["families"]["members"]})


def test_what_was_pinned_outlives_what_was_not(path: Path, manifest: dict[str, Any]) -> None:
    with KVStore(path, identity(), config()) as store:
        for number in range(100, 180):
            family_stores.put(store, passage(number))
            store.flush()
        for name, there in (("pinned", True), ("tail", False)):
            sequence = manifest["sequences"][name]
            hit = read(store, sequence)
            assert (hit is not None and digest_of(hit.layers) == sequence["sha256"]) == there


def test_namespaces_stay_apart(path: Path, manifest: dict[str, Any]) -> None:
    ids = np.array(manifest["sequences"]["tenant-session"]["tokens"], np.uint32)
    with KVStore(path, identity(), config(), read_only=True) as store:
        assert store.get(ids) is None
        assert store.contains(ids, namespace=TENANT) == len(ids)


def test_there_is_something_of_everything_in_it(path: Path, manifest: dict[str, Any]) -> None:
    """So that the tests above say something of each."""
    headers = [header for header, _ in records(path)]
    assert {header.codec for header in headers} == {0, 1, 2, 3, 7, 16}
    assert {bool(header.donors) for header in headers if any(header.profile)} == {False, True}
    assert {any(header.profile) for header in headers if header.donors} == {False, True}
    assert any(header.flags for header in headers)
    expired = manifest["sequences"]["expired"]["tokens"]
    assert [header.expiry > 0 for header in headers if header.tokens.tolist() == expired] == [True]
    propagated = {payload[8] for header, payload in records(path) if header.codec == 3}
    assert propagated == {0, 1}
    assert {payload[0] for header, payload in records(path) if header.codec == 2} == {4}


def test_golden_stores_stay_small() -> None:
    assert STORES
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 400_000
