"""The rANS kernels in triton's interpreter against the CPU's coder: `python interpreted_rans.py GROUP...`.

The interpreter is chosen before triton is imported, for a whole process; its programs run one after the other.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import kernelgroups
import numpy as np
import pytest
import torch
from ranscases import U8, random_freqs, random_symbols

from kvstore.codecs.rans.coder import RansTables
from kvstore.codecs.rans.kernels.launch import (
    STATUS_BAD_SYMBOL,
    STATUS_NO_ROOM,
    DeviceDecoder,
    DeviceTables,
    Encoded,
    encode,
)
from kvstore.errors import CodecError

GUARD = 0xA5


@dataclass
class Message:
    """Streams of the same number of parts, all of whose symbols lie in one array, in a random order."""

    tables: RansTables
    lengths: list[list[int]]  # [streams][parts]
    symbols: U8
    classes: U8
    places: torch.Tensor

    @property
    def device_tables(self) -> DeviceTables:
        return DeviceTables(self.tables, "cpu")

    def of(self, array: U8, stream: int) -> list[U8]:
        return [array[first : first + count] for first, count in self.places[stream].tolist()]

    def on_cpu(self) -> list[tuple[bytes, list[int]]]:
        streams = range(len(self.lengths))
        return [self.tables.encode_parts(self.of(self.symbols, s), self.of(self.classes, s)) for s in streams]


def make(seed: int, lengths: list[list[int]], *, bits: int = 12, tables: int = 9) -> Message:
    random = np.random.default_rng(seed)
    freqs = random_freqs(random, tables, bits)
    flat = np.array(lengths, np.int64).reshape(-1)
    gaps = random.integers(0, 5, len(flat))
    order = random.permutation(len(flat))
    firsts = np.empty(len(flat), np.int64)
    firsts[order] = np.cumsum((flat + gaps)[order]) - flat[order]
    classes = random.integers(0, tables, int((flat + gaps).sum()), dtype=np.uint8)
    places = np.stack([firsts, flat], axis=-1).reshape(len(lengths), -1, 2)
    symbols = random_symbols(random, freqs, classes, len(classes))
    return Message(RansTables(freqs, bits), lengths, symbols, classes, torch.from_numpy(places))


def rooms_of(sizes: Sequence[int], between: int = 6) -> torch.Tensor:
    begins = itertools.accumulate((size + between for size in sizes), initial=between)
    return torch.tensor([[begin, size] for begin, size in zip(begins, sizes, strict=False)], dtype=torch.int64)


def encoded(message: Message, rooms: torch.Tensor) -> tuple[torch.Tensor, Encoded]:
    """Everything outside the rooms is untouched."""
    out = torch.full((int(rooms.sum(1).max()) + 6,), GUARD, dtype=torch.uint8)
    done = encode(
        message.device_tables,
        torch.from_numpy(message.symbols),
        torch.from_numpy(message.classes),
        message.places,
        out,
        rooms,
    )
    rest = np.ones(len(out), bool)
    for begin, size in rooms.tolist():
        rest[begin : begin + size] = False
    assert (out.numpy()[rest] == GUARD).all()
    return out, done


def decoded(
    message: Message, payload: torch.Tensor, streams: torch.Tensor, launches: Sequence[slice] = (slice(None),)
) -> tuple[U8, list[int]]:
    """Everything outside the parts' places is untouched."""
    decoder = DeviceDecoder(message.device_tables, payload, streams)
    symbols = torch.full((len(message.symbols),), GUARD, dtype=torch.uint8)
    for parts in launches:
        places = message.places[:, parts].contiguous()
        status = decoder.parts(torch.from_numpy(message.classes), places, symbols)
    rest = np.ones(len(symbols), bool)
    for first, count in message.places.reshape(-1, 2).tolist():
        rest[first : first + count] = False
    assert (symbols.numpy()[rest] == GUARD).all()
    return symbols.numpy(), status.tolist()


