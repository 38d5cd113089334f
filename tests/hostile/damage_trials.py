"""One damaged byte, or one damaged file, per trial: what is lost, and above all what is not. Run by helpers/trials.py.

Every trial copies one of two small stores, damages the copy, opens it and holds it against what was put.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import seeds
import small_stores

from kvstore import KVStore, StoreConfig
from kvstore.errors import CorruptStore

# Fields of a record's header: name -> (first byte, last byte + 1). See FORMAT.md.
FIELDS = {
    "magic": (0, 8),
    "version": (8, 10),
    "codec": (10, 12),
    "payload_offset": (12, 16),
    "key": (16, 48),
    "parent": (48, 80),
    "donor": (80, 112),
    "namespace": (112, 144),
    "profile": (144, 160),
    "record_id": (160, 168),
    "sizes": (168, 184),
    "counts": (184, 196),
    "error_bound": (196, 200),
    "bits": (200, 204),
    "flags": (204, 208),
    "expiry": (208, 216),
    "donors": (216, 218),
    "reserved": (218, 224),
    "payload_sum": (224, 240),
    "header_sum": (240, 256),
}
RECORD_KINDS = (*FIELDS, "layer_table", "tokens", "payload")
HARMLESS_KINDS = (  # the last four are files
    "padding", "segment_header", "segment_tail", "superblock", "second_superblock", "writer_lock", "lock_mdb",
)  # fmt: skip
CATALOG_KINDS = ("catalog_meta", "catalog_branch", "catalog_leaf")
_PAGE = 4096
_LENGTHS = (3, 4, 7, 8, 13, 16, 22, 40)
_SESSIONS = ("a", "b", "c")


@dataclass
class Built:
    """What is in the store: (namespace, sequence number) -> length; sessions -> length; entries as the catalog had
    them, and which sequence each belongs to."""

    path: Path
    config: Any
    lengths: dict[tuple[bytes, int], int] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)

    def owner(self, entry: Any) -> tuple[bytes, int]:
        for (namespace, number), length in self.lengths.items():
            tokens = small_stores.tokens_of(number, length)[entry.start : entry.start + len(entry.tokens)]
            if tokens.tolist() == entry.tokens.tolist():
                return namespace, number
        raise LookupError("an entry of no sequence")


def build(path: Path, seed: int) -> Built:
    """Two lives of a store, with deletes, growth and sessions, so that there is old data beside the live."""
    built = Built(path, _config(seed))
    for first, sessions in ((0, _SESSIONS[:2]), (12, _SESSIONS[1:])):
        with KVStore(path, small_stores.IDENTITY, built.config) as store:
            for number in range(first, first + 12):
                namespace = b"other" if number % 5 == 0 else b""
                length = _LENGTHS[number % len(_LENGTHS)]
                small_stores.put(store, small_stores.tokens_of(number, max(1, length // 2)), namespace)
                store.flush()
                small_stores.put(store, small_stores.tokens_of(number, length), namespace)
                built.lengths[namespace, number] = length
            for number in (first + 3, first + 11):
                namespace = b"other" if number % 5 == 0 else b""
                store.delete(
                    small_stores.tokens_of(number, built.lengths.pop((namespace, number))), namespace=namespace
                )
            for name in sessions:
                number = 100 + ord(name) + first
                length = 9 + first
                tokens = small_stores.tokens_of(number, length)
                store.session(name).save(tokens, small_stores.kv_of(tokens))
                built.lengths[b"", number] = length
                built.sessions[name] = number
            store.flush()
            built.entries = small_stores.catalog_entries(store)
    return built


def _config(seed: int) -> StoreConfig:
    return small_stores.config(host=1 << 20, codec=("raw", "splitzip", "entropy", "zstd")[seed % 4])


def built_once(folder: Path, seed: int) -> Built:
    """A store to copy: the first trial that comes builds it for all."""
    path, kept = folder / f"template{seed}", folder / f"built{seed}"
    if not kept.exists():
        made = build(path, seed)
        small_stores.keep_entries(folder / f"entries{seed}", made.entries)
        lengths = [(namespace, number, length) for (namespace, number), length in made.lengths.items()]
        kept.write_bytes(msgpack.packb([lengths, made.sessions]))
    lengths, sessions = msgpack.unpackb(kept.read_bytes())
    return Built(
        path,
        _config(seed),
        {(namespace, number): length for namespace, number, length in lengths},
        sessions,
        small_stores.kept_entries(folder / f"entries{seed}"),
    )


def many(kind: str, seeds: int, shared: str) -> dict[str, int]:
    """One trial per seed, of a bit (`flip`) or of a shape. Counts what became of the store. shared: a folder for what
    all kinds need."""
    outcomes: dict[str, int] = {}
    templates = [built_once(Path(shared), seed) for seed in range(2)]
    with small_stores.scratch() as folder:
        for seed in range(seeds):
            template = templates[seed % 2]
            copy = replace(template, path=folder / "store", lengths=dict(template.lengths))
            copy.sessions = dict(template.sessions)
            shutil.copytree(template.path, copy.path)
            try:
                outcome = shape(copy, kind, seed) if kind in SHAPES else flip(copy, kind, seed)
            except Exception as error:
                raise AssertionError(f"{kind}, seed {seed}: {error!r}") from error
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            shutil.rmtree(copy.path)
    return outcomes


def flip(built: Built, kind: str, seed: int) -> str:
    """Flips one bit of a byte of that kind. Returns what became of the store."""
    rng = random.Random(f"{kind}/{seeds.nth(seed)}")
    entry = rng.choice(built.entries)
    file, first, last = _target(built, kind, entry, rng)
    offset = rng.randrange(first, last)
    small_stores.flip(file, offset, 1 << rng.randrange(8))
    hit = built.owner(entry) if kind in RECORD_KINDS else None
    return _check(built, {hit: entry.start} if hit else {}, may_lose_a_session=kind == "catalog_leaf")


def _target(built: Built, kind: str, entry: Any, rng: random.Random) -> tuple[Path, int, int]:
    segment = built.path / "segments" / f"{entry.extent.segment:08x}.seg"
    at = entry.extent.offset
    if kind in RECORD_KINDS or kind == "padding":
        header = segment.read_bytes()[at : at + entry.extent.nbytes]
        (payload_offset,) = struct.unpack_from("<I", header, 12)
        (payload_bytes,) = struct.unpack_from("<Q", header, 176)
        count, _, layers = struct.unpack_from("<III", header, 184)
        places = {
            **FIELDS,
            "layer_table": (256, 256 + 4 * layers),
            "tokens": (256 + 4 * layers, 256 + 4 * layers + 4 * count),
            "payload": (payload_offset, payload_offset + payload_bytes),
            "padding": (payload_offset + payload_bytes, entry.extent.nbytes),
        }
        first, last = places[kind]
        return segment, at + first, at + last
    if kind == "segment_header":
        return segment, 0, _PAGE
    if kind == "segment_tail":
        end = max(e.extent.offset + e.extent.nbytes for e in built.entries if e.extent.segment == entry.extent.segment)
        return segment, min(end, small_stores.SEGMENT - 1), small_stores.SEGMENT
    if kind.startswith("catalog_"):
        return _catalog_page(built.path / "catalog" / "data.mdb", kind, rng)
    names = ("store.json", "store.json.copy", "writer.lock", "catalog/lock.mdb")
    file = built.path / names[HARMLESS_KINDS.index(kind) - 3]
    return file, 0, file.stat().st_size


def _catalog_page(file: Path, kind: str, rng: random.Random) -> tuple[Path, int, int]:
    """The used part of a page of the wanted sort, in use or not."""
    data = file.read_bytes()
    want = {"catalog_meta": 8, "catalog_branch": 1, "catalog_leaf": 2}[kind]
    pages = [p for p in range(0, len(data), _PAGE) if struct.unpack_from("<H", data, p + 10)[0] == want]
    page = rng.choice(pages)
    if kind == "catalog_meta":
        return file, page, page + 16 + 136
    lower, upper = struct.unpack_from("<HH", data, page + 12)
    return (file, page, page + lower) if rng.random() < 0.3 else (file, page + upper, page + _PAGE)


REFUSED = ("no_superblocks", "both_superblocks_damaged")
SHAPES: dict[str, Callable[[Built, random.Random], set[int]]] = {}
"""name -> damages a store; returns the segments whose records may be lost."""


def _shape(function: Callable[[Built, random.Random], set[int]]) -> Callable[[Built, random.Random], set[int]]:
    SHAPES[function.__name__] = function
    return function


def shape(built: Built, name: str, seed: int) -> str:
    """Damages whole files. Everything outside of the segments that were hit is still there."""
    hit = SHAPES[name](built, random.Random(f"{name}/{seeds.nth(seed)}"))
    lost: dict[tuple[bytes, int], int] = {}
    for entry in built.entries:
        if entry.extent.segment in hit:
            owner = built.owner(entry)
            lost[owner] = min(entry.start, lost.get(owner, entry.start))
    if name not in REFUSED:
        return _check(built, lost, exact=False)
    try:
        KVStore(built.path, small_stores.IDENTITY, built.config).close()
    except CorruptStore:
        return "refused"  # nothing says whose caches these are
    return "opened"


def _segments(built: Built) -> list[Path]:
    return sorted((built.path / "segments").iterdir())


def _number(path: Path) -> int:
    return int(path.stem, 16)


@_shape
def truncated_segment(built: Built, rng: random.Random) -> set[int]:
    file = rng.choice(_segments(built))
    os.truncate(file, rng.randrange(0, small_stores.SEGMENT))
    return {_number(file)}


@_shape
def extended_segment(built: Built, rng: random.Random) -> set[int]:
    with rng.choice(_segments(built)).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 1 << 17)))
    return set()


@_shape
def zeroed_segment(built: Built, rng: random.Random) -> set[int]:
    file = rng.choice(_segments(built))
    file.write_bytes(bytes(small_stores.SEGMENT))
    return {_number(file)}


@_shape
def random_segment(built: Built, rng: random.Random) -> set[int]:
    file = rng.choice(_segments(built))
    file.write_bytes(rng.randbytes(small_stores.SEGMENT))
    return {_number(file)}


@_shape
def missing_segment(built: Built, rng: random.Random) -> set[int]:
    file = rng.choice(_segments(built))
    file.unlink()
    return {_number(file)}


@_shape
def swapped_segments(built: Built, rng: random.Random) -> set[int]:
    one, other = rng.sample(_segments(built), 2)
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)
    return {_number(one), _number(other)}


@_shape
def old_segment(built: Built, rng: random.Random) -> set[int]:
    file = rng.choice(_segments(built))
    old = file.read_bytes()
    with KVStore(built.path, small_stores.IDENTITY, built.config) as store:
        for number in range(200, 210):
            small_stores.put(store, small_stores.tokens_of(number, 22))
            built.lengths[b"", number] = 22
        store.flush()
        built.entries = small_stores.catalog_entries(store)
    file.write_bytes(old)
    return {_number(file)}


@_shape
def old_catalog(built: Built, rng: random.Random) -> set[int]:
    old = (built.path / "catalog" / "data.mdb").read_bytes()
    before = dict(built.lengths)
    with KVStore(built.path, small_stores.IDENTITY, built.config) as store:
        for number in range(200, 200 + rng.randrange(1, 30)):
            small_stores.put(store, small_stores.tokens_of(number, 22))
        store.flush()
    (built.path / "catalog" / "data.mdb").write_bytes(old)
    built.lengths = before
    return set()


@_shape
def truncated_catalog(built: Built, rng: random.Random) -> set[int]:
    file = built.path / "catalog" / "data.mdb"
    os.truncate(file, rng.randrange(0, file.stat().st_size))
    built.sessions.clear()  # they lived in what was cut off
    return set()


@_shape
def extended_catalog(built: Built, rng: random.Random) -> set[int]:
    with (built.path / "catalog" / "data.mdb").open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 20_000)))
    return set()


@_shape
def zeroed_catalog(built: Built, rng: random.Random) -> set[int]:
    file = built.path / "catalog" / "data.mdb"
    file.write_bytes(bytes(file.stat().st_size))
    built.sessions.clear()
    return set()


@_shape
def random_catalog(built: Built, rng: random.Random) -> set[int]:
    file = built.path / "catalog" / "data.mdb"
    file.write_bytes(rng.randbytes(file.stat().st_size))
    built.sessions.clear()
    return set()


@_shape
def scattered_catalog(built: Built, rng: random.Random) -> set[int]:
    file = built.path / "catalog" / "data.mdb"
    for _ in range(60):
        small_stores.flip(file, rng.randrange(file.stat().st_size), 1 << rng.randrange(8))
    built.sessions.clear()
    return set()


@_shape
def missing_catalog(built: Built, rng: random.Random) -> set[int]:
    shutil.rmtree(built.path / "catalog")
    built.sessions.clear()
    return set()


@_shape
def random_locks(built: Built, rng: random.Random) -> set[int]:
    for name in ("catalog/lock.mdb", "writer.lock"):
        (built.path / name).write_bytes(rng.randbytes(rng.randrange(0, 9000)))
    return set()


@_shape
def foreign_files(built: Built, rng: random.Random) -> set[int]:
    for folder in ("", "segments", "catalog"):
        for name in ("README", "zzzzzzzz.seg", "notes.seg", "0000000g.seg", "00000001.seg.bak", "x" * 200):
            (built.path / folder / name).write_bytes(rng.randbytes(100))
        (built.path / folder / "folder").mkdir()
    (built.path / "segments" / "00000fff.seg").mkdir()
    (built.path / "segments" / "00000ffe.seg").write_bytes(rng.randbytes(rng.randrange(0, 2 * small_stores.SEGMENT)))
    return set()


@_shape
def one_superblock_missing(built: Built, rng: random.Random) -> set[int]:
    (built.path / rng.choice(("store.json", "store.json.copy"))).unlink()
    return set()


@_shape
def no_superblocks(built: Built, rng: random.Random) -> set[int]:
    for name in ("store.json", "store.json.copy"):
        (built.path / name).unlink()
    return set()


@_shape
def both_superblocks_damaged(built: Built, rng: random.Random) -> set[int]:
    for name in ("store.json", "store.json.copy"):
        small_stores.flip(built.path / name, rng.randrange((built.path / name).stat().st_size - 1), 1)
    return set()


def _check(
    built: Built, lost: dict[tuple[bytes, int], int], exact: bool = True, may_lose_a_session: bool = False
) -> str:
    """lost: sequence -> tokens of it that are left. exact: so many, not only at least so many."""
    with KVStore(built.path, small_stores.IDENTITY, built.config) as store:
        for (namespace, number), length in built.lengths.items():
            there = small_stores.stored(store, small_stores.tokens_of(number, 48), namespace)
            least = lost.get((namespace, number), length)
            most = least if exact else length
            assert least <= there <= most, f"sequence {number} of {length}: {there} tokens left, expected {least}"
        missing = [n for n, number in built.sessions.items() if not _is_session(store, n, built.lengths, number)]
        assert len(missing) <= may_lose_a_session, f"sessions lost: {missing}"
        outcome = _heals(store, built)
    with KVStore(built.path, small_stores.IDENTITY, built.config) as store:
        for (namespace, number), length in built.lengths.items():
            there = small_stores.stored(store, small_stores.tokens_of(number, 48), namespace)
            assert there == length, f"sequence {number}: {there} tokens after it was put again"
        small_stores.all_is_well(store)
    return outcome


def _is_session(store: KVStore, name: str, lengths: dict[tuple[bytes, int], int], number: int) -> bool:
    want = small_stores.tokens_of(number, lengths[b"", number])
    return store.session(name).tokens.tolist() == want.tolist()


def _heals(store: KVStore, built: Built) -> str:
    """What was lost can be put again."""
    for (namespace, number), length in built.lengths.items():
        small_stores.put(store, small_stores.tokens_of(number, length), namespace)
    assert store.flush().dropped_blocks == 0
    counters = store.stats()["counters"]
    for sign in ("catalog_rebuilt", "mended_entries", "quarantined_records"):
        if counters.get(sign):
            return sign
    return "fine"
