"""The ways to code an array of values: splitzip's kernels, blocks as the store cuts them, a peer's tensors.

Each codes everything at construction, into memory that it keeps, and holds what it made for `decode`. `target` is an
array like the values, which decoding mutates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from benchmarks.peers.codecs.base import Bytes, CodecPeer
from benchmarks.peers.codecs.data import Values
from kvstore.codecs import BlockInfo, Codec, KVView
from kvstore.codecs.delta import DeltaCodec, DonorRows
from kvstore.codecs.donor.spans import Span
from kvstore.core.record import padded, payload_offset

Blocks = list[tuple[BlockInfo, KVView]]
PARTS_PER_THREAD = 4


class Coder(Protocol):
    def encode(self) -> float | None:
        """Codes all of it. Returns the seconds that count, if they are not those of the whole call."""

    def decode(self) -> None:
        """Decodes all of it."""

    def coded_bytes(self) -> int: ...

    def restore(self) -> None:
        """As `decode`, and what came out lies in the target."""


class Kernels:
    """splitzip's kernels, one call an array. level: "scalar", "avx2", "avx512", or None for the best."""

    def __init__(self, parts: Sequence[Values], targets: Sequence[Values], dtype: str, level: str | None) -> None:
        from kvstore.codecs.splitzip.codec import bound_values, decode_values, encode_values

        self._encode, self._decode = encode_values, decode_values
        self._dtype, self._level = dtype, level
        self._parts, self._targets = parts, targets
        self._out = [touched(bound_values(len(part), dtype)) for part in parts]
        self._sizes = [0] * len(parts)
        self.encode()

    def encode(self) -> None:
        for number, (part, out) in enumerate(zip(self._parts, self._out, strict=True)):
            self._sizes[number] = self._encode(part, self._dtype, level=self._level, out=out)

    def decode(self) -> None:
        for target, out, size in zip(self._targets, self._out, self._sizes, strict=True):
            self._decode(out[:size], self._dtype, target, level=self._level)

    restore = decode

    def coded_bytes(self) -> int:
        return sum(self._sizes)


class StoreBlocks:
    """A codec of the project on blocks of all layers, by `threads` workers of `pool`; by the caller without one."""

    def __init__(
        self, codec: Codec, blocks: Blocks, targets: Blocks, pool: ThreadPoolExecutor | None, threads: int = 1
    ) -> None:
        self._codec, self._blocks, self._targets, self._pool = codec, blocks, targets, pool
        bounds = [codec.bound(info) for info, _ in blocks]
        memory, ends = memoryview(touched(sum(bounds))), np.cumsum(bounds).tolist()
        self._slots = [memory[end - bound : end] for bound, end in zip(bounds, ends, strict=True)]
        self._sizes: list[tuple[int, ...]] = [()] * len(blocks)
        count = PARTS_PER_THREAD * threads if pool else 1
        self._parts = [part.tolist() for part in np.array_split(np.arange(len(blocks)), count)]
        self.encode()

    def encode(self) -> None:
        self._all(self._encode_part)

    def decode(self) -> None:
        self._all(self._decode_part)

    restore = decode

    def coded_bytes(self) -> int:
        return sum(map(sum, self._sizes))

    def record_bytes(self) -> int:
        """Of the whole records, as segments hold them."""
        rows = zip(self._blocks, self._sizes, strict=True)
        return sum(padded(payload_offset(len(sizes), info.count) + sum(sizes)) for (info, _), sizes in rows)

    def _all(self, work: Callable[[list[int]], None]) -> None:
        if self._pool is None:
            work(self._parts[0])
        else:
            list(self._pool.map(work, self._parts))

    def _encode_part(self, numbers: list[int]) -> None:
        for number in numbers:
            info, view = self._blocks[number]
            sizes = self._codec.encode(info, view, self._slots[number])
            if sizes is None:
                raise RuntimeError(f"{self._codec.name}: {len(self._slots[number])} bytes, its bound, did not do")
            self._sizes[number] = sizes

    def _decode_part(self, numbers: list[int]) -> None:
        for number in numbers:
            info, target = self._targets[number]
            sizes = self._sizes[number]
            self._codec.decode(info, self._slots[number][: sum(sizes)], sizes, target)


class Members:
    """The donor codec on blocks whose rows all stand in donors: the same tokens behind another beginning.

    donors: of each block. shift: how much further its tokens stand than the donor's.
    """

    def __init__(
        self, codec: DeltaCodec, blocks: Blocks, donors: Sequence[KVView], shift: int, targets: Blocks
    ) -> None:
        self._codec, self._blocks, self._donors, self._targets = codec, blocks, donors, targets
        self._rows = [
            [DonorRows.of(Span(0, info.count, 0, 0, shift), donor)]
            for (info, _), donor in zip(blocks, donors, strict=True)
        ]
        self._out = [memoryview(touched(codec.bound(info))) for info, _ in blocks]
        self._sizes: list[tuple[int, ...]] = [()] * len(blocks)
        self.encode()

    def encode(self) -> None:
        for number, (info, view) in enumerate(self._blocks):
            sizes = self._codec.encode(info, view, self._rows[number], self._out[number])
            if sizes is None:
                raise RuntimeError(f"donor: {len(self._out[number])} bytes, its bound, did not do")
            self._sizes[number] = sizes

    def decode(self) -> None:
        for number, (info, target) in enumerate(self._targets):
            sizes = self._sizes[number]
            self._codec.decode(info, self._out[number][: sum(sizes)], sizes, [self._donors[number]], target)

    restore = decode

    def coded_bytes(self) -> int:
        return sum(map(sum, self._sizes))


class PeerTensors:
    """A peer, one call a tensor. What it returns is dropped at once, so that it gets the same warm memory again."""

    def __init__(self, peer: CodecPeer, parts: Sequence[Values], targets: Sequence[Values]) -> None:
        self._peer = peer
        self._parts: list[Bytes] = [part.view(np.uint8) for part in parts]
        self._targets: list[Bytes] = [target.view(np.uint8) for target in targets]
        self._scratch = touched(max(part.nbytes for part in parts)) if peer.mutates_input else None
        self._coded: list[Any] = [peer.encode(self._fresh(part)) for part in self._parts]

    def _fresh(self, part: Bytes) -> Bytes:
        if self._scratch is None:
            return part
        scratch = self._scratch[: len(part)]
        np.copyto(scratch, part)
        return scratch

    def encode(self) -> float:
        seconds = 0.0
        for part in self._parts:
            fresh = self._fresh(part)
            begin = time.perf_counter()
            self._peer.encode(fresh)
            seconds += time.perf_counter() - begin
        return seconds

    def decode(self) -> None:
        for coded, target in zip(self._coded, self._targets, strict=True):
            self._peer.decode(coded, target)

    def restore(self) -> None:
        for coded, target in zip(self._coded, self._targets, strict=True):
            decoded = np.frombuffer(self._peer.decode(coded, target), np.uint8)
            if len(decoded) == len(target):  # else the target stays as it is, and that is noticed
                np.copyto(target, decoded)

    def coded_bytes(self) -> int:
        return sum(map(len, self._coded))


def touched(nbytes: int) -> Bytes:
    """Memory whose pages are there."""
    return np.full(nbytes, 1, np.uint8)
