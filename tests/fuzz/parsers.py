"""What reads files, given anything with right checksums: it works, or refuses with an error that it may raise.

`python tests/fuzz/parsers.py NAME [corpus folders and options of libFuzzer]` runs one of them under atheris, which is
guided by what the code reaches; `NAME --lines FOLDER...` says how much of it the files in folders reach. `TARGETS` are
plain functions of bytes: test_parsers.py calls them, too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arrivals
import coded
import reach

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
MOST_BYTES = 1 << 20


class Reader:
    """Takes numbers from bytes; zeros once they have ended."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found.ljust(count, b"\0")

    def number(self, count: int = 1) -> int:
        return int.from_bytes(self.take(count), "little")

    def more(self) -> bool:
        return self._at < len(self._data)

    def rest(self) -> bytes:
        return self._data[self._at :]


def record(data: bytes) -> None:
    """Any header fields, tables and payload; both checksums are right."""
    from kvstore.core import record as module

    reader = Reader(data)
    repaired = reader.number() % 8 != 1
    fields = reader.take(module.HEADER_BYTES)
    body = bytearray(fields + reader.rest())
    body[:10] = module._BEGINNING.pack(module.MAGIC, module.VERSION, 0, 0)[:10]
    fixed = module._Fixed(*module._HEADER.unpack_from(body))
    layers, tokens, donors = fixed.layers % 5, fixed.tokens % 9, fixed.donors % 3
    has_sums = bool(fixed.flags & module.FLAG_SUMS)
    if repaired:
        struct.pack_into("<III", body, 184, tokens, fixed.start, layers)
        struct.pack_into("<H", body, 216, donors)
        begin = module.payload_offset(layers, tokens, donors, has_sums)
        body.extend(bytes(max(0, begin - len(body))))
        size = fixed.payload_bytes if fixed.payload_bytes % 4 == 1 else len(body) - begin
        struct.pack_into("<I", body, 12, begin)
        struct.pack_into("<Q", body, 176, size)
        if fixed.record_id % 4:  # sizes that add up
            table = [size] + [0] * (layers - 1) if layers else []
            struct.pack_into(f"<{layers}I", body, module.HEADER_BYTES, *[part & 0xFFFFFFFF for part in table])
        body[80:112] = body[module.HEADER_BYTES + 4 * (layers + tokens) + 8 :][:32] if donors else bytes(32)
        import xxhash

        end = module.HEADER_BYTES + 4 * (layers + tokens) + 40 * donors
        covered = bytes(body[begin : begin + size])
        if has_sums and fixed.record_id % 8 and len(covered) == size and layers:  # right for the sizes above
            parts = [covered] + [b""] * (layers - 1)
            covered = b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(part)) for part in parts)
            body[end : end + len(covered)] = covered
        body[224:240] = xxhash.xxh3_128_digest(covered)
        tables = bytes(body[module.HEADER_BYTES : end + 8 * layers * has_sums])
        body[240:256] = module._header_sum(bytes(body[:240]), tables)
    with contextlib.suppress(module.DamagedRecord):
        header = module.parse(memoryview(body), MOST_BYTES)
        module.check_payload(header, memoryview(body))
        sealed = bytearray(header.record_bytes)
        sealed[header.payload_offset :] = module.payload_of(header, memoryview(body))
        module.seal(header, memoryview(sealed))
        assert module.parse(memoryview(sealed), MOST_BYTES) is not None


def entry(data: bytes) -> None:
    """A catalog's entry whose checksum is right."""
    from kvstore.tiers.disk.entry import Entry, is_entry, with_sum

    value = with_sum(data)
    found = Entry.unpack(value)
    is_entry(data[8:16], value)
    if found is not None:
        again = Entry.unpack(found.pack())
        assert again is not None
        assert again.pack() == found.pack()


