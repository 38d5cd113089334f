"""What comes from other programs and other machines: replies of servers, files to import, caches of engines, messages.

Each is given anything (with right checksums where there are any) and works, or refuses with the error that it names.
The functions are targets of parsers.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

from catalogs import Numbers, damaged


class Arrival(Numbers):
    """An input, and what is made of it."""

    def take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at = min(len(self._data), self._at + count)
        return found

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def changes(self, data: bytes) -> bytes:
        """`data` with what is left of the input changed in it; as it is if nothing is left."""
        found = bytearray(data)
        while self.more():
            what, at = self.number(), self.number(3) % (len(found) + 1)
            if what % 8 < 3:
                found[at : at + 1] = bytes([self.number()])
            elif what % 8 < 6:
                value = self.take(1 << what % 4)
                found[at : at + len(value)] = value
            elif what % 8 == 6:
                del found[at : at + 1 + self.number()]
            else:
                found[at:at] = bytes([self.number()]) * self.number()
        return bytes(found)


def whole_file(data: bytes) -> None:
    """A damaged catalog, read in one pass: refused, or read as LMDB reads it."""
    import numpy as np
    import small_stores
    from wholefiles import is_same, step_by_step

    from kvstore.tiers.disk._catalog import read
    from kvstore.tiers.disk.catalog_file import DATA_FILE
    from kvstore.tiers.disk.environment import CatalogError
    from kvstore.tiers.disk.fs import FileSystem
    from kvstore.tiers.disk.whole_file import WholeFile, read_whole

    file = damaged(data)
    if isinstance(read(np.frombuffer(bytearray(file), np.uint8)), str):
        assert len(data) > 2, "a sound catalog is refused"
        return
    with small_stores.scratch() as folder:
        (folder / DATA_FILE).write_bytes(file)
        found = read_whole(FileSystem(), str(folder / DATA_FILE))
        assert isinstance(found, WholeFile)
        try:
            wanted = step_by_step(folder / DATA_FILE, beside=False)
        except CatalogError:
            return  # not all databases are there: whoever opens it is told
        assert wanted is not None
        assert is_same(found.scan, wanted)


def resp(data: bytes) -> None:
    """What a server says, in pieces of any size, and what is made of it."""
    from kvstore.errors import RemoteError, RemoteUnavailable
    from kvstore.tiers.remote.deadline import Deadline
    from kvstore.tiers.remote.engines.resp.address import Address
    from kvstore.tiers.remote.engines.resp.connection import Moved, number_of
    from kvstore.tiers.remote.engines.resp.feed import ChangeFeed
    from kvstore.tiers.remote.engines.resp.replies import Push, Replies
    from kvstore.tiers.remote.engines.resp.slots import SlotMap

    arrival = Arrival(data)
    kind, step = arrival.number(), 1 + arrival.number()

    class Said:
        def receive(self, most: int, deadline: Deadline) -> bytes:
            found = arrival.take(min(most, step))
            if not found:
                raise RemoteUnavailable("it has ended")
            return found

        def fill(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
            for buffer in buffers:
                found = arrival.take(len(buffer))
                if len(found) < len(buffer):
                    raise RemoteUnavailable("it has ended")
                buffer[:] = found

    replies, deadline, asked = Replies(Said()), Deadline(60), Address("10.0.0.1", 6379)  # type: ignore[arg-type]
    with contextlib.suppress(RemoteError):
        while arrival.more() or not replies.is_idle:
            if kind % 4 == 1:
                size = replies.value_into(memoryview(bytearray(200)), deadline)
                assert not isinstance(size, int) or 0 <= size <= 200
                continue
            for reply in replies.many(1 + kind % 3, deadline):
                if isinstance(reply, Push):
                    told: list[Any] = []
                    feed = ChangeFeed.__new__(ChangeFeed)
                    feed.keys, feed._prefix, feed._callback = 0, "kvs1", told.append
                    feed._tell(reply)
                    assert all(keys is None or all(key.startswith("kvs1") for key in keys) for keys in told)
                    continue
                for use in (number_of, lambda x: SlotMap.parse(x, asked)):
                    try:
                        slots = use(reply)
                    except Moved as moved:
                        _can_be(moved.address)
                    except RemoteError:
                        pass
                    else:
                        for address in slots.nodes() if isinstance(slots, SlotMap) else ():
                            _can_be(address)


def _can_be(address: Any) -> None:
    assert 0 < address.port < 1 << 16
    assert address.host.isascii()
    assert address.host.isprintable()


def llama(data: bytes) -> None:
    """A state of a sequence and a slot file, as llama.cpp writes them, changed."""
    import numpy as np
    import torch

    from kvstore import KVLayout
    from kvstore.errors import KVStoreError
    from kvstore.integrations.llama_cpp.form import StateForm
    from kvstore.integrations.llama_cpp.slot_file import build_slot_file, read_slot_file
    from kvstore.integrations.llama_cpp.state import parse_state

    arrival = Arrival(data)
    kind, tokens = arrival.number(), 1 + arrival.number() % 6
    layout = KVLayout.uniform(1 + (kind & 1), 1 + (kind >> 1 & 1), 4, dtype=("float16", "float32")[kind >> 2 & 1])
    form = StateForm(3 + (kind >> 3 & 1), bool(kind & 16), 4 if kind & 32 else 0)
    values = torch.arange(64).to(getattr(torch, layout.dtype))
    layers = tuple(
        tuple(values[: x.heads * tokens * 4].view(1, x.heads, tokens, 4) for _ in range(2)) for x in layout.layers
    )
    ids, streams, packed = np.arange(tokens, dtype=np.uint32), 1 + arrival.number() % 2, bool(kind & 64)
    made = build_slot_file(ids, layers, form, layout, streams=streams, packed=packed).tobytes()
    changed = arrival.changes(made)
    try:
        file = read_slot_file(changed, form.version)
        state = parse_state(file.state, form, layout)
    except KVStoreError:
        assert changed != made, "what was written is refused"
        return
    if state.tokens and state.tokens == len(file.tokens):
        again = build_slot_file(file.tokens, [(k[None], v[None]) for k, v in state.layers], form, layout)
        back = read_slot_file(again, form.version)
        assert np.array_equal(back.tokens, file.tokens)
        assert parse_state(back.state, form, layout).tokens == state.tokens
    if changed == made:
        assert all(
            torch.equal(a, b[0])
            for pair, wanted in zip(state.layers, layers, strict=True)
            for a, b in zip(pair, wanted, strict=True)
        )


def gguf(data: bytes) -> None:
    """The head of a GGUF file: two keys, a list and a tensor, changed."""
    from kvstore.errors import MalformedState
    from kvstore.integrations.llama_cpp.fields import Fields
    from kvstore.integrations.llama_cpp.gguf import GGUFHead, _read

    def text(words: bytes) -> bytes:
        return struct.pack("<Q", len(words)) + words

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 4)
    head += text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    head += text(b"general.alignment") + struct.pack("<II", 4, 32)
    head += text(b"tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.5, 1.5)
    head += text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"bc")
    head += text(b"output.weight") + struct.pack("<IQIQ", 1, 8, 0, 0)
    made = head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(range(32))
    changed = Arrival(data).changes(made)
    found = GGUFHead()
    try:
        _read(Fields(changed, "file"), changed, found)
    except MalformedState:
        assert changed != made, "a sound file is refused"


def events(data: bytes) -> None:
    """A message of vLLM's KV events: any bytes, or any values in msgpack."""
    import msgpack

    from kvstore.errors import MalformedEvents
    from kvstore.events.wire import packed, unpacked

    arrival = Arrival(data)
    names = ("type", "block_hashes", "token_ids", "parent_block_hash", "block_size", "medium", "extra_keys", "x")
    kinds = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "x")

    def value(depth: int = 0) -> Any:
        kind = arrival.number() % (12 if depth < 4 else 8)
        if kind < 4:
            return (arrival.number(), arrival.number(8), -arrival.number(7), kinds[arrival.number() % 4])[kind]
        if kind < 8:
            return (None, True, arrival.take(arrival.number() % 40), struct.unpack("<d", arrival.take(8).ljust(8))[0])[
                kind - 4
            ]
        if kind == 11:
            return {names[arrival.number() % 8]: value(depth + 1) for _ in range(arrival.number() % 8)}
        return [value(depth + 1) for _ in range(arrival.number() % 8)]

    what = arrival.number() % 4
    if what == 1:
        message = arrival.rest()
    elif what == 2:
        message = msgpack.packb(value())
    else:
        told = [{"type": kinds[arrival.number() % 4], "block_hashes": value(3), **dict(_pairs(names, value, arrival))}]
        message = msgpack.packb([1.5, told + [value(1) for _ in range(arrival.number() % 3)]])
    with contextlib.suppress(MalformedEvents):
        batch = unpacked(message)
        for event in batch.events:
            assert all(isinstance(item, int | bytes) for item in getattr(event, "block_hashes", []))
            assert all(isinstance(item, int) for item in getattr(event, "token_ids", []))
        assert len(unpacked(packed(batch)).events) == len(batch.events)


