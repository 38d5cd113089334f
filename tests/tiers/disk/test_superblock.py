"""What a store is bound to: two copies, each with a checksum."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import xxhash
from kvcases import identity

from kvstore import KVLayout, StoreConfig
from kvstore.errors import CorruptStore, FormatVersion, IdentityMismatch
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.superblock import NAMES, Superblock

FS = FileSystem()
IDENTITY = identity()


@pytest.fixture
def written(tmp_path: Path) -> Superblock:
    superblock = Superblock.new(IDENTITY, 64, 1 << 20)
    superblock.write(FS, str(tmp_path))
    return superblock


def read(path: Path) -> Superblock | None:
    return Superblock.read(FS, str(path))


def write_document(path: Path, text: str | bytes) -> None:
    """Both copies, with a checksum that is right: as a hostile hand would."""
    body = (text.encode() if isinstance(text, str) else text) + b"\n"
    for name in NAMES:
        (path / name).write_bytes(body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")


def document(superblock: Superblock, **changes: object) -> str:
    fields = {
        "format": 2,
        "store_id": superblock.store_id.hex(),
        "identity": superblock.identity,
        "block_tokens": superblock.block_tokens,
        "segment_bytes": superblock.segment_bytes,
    }
    return json.dumps({**fields, **changes}, sort_keys=True)


def test_what_is_written_is_read_again(written: Superblock, tmp_path: Path) -> None:
    assert read(tmp_path) == written
    assert written.identity == IDENTITY.fields()
    assert {p.name for p in tmp_path.iterdir()} == set(NAMES)


def test_every_store_has_an_id_of_its_own() -> None:
    ids = {Superblock.new(IDENTITY, 64, 1 << 20).store_id for _ in range(10)}
    assert len(ids) == 10
    assert {len(i) for i in ids} == {16}


def test_no_file_at_all_is_no_superblock(tmp_path: Path) -> None:
    assert read(tmp_path) is None


@pytest.mark.parametrize("damage", ["missing", "empty", "flipped", "cut", "noise", "huge", "directory"])
@pytest.mark.parametrize("name", NAMES)
def test_one_damaged_copy_is_as_good_as_none(written: Superblock, tmp_path: Path, name: str, damage: str) -> None:
    spoil(tmp_path / name, damage)
    assert read(tmp_path) == written


@pytest.mark.parametrize("damage", ["empty", "flipped", "cut", "noise", "huge", "directory"])
def test_two_damaged_copies_are_a_corrupt_store(written: Superblock, tmp_path: Path, damage: str) -> None:
    for name in NAMES:
        spoil(tmp_path / name, damage)
    with pytest.raises(CorruptStore, match=NAMES[0]):
        read(tmp_path)


def spoil(path: Path, damage: str) -> None:
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "directory":
        path.unlink()
        path.mkdir()
    elif damage == "huge":
        os.truncate(path, 1 << 40)  # sparse: must be refused by its size alone
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        changed = {"empty": b"", "flipped": flipped, "cut": data[:middle], "noise": b"\xff\x00" * 100}
        path.write_bytes(changed[damage])


def test_every_flipped_bit_of_both_copies_is_noticed(written: Superblock, tmp_path: Path) -> None:
    data = (tmp_path / NAMES[0]).read_bytes()
    for where in range(len(data) - 1):  # the last newline carries nothing
        changed = bytearray(data)
        changed[where] ^= 1 << (where % 8)
        for name in NAMES:
            (tmp_path / name).write_bytes(changed)
        with pytest.raises((CorruptStore, FormatVersion)):
            read(tmp_path)


def test_another_version_is_named(written: Superblock, tmp_path: Path) -> None:
    write_document(tmp_path, document(written, format=3))
    with pytest.raises(FormatVersion, match=r"format 3, .* reads formats 1 to 2; open the store with"):
        read(tmp_path)


def test_a_right_checksum_over_the_right_fields_is_read(written: Superblock, tmp_path: Path) -> None:
    """The positive control of the test below."""
    write_document(tmp_path, document(written))
    assert read(tmp_path) == written


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": []},
        {"identity": "x"},
        {"identity": None},
        {"store_id": "zz"},
        {"store_id": "00"},
        {"store_id": 5},
        {"block_tokens": "many"},
        {"block_tokens": None},
        {"segment_bytes": []},
        {"block_tokens": float("inf")},
        {"block_tokens": float("nan")},
        {"block_tokens": 0},
        {"block_tokens": 1 << 20},
        {"segment_bytes": 0},
        {"segment_bytes": -4096},
        {"segment_bytes": 4096 * 16 + 1},
        {"segment_bytes": 10**400},
    ],
    ids=str,
)
def test_hostile_fields_with_a_right_checksum_are_a_corrupt_store(
    written: Superblock, tmp_path: Path, changes: dict[str, object]
) -> None:
    write_document(tmp_path, document(written, **changes))
    with pytest.raises(CorruptStore):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "5", "null", "{}", '{"format": 1}', "[" * 200_000, b"\xff\xfe", '"' * 3])
def test_a_hostile_document_with_a_right_checksum_is_a_corrupt_store(tmp_path: Path, text: str | bytes) -> None:
    write_document(tmp_path, text)
    with pytest.raises(CorruptStore):
        read(tmp_path)


def test_another_identity_is_refused_with_what_differs(written: Superblock, tmp_path: Path) -> None:
    written.check("here", IDENTITY)
    with pytest.raises(IdentityMismatch, match=r"weights: stored 'w', given 'other'\); use another directory"):
        written.check("here", identity(weights="other"))
    with pytest.raises(IdentityMismatch, match="layout"):
        written.check("here", identity(KVLayout.uniform(1, 1, 1)))


def test_the_sizes_of_the_store_are_taken(written: Superblock) -> None:
    given = StoreConfig(block_tokens=32, segment_bytes=1 << 26, threads=3)
    assert written.settled(given) == StoreConfig(block_tokens=64, segment_bytes=1 << 20, threads=3)