def check(message: Message) -> None:
    expected = message.on_cpu()
    totals = [sum(lengths) for lengths in message.lengths]
    out, done = encoded(message, rooms_of([RansTables.bound(total) + 4 for total in totals]))
    assert done.status.tolist() == [0] * len(expected)
    for (begin, size), after, (stream, ends) in zip(done.streams.tolist(), done.after.tolist(), expected, strict=True):
        assert out[begin : begin + size].numpy().tobytes() == stream
        if stream:
            assert [size - bytes_after for bytes_after in after] == ends
    parts = message.places.shape[1]
    at_once, one_by_one = [slice(None)], [slice(i, i + 1) for i in range(parts)]
    for launches in [at_once, one_by_one][: 1 + (parts > 1)]:
        symbols, status = decoded(message, out, done.streams, launches)
        assert status == [0] * len(expected)
        for stream in range(len(expected)):
            for found, right in zip(message.of(symbols, stream), message.of(message.symbols, stream), strict=True):
                assert np.array_equal(found, right)


def lengths() -> None:
    for bits in (11, 12):
        check(make(bits, [[n] for n in (0, 1, 2, 31, 32, 33, 63, 64, 65, 500)], bits=bits))
        check(make(bits, [[40, 0, 64, 7], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 100]], bits=bits))
    check(make(3, [[2000]], tables=200))
    check(make(4, [[96] * 12]))