def session(data: bytes) -> None:
    """What stands with a session, a text of one, and a note."""
    from kvstore.core import session_record as module
    from kvstore.core.session_note import SessionNote

    reader = Reader(data)
    kind, size = reader.number(), reader.number() * 2
    if kind % 4 == 2:
        note = SessionNote.unpack(reader.rest())
        assert note is None or SessionNote.unpack(note.pack()) == note
        return
    if kind % 2:
        text = reader.rest()
        before, tokens = text[:16].ljust(16, b"\0"), text[20:].ljust(4 * module.TEXT_TOKENS, b"\0")
        found = module.SessionText.unpack(
            module.text_key(before, tokens), before + text[16:20].ljust(4, b"\0") + tokens
        )
        assert found is None or found.tokens == tokens
        return
    head = bytearray(reader.take(module._HEAD.size))
    struct.pack_into("<I", head, 32, size)
    body = bytes(head) + reader.rest()
    namespace = body[40:72]
    key = namespace[:16] + body[module._HEAD.size + 4 * (size % module.TEXT_TOKENS) :]
    found_head = module.SessionHead.unpack(key, body)
    if found_head is not None:
        assert found_head.key == key
        assert module.SessionHead.unpack(key, found_head.pack()) == found_head or len(found_head.rest)
        module.tokens_of(found_head, lambda text: None)


