"""From prefill to decode: a cache sent from one process to another over a socket, raw and coded with splitzip.

The cache goes in chunks of 2 MiB. Overlapped, the sender codes the next chunk while it sends this one, and the receiver
decodes what came while it receives the next; `in-turn` codes all, sends all, decodes all. The line is a TCP connection
of the same machine behind a token bucket of 1, 10 or 100 Gbit/s, or none. Seconds run from before the first chunk is
coded until the receiver has the last one decoded; both processes read the same clock. What came is compared by SHA-256.

Two processes with two threads each share the machine's cores with the kernel's copies. Where `unpaced/raw` is slower
than the line, the processor is what is measured and not the line.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import queue
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.codecs.splitzip.codec import bound_values, decode_values, encode_values

if TYPE_CHECKING:
    from benchmarks.peers.codecs.data import RealKV
    from benchmarks.published.paper import Paper

CHUNK = 1 << 20  # values
SLICE = 256 << 10  # bytes that the bucket is asked for at once
DEPTH = 1 << 20  # bytes that may be sent without a pause
AHEAD = 1  # coded chunks that wait to be sent, while one is sent and one is being made
RATES = {"1Gbit": 1e9 / 8, "10Gbit": 1e10 / 8, "100Gbit": 1e11 / 8, "unpaced": None}
MODES = ("raw", "splitzip", "splitzip-in-turn")
DTYPE = "bfloat16"
ROUNDS = 5
PUBLISHED = 1.32  # times faster than raw, at most

_HEADER = struct.Struct("<II")  # bytes of a chunk, whether it is raw
_ORDER = struct.Struct("<I?")  # chunks to come, and whether they are decoded when all are there; 0: the end
_DONE = struct.Struct("<q32s")  # when, in ns; SHA-256 of everything


class Bucket:
    """Lets `rate` bytes a second pass, and `DEPTH` at once; all of them where it is None."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._tokens, self._then = rate, float(DEPTH), time.monotonic()

    def take(self, count: int) -> None:
        """Waits until `count` bytes may have passed."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._tokens = min(float(DEPTH), self._tokens + (now - self._then) * self._rate) - count
        self._then = now
        if self._tokens < 0:
            time.sleep(-self._tokens / self._rate)


def run(paper: Paper, kv: RealKV, quick: bool = False) -> None:
    """Rows of every mode at every rate, in turns: the median of five rounds."""
    values = kv.values[: len(kv.values) // CHUNK * CHUNK]
    seconds: dict[tuple[str, str], list[float]] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(server.getsockname()[1],))
        receiver.start()
        try:
            with server.accept()[0] as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sender = Sender(line, values)
                for number in range((2 if quick else ROUNDS) + 1):
                    for rate, limit in RATES.items():
                        for mode in MODES:
                            spent = sender.send(mode, limit)
                            if number:  # the first touches the memory
                                seconds.setdefault((rate, mode), []).append(spent)
                line.sendall(_ORDER.pack(0, False))
        finally:
            receiver.join(10)
            receiver.kill()
    found = {key: statistics.median(times) for key, times in seconds.items()}
    for (rate, mode), spent in found.items():
        case = f"transfer/{rate}/{mode}"
        paper.row(case, "transfer_s", spent, "s")
        paper.row(case, "raw_GBps", values.nbytes / spent / 1e9, "GB/s")
        if limit := RATES[rate]:
            paper.row(case, "share_of_line", values.nbytes / limit / spent, "share")
        if mode != "raw":
            times = found[rate, "raw"] / spent
            paper.row(case, "speedup", times, "x", PUBLISHED)


@dataclass
class _Chunk:
    data: memoryview
    raw: bool


class Sender:
    def __init__(self, line: socket.socket, values: np.ndarray) -> None:
        self._line = line
        self._chunks = np.split(values, len(values) // CHUNK)
        self._digest = hashlib.sha256(values.view(np.uint8)).digest()
        bound = bound_values(CHUNK, DTYPE)
        self._buffers = [np.full(bound, 1, np.uint8) for _ in self._chunks]

    def send(self, mode: str, rate: float | None) -> float:
        """Seconds until the receiver has everything. Ends the program if it has something else."""
        self._line.sendall(_ORDER.pack(len(self._chunks), mode == "splitzip-in-turn"))
        begin, bucket = time.monotonic_ns(), Bucket(rate)
        for chunk in {"raw": self._raw, "splitzip": self._ahead, "splitzip-in-turn": self._first}[mode]():
            self._line.sendall(_HEADER.pack(len(chunk.data), chunk.raw))
            for at in range(0, len(chunk.data), SLICE):
                part = chunk.data[at : at + SLICE]
                bucket.take(len(part))
                self._line.sendall(part)
        end, digest = _DONE.unpack(_exactly(self._line, _DONE.size))
        if digest != self._digest:
            raise SystemExit(f"transfer: {mode}: what came is not what was sent")
        return float(end - begin) / 1e9

    def _raw(self) -> Iterator[_Chunk]:
        for values in self._chunks:
            yield _Chunk(memoryview(values).cast("B"), True)

    def _first(self) -> Iterator[_Chunk]:
        return iter([self._coded(number) for number in range(len(self._chunks))])

    def _ahead(self) -> Iterator[_Chunk]:
        """Coded by a thread that is at most two chunks ahead."""
        ready: queue.Queue[_Chunk | None] = queue.Queue(AHEAD)

        def work() -> None:
            for number in range(len(self._chunks)):
                ready.put(self._coded(number))
            ready.put(None)

        worker = Thread(target=work)
        worker.start()
        yield from iter(ready.get, None)
        worker.join()

    def _coded(self, number: int) -> _Chunk:
        out = self._buffers[number]
        return _Chunk(memoryview(out)[: encode_values(self._chunks[number], DTYPE, out=out)], False)


def receive(port: int) -> None:
    """The other process: takes what is sent until an order of nothing."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        memory: list[np.ndarray] = []
        while (order := _ORDER.unpack(_exactly(line, _ORDER.size)))[0]:
            count, late = order
            if not memory:
                memory = [np.ones((count, CHUNK), np.uint16), np.ones((count, bound_values(CHUNK, DTYPE)), np.uint8)]
            target, coded = memory
            target.fill(1)
            _take(line, count, late, target, coded)
            done = time.monotonic_ns()
            line.sendall(_DONE.pack(done, hashlib.sha256(target.view(np.uint8)).digest()))


def _take(line: socket.socket, count: int, late: bool, target: np.ndarray, coded: np.ndarray) -> None:
    """Receives chunks; another thread decodes them as they come, or all when all are there."""
    come: queue.Queue[Callable[[], Any] | None] = queue.Queue()

    def work() -> None:
        while call := come.get():
            call()

    worker = Thread(target=work)
    if not late:
        worker.start()
    for number in range(count):
        size, raw = _HEADER.unpack(_exactly(line, _HEADER.size))
        into = memoryview(target[number]).cast("B") if raw else memoryview(coded[number])[:size]
        at = 0
        while at < size:
            at += line.recv_into(into[at:])
        if not raw:
            come.put(lambda number=number, size=size: decode_values(coded[number, :size], DTYPE, target[number]))
    come.put(None)
    if late:
        worker.start()
    worker.join()


def _exactly(line: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = line.recv(count - len(found))
        if not part:
            raise SystemExit("transfer: the other process has ended")
        found += part
    return bytes(found)
