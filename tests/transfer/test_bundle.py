"""The bytes of a bundle: what was packed comes out, and nothing else is taken for one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import xxhash
from small_stores import config, identity, put, tokens_of

from kvstore import CorruptStore, DiskError, KVStore
from kvstore.tiers.disk.fs import FileSystem
from kvstore.transfer.bundle import MAGIC, pack, unpack
from kvstore.transfer.copy import Choice
from kvstore.transfer.portable import export_store, import_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("bundle")
    with KVStore(folder / "a", identity(), config()) as store:
        put(store, tokens_of(1, 10))
        export_store(store, str(folder / "file"), Choice())
    return (folder / "file").read_bytes()


def head_of(files: object) -> bytes:
    head = json.dumps({"files": files}).encode()
    return MAGIC + len(head).to_bytes(4, "little") + head + xxhash.xxh3_128_digest(head)


def piece(number: int, offset: int, data: bytes, length: int | None = None) -> bytes:
    size = len(data) if length is None else length
    head = number.to_bytes(4, "little") + size.to_bytes(4, "little") + offset.to_bytes(8, "little")
    return head + data + xxhash.xxh3_128_digest(head + data)


END = 0xFFFFFFFF


def refused(data: bytes, folder: Path, what: str) -> None:
    (folder / "file").write_bytes(data)
    with pytest.raises(CorruptStore, match=what):
        unpack(FileSystem(), str(folder / "file"), str(folder / "out"))


def test_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    source = tmp_path / "store"
    (source / "segments").mkdir(parents=True)
    data = random.Random(0).randbytes(5000) + bytes(100_000) + b"end"
    (source / "segments" / "00000001.seg").write_bytes(data)
    (source / "store.json").write_bytes(b"{}")
    (source / "writer.lock").write_bytes(b"not taken")
    nbytes = pack(FileSystem(), str(source), str(tmp_path / "file"))
    assert nbytes < 20_000, "zeros take no space"
    unpack(FileSystem(), str(tmp_path / "file"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "segments" / "00000001.seg").read_bytes() == data
    assert not (tmp_path / "out" / "writer.lock").exists()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "ends within its beginning"),
        (b"something else entirely", "is no bundle of kvstore"),
        (MAGIC + b"\xff\xff\xff\xff", "its head has"),
        (head_of([["../evil", 1]]), "names files that no store has"),
        (head_of([["/etc/passwd", 1]]), "names files that no store has"),
        (head_of([["writer.lock", 1]]), "names files that no store has"),
        (head_of([["profiles/.", 1]]), "names files that no store has"),
        (head_of([["profiles/..", 1]]), "names files that no store has"),
        (head_of([["store.json", 1], ["store.json", 1]]), "names files that no store has"),
        (head_of([["store.json", 1 << 60]]), "larger than what the bundle holds"),
        (head_of([["store.json", -1]]), "larger than what the bundle holds"),
        (head_of("text"), "cannot be read"),
        (head_of([["store.json", 5]]), "ends within a piece"),
        (head_of([["store.json", 5]]) + piece(0, 3, b"abc"), "outside of its file"),
        (head_of([["store.json", 5]]) + piece(1, 0, b"abc"), "outside of its file"),
        (head_of([["store.json", 5]]) + piece(0, 1 << 63, b"abc"), "outside of its file"),
        (head_of([["store.json", 5]]) + piece(0, 0, b"abc", 1 << 30), "piece 0 has"),
        (head_of([["store.json", 5]]) + piece(END, 1, b""), "pieces are missing"),
        (head_of([["store.json", 5]]) + piece(END, 0, b"") + b"more", "something follows its end"),
    ],
)
def test_hostile_bytes_are_refused(data: bytes, what: str, tmp_path: Path) -> None:
    refused(data, tmp_path, what)


def test_every_flipped_byte_is_found(bundle: bytes, tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(60):
        data = bytearray(bundle)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(CorruptStore):
            import_bundle(str(tmp_path / "file"), str(tmp_path / "out"), config())
    assert not (tmp_path / "out").exists()


def test_a_bundle_that_was_cut_short_is_found(bundle: bytes, tmp_path: Path) -> None:
    for end in {0, 1, 9, 30, len(bundle) // 2, len(bundle) - 1}:
        (tmp_path / "file").write_bytes(bundle[:end])
        with pytest.raises(CorruptStore):
            import_bundle(str(tmp_path / "file"), str(tmp_path / "out"), config())


def test_what_is_whole_and_no_store_is_refused(tmp_path: Path) -> None:
    data = b'{"format": 2}\n'
    sealed = data + xxhash.xxh3_128_hexdigest(data).encode()
    (tmp_path / "file").write_bytes(head_of([["store.json", len(sealed)]]) + piece(0, 0, sealed) + piece(END, 1, b""))
    with pytest.raises(CorruptStore, match="what the bundle holds is damaged"):
        import_bundle(str(tmp_path / "file"), str(tmp_path / "out"), config())


def test_a_bundle_needs_a_place(tmp_path: Path) -> None:
    with KVStore(tmp_path / "a", identity(), config()) as store:
        with pytest.raises(DiskError, match="make it first"):
            export_store(store, str(tmp_path / "none" / "file"), Choice())
        with pytest.raises(DiskError, match="name a file"):
            export_store(store, str(tmp_path), Choice())