def _pairs(names: Sequence[str], value: Callable[[int], Any], arrival: Arrival) -> list[tuple[str, Any]]:
    return [(names[arrival.number() % 8], value(3)) for _ in range(arrival.number() % 6)]


def bundle(data: bytes) -> None:
    """A file of `kvstore export` whose checksums are right: its files are written, none of them elsewhere."""
    import small_stores
    import xxhash

    from kvstore.errors import CorruptStore
    from kvstore.tiers.disk.fs import FileSystem
    from kvstore.transfer import bundle as module

    arrival = Arrival(data)
    names = (
        "store.json", "catalog/data.mdb", "segments/00000001.seg", "profiles/a", "profiles/.", "profiles/..",
        "../store.json", "/etc/passwd", "segments/../x", "",
    )  # fmt: skip
    rows: list[Any] = []
    damage = arrival.number()
    for _ in range(arrival.number() % 6):
        name: Any = names[arrival.number() % len(names)]
        kind = arrival.number() % 8
        if kind == 1:
            name = arrival.take(arrival.number() % 100).decode("latin-1")
        size: Any = arrival.number(2)
        if kind in (2, 3, 4):
            size = (arrival.number(8), -size, (None, "7", 1e400, 2.5, [1], True)[size % 6])[kind - 2]
        rows.append([name, size] if kind != 5 else name)
    head = json.dumps({"files": rows}).encode()
    if arrival.number() % 8 == 1:
        head = arrival.take(arrival.number())
    made = module.MAGIC + struct.pack("<I", len(head)) + head + xxhash.xxh3_128_digest(head)
    count = 0
    while arrival.more() and count < 20:
        number, offset = arrival.number() % 7, arrival.number(2 if arrival.number() % 8 else 8)
        content = arrival.take(arrival.number())
        piece = module._PIECE.pack(number, len(content), offset) + content
        made += piece + xxhash.xxh3_128_digest(piece)
        count += 1
    piece = module._PIECE.pack(module._END, 0, count)
    made += piece + xxhash.xxh3_128_digest(piece)
    if damage % 4 == 1:
        made = made[: max(0, len(made) - damage // 4)]
    elif damage % 4 == 2:
        made = made[: damage // 4] + b"\xff" + made[damage // 4 + 1 :]
    with small_stores.scratch() as scratch:
        (scratch / "bundle").write_bytes(made)
        with contextlib.suppress(CorruptStore):
            module.unpack(FileSystem(), str(scratch / "bundle"), str(scratch / "store"))
            for name, size in rows:
                assert damage % 4 == 2 or (scratch / "store" / name).stat().st_size == int(size)
        assert {path.name for path in scratch.iterdir()} <= {"bundle", "store"}
        for path in (scratch / "store").rglob("*"):
            assert path.is_dir() or module._NAME.fullmatch(os.path.relpath(path, scratch / "store")), path


def shared(data: bytes) -> None:
    """A message of another process of the same user, and what is not one."""
    import socket

    from kvstore.shared.wire import Disconnected, receive

    arrival = Arrival(data)
    kind, other = arrival.number() % 8, arrival.number(4)
    body = arrival.rest()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(5)
        ours.sendall((struct.pack("<4sI", b"kvs1", other if kind == 1 else len(body)) if kind else b"") + body)
        ours.close()
        with contextlib.suppress(Disconnected):
            while True:
                message, fd = receive(theirs)
                assert isinstance(message, dict)
                assert fd is None


TARGETS: dict[str, Callable[[bytes], None]] = {
    "whole_file": whole_file, "resp": resp, "llama": llama, "gguf": gguf, "events": events, "bundle": bundle,
    "shared": shared,
}  # fmt: skip