def divisions() -> None:
    """Quotients by a reciprocal: every kind of frequency, states of all sizes."""
    for bits in (11, 12):
        every = 1 << bits
        rows = [[low, every - low] for low in range(1, every, every // 120)] + [[every - 1, 1], [1, every - 1]]
        freqs = np.pad(np.array(rows, np.uint16), ((0, 0), (0, 254)))
        random = np.random.default_rng(bits)
        classes = np.resize(np.arange(len(rows), dtype=np.uint8), 2500)
        symbols = random.integers(0, 2, 2500, dtype=np.uint8)
        check(Message(RansTables(freqs, bits), [[2500]], symbols, classes, torch.tensor([[[0, 2500]]])))


def refusals() -> None:
    """Rooms to the byte, symbols that have no code, classes that have no table; the streams beside are right."""
    message = make(5, [[40, 64, 7]] * 4, tables=4)
    expected = message.on_cpu()
    sizes = [len(stream) for stream, _ in expected]
    for less in (0, 2, 60, max(sizes)):
        room = [max(0, size - less * (number == 1)) for number, size in enumerate(sizes)]
        out, done = encoded(message, rooms_of(room))
        assert done.status.tolist() == [0, STATUS_NO_ROOM * (less > 0), 0, 0]
        for number, (begin, size) in enumerate(done.streams.tolist()):
            right = b"" if less > 0 and number == 1 else expected[number][0]
            assert out[begin : begin + size].numpy().tobytes() == right
    # Rooms that are none.
    full = rooms_of(sizes)
    for begin, size in ((-2, 500), (1, 500), (0, -2), (0, 1 << 40), (1 << 40, 500), (-(1 << 63), 500)):
        rooms = full.clone()
        rooms[2] = torch.tensor([begin, size])
        out = torch.full((int(full.sum(1).max()),), GUARD, dtype=torch.uint8)
        arrays = torch.from_numpy(message.symbols), torch.from_numpy(message.classes)
        done = encode(message.device_tables, *arrays, message.places, out, rooms)
        assert done.status.tolist() == [0, 0, STATUS_NO_ROOM, 0]
        first, count = full[2].tolist()
        assert (out[first : first + count] == GUARD).all()
    tables = RansTables(np.array([[1024, 1024, 0]], np.uint16), 11)
    zeros = np.zeros(200, np.uint8)
    places = torch.tensor([[[0, 70]], [[70, 70]], [[140, 60]]])
    for place, symbol, klass in ((70, 2, 0), (100, 255, 0), (139, 2, 0), (70, 0, 1), (139, 0, 255)):
        symbols, classes = zeros.copy(), zeros.copy()
        symbols[place], classes[place] = symbol, klass
        wrong = Message(tables, [[70], [70], [60]], symbols, classes, places)
        _, done = encoded(wrong, rooms_of([300] * 3))
        assert done.status.tolist() == [0, STATUS_BAD_SYMBOL, 0]
        assert done.streams[:, 1].tolist()[1] == 0


def hostile() -> None:
    """Damage is noticed where the CPU notices it, and what the CPU decodes is decoded alike. Nothing beyond the payload
    is read: it ends where unreadable memory begins."""
    message = make(6, [[30, 40, 20]], tables=5)
    ((stream, _),) = message.on_cpu()
    room = 2 * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + room), mmap.PAGESIZE, 0) == 0
    random = np.random.default_rng(0)
    cases = [stream, b"", stream + b"\0\0", stream + b"\xff" * 100, stream[:127], stream[:-1], stream[1:]]
    cases += [stream[:length] for length in (2, 64, 126, *range(128, len(stream), 6), len(stream) - 2)]
    for bit in random.permutation(8 * len(stream))[:40].tolist():
        bad = bytearray(stream)
        bad[bit // 8] ^= 1 << (bit % 8)
        cases.append(bytes(bad))
    for state in (0, (1 << 15) - 1, 1 << 15, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
        for word in (0, 0xFFFF):
            cases += [
                np.full(32, state, "<u4").tobytes() + np.full(words, word, "<u2").tobytes() for words in (0, 31, 500)
            ]
    refused = 0
    for case in cases:
        size = len(case) + len(case) % 2  # the payload begins at an even address
        payload = torch.from_numpy(np.frombuffer(memory, np.uint8, size, room - size))
        payload.numpy()[: len(case)] = np.frombuffer(case, np.uint8)
        found, status = decoded(message, payload, torch.tensor([[0, len(case)]]))
        decoder = message.tables.decoder(case)
        try:
            right = [decoder.part(c, len(c)) for c in message.of(message.classes, 0)]
            decoder.finish()
        except CodecError:
            refused += 1
            assert status == [1]
        else:
            assert status == [0]
            assert all(np.array_equal(a, b) for a, b in zip(message.of(found, 0), right, strict=True))
    assert len(cases) - 20 < refused < len(cases)
    # Streams that are not in the payload.
    size = len(stream)
    payload = torch.from_numpy(np.frombuffer(memory, np.uint8, size, room - size))
    payload.numpy()[:] = np.frombuffer(stream, np.uint8)
    assert decoded(message, payload, torch.tensor([[0, size]]))[1] == [0]
    for place in ((2, size), (-2, size), (1, size - 1), (0, 1 << 33), (1 << 62, size), (0, -2), (-(1 << 63), size)):
        assert decoded(message, payload, torch.tensor([place]))[1] == [1]
    # A class without a table.
    message.classes[message.places[0, 1, 0]] = 255
    assert decoded(message, payload, torch.tensor([[0, size]]))[1] == [1]
    # A stream of no symbols is one of no bytes.
    nothing = make(7, [[0, 0]])
    assert decoded(nothing, torch.empty(0, dtype=torch.uint8), torch.tensor([[0, 0]]))[1] == [0]
    at_rest = torch.from_numpy(np.full(32, 1 << 15, "<u4").view(np.uint8))
    assert decoded(nothing, at_rest, torch.tensor([[0, 128]]))[1] == [1]
    zeros = np.zeros(9, np.uint8)
    certain = Message(RansTables(np.array([[2048]], np.uint16), 11), [[9]], zeros, zeros, torch.tensor([[[0, 9]]]))
    assert decoded(certain, at_rest, torch.tensor([[0, 128]]))[1] == [0]
    assert decoded(certain, at_rest, torch.tensor([[0, 0]]))[1] == [1]


def arguments() -> None:
    message = make(8, [[40]])
    tables, places = message.device_tables, message.places
    data = torch.zeros(400, dtype=torch.uint8)
    rooms = torch.tensor([[0, 400]])
    good = (data[:40], data[:40].clone(), places, data.clone(), rooms)
    for index, other in [
        (0, data[:80:2]),
        (0, data[:39]),
        (1, data[:40].int()),
        (2, places[0]),
        (2, places.int()),
        (2, places.repeat(2, 1, 1)),
        (3, data[1:]),
        (3, data.to("meta")),
        (4, rooms.repeat(1, 2)),
    ]:
        with pytest.raises(CodecError, match="rans"):
            encode(tables, *(other if i == index else value for i, value in enumerate(good)))  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="even"):
        DeviceDecoder(tables, data[1:], rooms)
    with pytest.raises(CodecError, match="streams"):
        DeviceDecoder(tables, data, places)
    assert DeviceDecoder(tables, data, rooms[:0]).parts(data[:40], places[:0], data[40:80]).shape == (0,)


if __name__ == "__main__":
    kernelgroups.run({f.__name__: f for f in (lengths, divisions, refusals, hostile, arguments)})