def profile(data: bytes) -> None:
    """A profile's header as any JSON and any arrays; its lengths are right."""
    from small_stores import IDENTITY

    from kvstore.codecs.profile import Profile
    from kvstore.errors import ProfileError

    reader = Reader(data)
    raw, arrays = reader.number() % 4 == 1, {}
    if raw:
        content = reader.rest()
    else:
        at, kinds = 0, ("I8", "U8", "I16", "U16", "F16", "I32", "F32", "I64", "F64", "BF16")
        for number in range(reader.number() % 5):
            kind, rank = kinds[reader.number() % 10], reader.number() % 4
            shape = [reader.number(1 if reader.number() % 8 else 8) for _ in range(rank)]
            size = reader.number(2) if reader.number() % 4 == 1 else _bytes_of(kind, shape)
            name = ("lossless", "lossy", "aqua", "donor", "x")[reader.number() % 5] + f"/{number}.k.scale"
            arrays[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        texts = {"format": "kvstore-profile", "version": "1", "report": "{}", "versions": "{}"}
        texts["identity"] = json.dumps(IDENTITY.fields())
        if reader.number() % 4 == 1:
            texts[list(texts)[reader.number() % 5]] = reader.take(reader.number()).decode("latin-1")
        head = json.dumps({"__metadata__": texts, **arrays}).encode()
        content = struct.pack("<Q", len(head)) + head + reader.rest()[: 1 << 16].ljust(min(at, 1 << 16), b"\0")
    with contextlib.suppress(ProfileError):
        found = Profile.from_bytes(content)
        for section in found.sections:
            found.section(section)


def _bytes_of(kind: str, shape: list[int]) -> int:
    size = 2 if kind == "BF16" else int(kind[1:]) // 8
    for extent in shape:
        size *= extent
    return size


def superblock(data: bytes) -> None:
    """A superblock of any JSON; its checksum is right."""
    import xxhash

    from kvstore.errors import FormatVersion
    from kvstore.tiers.disk.superblock import Superblock

    reader = Reader(data)
    document: dict[str, Any] = {
        "format": 2, "store_id": "00" * 16, "identity": {}, "block_tokens": 64, "segment_bytes": 1 << 20,
    }  # fmt: skip
    body = reader.rest()
    if reader.number() % 4:
        names = [*document, "upgrading_from", "tokenizer"]
        while reader.more():
            name = names[reader.number() % len(names)]
            with contextlib.suppress(ValueError, RecursionError):
                document[name] = json.loads(reader.take(reader.number()).rstrip(b"\0"))
        body = json.dumps(document).encode()
    body = body.replace(b"\n", b" ") + b"\n"
    with contextlib.suppress(
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, FormatVersion
    ):
        Superblock._parse(body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n", "store.json")


class _Template:
    """A store of a few sequences, a family of them, a session: made once, and opened with other entries each time."""

    def __init__(self) -> None:
        import small_stores

        self.scratch = small_stores.scratch()
        self.folder = self.scratch.__enter__()
        atexit.register(self.scratch.__exit__, None, None, None)
        with self.open("template") as store:
            for number in range(4):
                small_stores.put(store, small_stores.tokens_of(number, 6 + number), b"other" if number == 3 else b"")
            tokens = small_stores.tokens_of(9, 7)
            store.session("a").save(tokens, small_stores.kv_of(tokens))
            store.flush()

    def open(self, name: str) -> Any:
        import small_stores

        from kvstore import KVStore

        return KVStore(self.folder / name, small_stores.IDENTITY, small_stores.config())


_template: list[_Template] = []


def catalog(data: bytes) -> None:
    """A whole store whose catalog says anything, with right checksums: it opens, and every call works."""
    import lmdb
    import small_stores

    from kvstore.errors import CorruptStore
    from kvstore.tiers.disk.entry import with_sum

    if not _template:
        _template.append(_Template())
    template, reader = _template[0], Reader(data)
    path = template.folder / "store"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(template.folder / "template", path)
    names = (b"records", b"records", b"records", b"namespaces", b"sessions", b"texts", b"traffic", b"places")
    with lmdb.open(str(path / "catalog"), max_dbs=8, lib_version=0, map_size=1 << 24) as env:
        while reader.more():
            db = env.open_db(names[reader.number() % len(names)])
            with env.begin(write=True, db=db) as txn:
                rows = list(txn.cursor())
                key, value = rows[reader.number() % len(rows)] if rows else (bytes(8), bytes(8))
                changed = bytearray(value)
                for _ in range(reader.number() % 4):
                    at, size = reader.number(2) % max(1, len(changed)), 1 << reader.number() % 4
                    changed[at : at + size] = reader.take(size)[: len(changed) - at]
                what = reader.number() % 8
                if what == 1:
                    txn.delete(key)
                elif what == 2 and key:  # the same value under another key
                    key = key[:-1] + bytes([reader.number()])
                elif what == 3:
                    changed = changed[: reader.number(2)] if reader.number() % 2 else changed + reader.take(8)
                if what != 1 and key:
                    body = bytes(changed[8:])
                    txn.put(key, with_sum(body) if what != 4 else bytes(changed))
    try:
        with template.open("store") as store:
            for number in (*range(4), 9):
                for namespace in (b"", b"other"):
                    tokens = small_stores.tokens_of(number, 12)
                    store.get(tokens, namespace=namespace)
                    store.explain(tokens, namespace=namespace)
            store.sessions()
            store.session("a").resume()
            store.check(deep=True)
            small_stores.put(store, small_stores.tokens_of(50, 9))
            store.flush()
    except CorruptStore:
        return  # it may say so


TARGETS: dict[str, Callable[[bytes], None]] = {
    "record": record, "entry": entry, "session": session, "profile": profile, "superblock": superblock,
    "catalog": catalog, **arrivals.TARGETS, **coded.TARGETS,
}  # fmt: skip


def changed(data: bytes, rng: random.Random) -> bytes:
    """Another input near this one, for runs without a guide."""
    found = bytearray(data or rng.randbytes(40))
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(found) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at : at + 1] = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"\x01"))
        elif kind == 2:
            found[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:
            del found[at : at + rng.randrange(1, 9)]
        else:
            found[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, (1 << 63).to_bytes(8, "little")))
    return bytes(found)


def main() -> None:
    sys.path[:0] = [str(HELPERS)]
    name = sys.argv.pop(1)
    if sys.argv[1] == "--lines":
        paths = [path for folder in sys.argv[2:] for path in Path(folder).iterdir()]
        reached, lines, needed = reach.lines_reached(TARGETS[name], paths, reach.READS[name])
        print(json.dumps({"lines": lines, "coverage": round(reached / lines, 3), "needed": list(map(str, needed))}))
        return
    import atheris

    with atheris.instrument_imports(include=["kvstore"], enable_loader_override=False):
        import kvstore.core.record
        import kvstore.store  # noqa: F401

        TARGETS[name](b"")  # it imports what it needs
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
